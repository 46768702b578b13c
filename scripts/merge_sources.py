"""What scripts/merge.py is given: the policy adapter, its base, their tokenizer; and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ppo_lora import AdapterSource, hub_errors, read_adapter

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
"""A folder with one of them has a tokenizer; without, transformers may make one up from the model's type."""


@dataclass(frozen=True)
class Policy:
    """An adapter's files on this machine, and the base that it names."""

    source: AdapterSource
    folder: Path
    base: AdapterSource | None


@contextmanager
def user_errors(advice: str) -> Iterator[None]:
    """End the program with one line and `advice` where a library refuses what the user gave."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"{' '.join(str(error).split())} {advice}".strip()) from error


def loading(source: AdapterSource, trust_remote_code: bool) -> dict[str, Any]:
    """Options with which transformers' Auto classes load from there."""
    inside = {"subfolder": source.subfolder} if source.subfolder else {}
    return {"revision": source.revision or "main", "trust_remote_code": trust_remote_code, **inside}


def find_policy(adapter: str) -> Policy:
    """Fetch the adapter and check that it is a policy's.

    Raises:
        SystemExit: it is missing, not LoRA, not in safetensors, or has a head.
    """
    source = AdapterSource.parse(adapter)
    with user_errors("Give --adapter a folder or a Hub id that PEFT, `trl sft` or scripts/ppo.py wrote."):
        read = read_adapter(source)
        # The repository may have changed since: what is merged is what was just checked.
        source = replace(source, revision=read.revision or source.revision)
        config_path = source.find("adapter_config.json")
        assert config_path is not None  # it was just read
        folder = config_path.parent
        config = PeftConfig.from_pretrained(str(folder))
    if read.head is not None or config.task_type not in ("CAUSAL_LM", None):
        raise SystemExit(
            f"The adapter {source} is a {config.task_type} adapter{' with a head' if read.head else ''}; expected a "
            "policy (CAUSAL_LM): value and reward models are not merged. What scripts/ppo.py wrote is a policy, the "
            "folder `value` in it is not."
        )
    named = config.base_model_name_or_path
    return Policy(source, folder, AdapterSource(named, revision=config.revision) if named else None)


def find_base(given: str | None, policy: Policy) -> AdapterSource:
    """The base that was given, else the one that the adapter names.

    Raises:
        SystemExit: neither is there.
    """
    if given:
        return AdapterSource.parse(given)
    if policy.base is None:
        raise SystemExit(f"The adapter {policy.source} does not name its base; give --model_name_or_path.")
    return policy.base


def quantization(base: AdapterSource, trust_remote_code: bool) -> str | None:
    """How the base is quantized; None if it is not.

    Raises:
        SystemExit: it has no configuration that transformers knows.
    """
    advice = "Name the base with --model_name_or_path: a folder, a Hub id, or id@revision."
    with user_errors(advice), hub_errors("base", base.location, base.revision):
        config: Any = AutoConfig.from_pretrained(base.location, **loading(base, trust_remote_code))
    for each in (config, config.get_text_config()):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            # Old bitsandbytes checkpoints do not name their method.
            return found.get("quant_method", "bitsandbytes") if isinstance(found, dict) else found.quant_method.value
    return None


def check_quantization(base: AdapterSource, method: str | None, dequantize: bool) -> None:
    """Refuse to merge into quantized weights.

    Raises:
        SystemExit: the base is quantized and is not to be dequantized, or cannot be, or is not quantized at all.
    """
    if method is None and dequantize:
        raise SystemExit(f"The base {base} is not quantized: leave --dequantize out.")
    if method is not None and not dequantize:
        raise SystemExit(
            f"The base {base} is quantized ({method}): merged into it, the weights would be rounded again and what "
            "the adapter learned would be lost. Name the 16-bit original with --model_name_or_path, or add "
            "--dequantize to merge into the dequantized weights, the very ones that the adapter was trained on."
        )
    if method not in (None, "bitsandbytes"):
        raise SystemExit(
            f"The base {base} is quantized with {method}; --dequantize knows bitsandbytes only. Name the 16-bit "
            "original with --model_name_or_path."
        )


def find_tokenizer(policy: Policy, base: AdapterSource, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of the adapter's folder if it has one, else the base's.

    Raises:
        SystemExit: there is none.
    """
    advice = "Put the base's tokenizer (tokenizer.save_pretrained) into the adapter's or the base's folder."
    places = (policy.source, base)
    source = next((place for place in places if any(place.has(name) for name in TOKENIZER_FILES)), None)
    if source is None:
        raise SystemExit(f"Neither the adapter {policy.source} nor the base {base} has a tokenizer. {advice}")
    with user_errors(advice):
        return AutoTokenizer.from_pretrained(source.location, **loading(source, trust_remote_code))
