"""LoRA adapters and scalar heads: reading them from a folder or the Hub, and writing them back.

Every adapter folder here is a plain PEFT folder. A value or reward adapter is a ``SEQ_CLS`` adapter with its head
(``score.weight``) beside the LoRA tensors, as TRL's RewardTrainer writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from .heads import ScalarHead

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
HEAD_NAMES = ("score", "classifier")
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterSource:
    """Where an adapter comes from: a local folder, or a Hub id with a revision and a subfolder."""

    location: str
    revision: str | None = None
    subfolder: str | None = None

    @classmethod
    def parse(cls, source: str | Path | AdapterSource) -> AdapterSource:
        """Take a folder, ``id`` or ``id@revision``."""
        if isinstance(source, AdapterSource):
            return source
        text = str(source)
        if Path(text).is_dir() or "@" not in text:
            return cls(text)
        location, revision = text.rsplit("@", 1)
        return cls(location, revision)

    def file(self, name: str) -> Path:
        """Local path of one of its files, downloaded where needed.

        Raises:
            ValueError: the folder has no such file.
        """
        folder = Path(self.location)
        if not folder.is_dir():
            return Path(hf_hub_download(self.location, name, revision=self.revision, subfolder=self.subfolder))
        path = folder / (self.subfolder or "") / name
        if not path.is_file():
            found = ", ".join(sorted(p.name for p in path.parent.iterdir())) if path.parent.is_dir() else "nothing"
            raise ValueError(
                f"No {name} in {path.parent} (found: {found}). An adapter is a folder with {CONFIG_NAME} and "
                f"{WEIGHTS_NAME}, as PEFT's save_pretrained or `trl sft` and `trl reward` write it."
            )
        return path

    def __str__(self) -> str:
        return self.location + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Adapter:
    """An adapter's configuration and tensors, PEFT's key names, and the scalar head that came with it, if any."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    head: Mapping[str, Tensor] | None = None
    source: str | None = None

    def scalar_head(self, hidden_size: int) -> ScalarHead:
        """The head as a module.

        Raises:
            ValueError: there is none, it has more than one output, or another hidden size.
        """
        if self.head is None:
            raise ValueError(
                f"The adapter {self.source} has no head weights ({' or '.join(HEAD_NAMES)}), so it cannot score. "
                "Expected a SEQ_CLS adapter whose file holds its head, as `trl reward` writes with "
                "`lora_task_type: SEQ_CLS` and `lora_modules_to_save: [score]`; a head made up at random would give "
                "meaningless scores."
            )
        weight = self.head["weight"]
        if weight.shape[0] != 1:
            raise ValueError(
                f"The head of {self.source} has {weight.shape[0]} outputs; expected 1. Train the reward model with "
                "num_labels=1."
            )
        if weight.shape[1] != hidden_size:
            raise ValueError(
                f"The head of {self.source} is for hidden size {weight.shape[1]}; the base's is {hidden_size}. "
                "Load the base that the adapter was trained on."
            )
        return ScalarHead(weight, self.head.get("bias"))


SHARED, SEPARATE = "shared", "separate"
"""What the value adapter can be besides an adapter: the policy's, or one of its own."""

AdapterLike = str | Path | AdapterSource | Adapter


def read_adapter(source: str | Path | AdapterSource) -> Adapter:
    """Read a LoRA adapter, its head taken apart from its other tensors.

    Args:
        source: a local folder, a Hub id, or ``id@revision``. Only safetensors are read.

    Raises:
        ValueError: files are missing, or it is not a LoRA adapter.
    """
    place = AdapterSource.parse(source)
    raw = json.loads(place.file(CONFIG_NAME).read_text())
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{place} is a {raw.get('peft_type')} adapter; only LoRA adapters can share the base.")
    config = PeftConfig.from_pretrained(str(place.file(CONFIG_NAME).parent))
    tensors = load_file(place.file(WEIGHTS_NAME))
    head_keys = {key: part for key in tensors if (part := _head_part(key))}
    return Adapter(
        config=role_config(config),
        tensors={key: tensor for key, tensor in tensors.items() if key not in head_keys},
        head={part: tensors[key] for key, part in head_keys.items()} or None,
        source=str(place),
    )


def check_words(given: dict[str, AdapterLike | None]) -> None:
    """Refuse "shared" and "separate" for roles other than the value."""
    for role, source in given.items():
        if source in (SHARED, SEPARATE):
            raise ValueError(f"The {role} adapter is {source!r}, which only the value adapter can be; give a folder.")


def read_if_named(source: AdapterLike | None) -> Any:
    """An Adapter from whatever names one; None and the value role's words pass through."""
    if source is None or isinstance(source, Adapter) or source in (SHARED, SEPARATE):
        return source
    return read_adapter(source)


def role_config(config: LoraConfig) -> LoraConfig:
    """The configuration under which an adapter lives on the shared causal base: its head is kept outside PEFT."""
    config = deepcopy(config)
    config.task_type = "CAUSAL_LM"
    config.inference_mode = False
    config.modules_to_save = [name for name in config.modules_to_save or [] if name not in HEAD_NAMES] or None
    return config


def write_adapter(folder: str | Path, adapter: Adapter) -> None:
    """Write an adapter as PEFT does; with a head it becomes a ``SEQ_CLS`` adapter that plain PEFT loads.

    Args:
        folder: made where it does not exist.
        adapter: what to write.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(adapter.config)
    config.inference_mode = True
    tensors = dict(adapter.tensors)
    if adapter.head is not None:
        config.task_type = "SEQ_CLS"
        config.modules_to_save = sorted({*(config.modules_to_save or []), HEAD_NAMES[0]})
        tensors |= {f"{_PREFIX}{HEAD_NAMES[0]}.{part}": tensor for part, tensor in adapter.head.items()}
    config.save_pretrained(str(folder))
    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS_NAME, metadata={"format": "pt"})


def _head_part(key: str) -> str | None:
    """``"weight"`` or ``"bias"`` for a key of the head (``base_model.model.score.weight``), else None."""
    parts = key.removeprefix(_PREFIX).split(".")
    if parts[0] in HEAD_NAMES and parts[-1] in ("weight", "bias") and "lora_A" not in parts and "lora_B" not in parts:
        return parts[-1]
    return None
