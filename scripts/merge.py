"""Merge a policy adapter into its base: a model of its own, for transformers, vLLM and llama.cpp's converters.

python scripts/merge.py --adapter runs/quickstart/ppo --output_dir merged [--option value ...]

The merged model has to answer test prompts as base and adapter did, or nothing is written. The work is done on the GPU
where there is one; CUDA_VISIBLE_DEVICES= hides it.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft import PeftModel
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from trl import TrlParser

from merge_check import Comparison, answers, compare, comparison_table, encode, read_prompts
from merge_sources import (
    Policy,
    check_quantization,
    find_base,
    find_policy,
    find_tokenizer,
    loading,
    quantization,
    user_errors,
)
from ppo_lora import AdapterSource


@dataclass
class MergeArguments:
    """What to merge into what, how it is checked, and where it goes."""

    adapter: str = field(metadata={"help": "Policy adapter: a folder, a Hub id, or id@revision."})
    output_dir: str = field(metadata={"help": "Where the merged model goes."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "The 16-bit or float32 base: a folder, a Hub id, or id@revision. Default: the adapter's."},
    )
    dtype: str = field(
        default="bfloat16",
        metadata={"help": "Dtype of the merged weights.", "choices": ["bfloat16", "float16", "float32"]},
    )
    dequantize: bool = field(
        default=False,
        metadata={"help": "Merge into the dequantized weights of a base that is saved in 4-bit or 8-bit."},
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "Largest size of one safetensors file."})
    prompts: list[str] | None = field(
        default=None,
        metadata={"help": "Test prompts: a text file with one on each line, or the prompts. A handful is enough."},
    )
    max_completion_length: int = field(default=32, metadata={"help": "Tokens of each test output."})
    tolerate_differences: bool = field(default=False, metadata={"help": "Write the model if outputs differ too."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the model that is in output_dir."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the base."})

    def __post_init__(self) -> None:
        if self.max_completion_length < 1:
            raise ValueError(f"--max_completion_length is {self.max_completion_length}; expected at least 1.")
        split_torch_state_dict_into_shards({}, max_shard_size=self.max_shard_size)  # a ValueError now, not at the end


# Merging


def load_base(base: AdapterSource, dtype: torch.dtype | str, trust_remote_code: bool) -> PreTrainedModel:
    """The base from its safetensors, on the GPU if there is one.

    Raises:
        SystemExit: it cannot be loaded.
    """
    with user_errors("The base has to be a causal language model in safetensors; see --model_name_or_path."):
        model = AutoModelForCausalLM.from_pretrained(
            base.location, dtype=dtype, use_safetensors=True, **loading(base, trust_remote_code), **_placement()
        )
    return model.eval()


def _placement() -> dict[str, Any]:
    return {"device_map": {"": torch.cuda.current_device()}} if torch.cuda.is_available() else {}


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with more tokens than the base's embedding.

    Raises:
        SystemExit: it has.
    """
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise SystemExit(
            f"The tokenizer has {len(tokenizer)} tokens, the base's embedding {rows}. Name the base that the adapter "
            "was trained on with --model_name_or_path."
        )


def attach(model: PreTrainedModel, policy: Policy) -> PeftModel:
    """Put the adapter on the base.

    Raises:
        SystemExit: it does not fit.
    """
    advice = "Name the base that the adapter was trained on with --model_name_or_path."
    with warnings.catch_warnings(), user_errors(f"The adapter {policy.source} does not fit the base. {advice}"):
        warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)  # refused below
        # PEFT asks transformers for a property by its former name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        device = str(model.device)
        peft_model = PeftModel.from_pretrained(model, str(policy.folder), torch_device=device)
        # Loaded once more, because only this way PEFT says what had no place.
        result = peft_model.load_adapter(str(policy.folder), "default", torch_device=device)
    if result.missing_keys or result.unexpected_keys:
        first = (*result.missing_keys, *result.unexpected_keys)[0]
        raise SystemExit(
            f"The adapter {policy.source} does not fit the base: {len(result.missing_keys)} tensors are missing and "
            f"{len(result.unexpected_keys)} have no place (the first: {first}). {advice}"
        )
    return peft_model.eval()


def dequantized(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model with plain weights of `dtype`; `model` is used up.

    Raises:
        SystemExit: its layers were not plain linear ones before they were quantized (GPT-2).
    """
    generation_config = model.generation_config
    model = model.dequantize(dtype=dtype)
    # model.dequantize() leaves the other weights in their dtype, and a model that save_pretrained cannot write
    # (transformers 5.0 to 5.23): it still tries to undo how the quantized file was read.
    with user_errors(f"{type(model).__name__} cannot be dequantized; name the 16-bit original."):
        plain = type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), dtype=dtype, **_placement()
        )
    plain.generation_config = generation_config
    return plain.eval()


def merge(peft_model: PeftModel) -> PreTrainedModel:
    """Add the adapter to the base's weights, in place.

    Raises:
        SystemExit: a merged weight is not finite.
    """
    with user_errors("Use --dtype bfloat16 or float32; if it was one of them, the adapter has diverged."):
        model = peft_model.merge_and_unload(safe_merge=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.tie_word_embeddings and head.weight.data_ptr() != embedding.weight.data_ptr():
        model.config.tie_word_embeddings = False  # the adapter had a head of its own; PEFT 0.18 does not say so
    return model


# What comes out


def check_output_dir(output_dir: Path, overwrite: bool, sources: Sequence[AdapterSource]) -> None:
    """Refuse to write over anything but a model that may be replaced.

    Raises:
        SystemExit: there is something else, or it may not be.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise SystemExit(f"--output_dir {output_dir} is a file; name a folder.")
    if not output_dir.is_dir() or not any(output_dir.iterdir()):
        return
    if not overwrite:
        raise SystemExit(f"--output_dir {output_dir} is not empty; name another, or add --overwrite.")
    for place in (Path.cwd(), *(Path(source.location).resolve() for source in sources)):
        if place.exists() and place.is_relative_to(output_dir):
            raise SystemExit(f"--output_dir {output_dir} holds {place}, which --overwrite would delete; name another.")
    if not (output_dir / "config.json").is_file():
        raise SystemExit(
            f"--output_dir {output_dir} holds something else than a model (no config.json); name another."
        )


ROUNDING = {
    False: "Rounding can do this: use --dtype float32, or add --tolerate_differences if that is close enough for you.",
    True: "Rounding hardly does this in float32, unless the base is 8-bit, which rounds activations too: look at the "
    "outputs above, and add --tolerate_differences only if they are close enough for you.",
}
"""What to do about differing outputs, by whether the merged weights are float32."""


def check_outputs(model: PreTrainedModel, comparisons: Sequence[Comparison], tolerate: bool, console: Console) -> None:
    """Stop where the merged model is not the model that it was made from.

    Raises:
        SystemExit: logits are not finite, or an output differs and that is not tolerated.
    """
    largest = torch.tensor([each.logit_difference for each in comparisons]).max().item()
    console.print(f"largest logit difference: {largest:.3g}", highlight=False)
    if not torch.tensor(largest).isfinite():
        raise SystemExit("Logits are not finite, so nothing was written. Use --dtype bfloat16 or float32.")
    differing = sum(each.first_difference is not None for each in comparisons)
    if not differing:
        return
    found = f"{differing} of {len(comparisons)} outputs differ after merging"
    if not tolerate:
        raise SystemExit(f"{found}, so nothing was written. {ROUNDING[model.dtype == torch.float32]}")
    console.print(f"[yellow]{found}, which is tolerated.[/]", highlight=False)


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: AdapterSource,
    output_dir: Path,
    max_shard_size: str,
) -> None:
    """Write everything to a folder beside `output_dir`, which takes its place when it is complete."""
    partial = output_dir.with_name(f".{output_dir.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        _settle_generation_config(model, partial)
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        for file in partial.glob("*.safetensors"):
            # safetensors 0.8 lets only the owner read; a server may well be somebody else.
            file.chmod((partial / "config.json").stat().st_mode)
        tokenizer.save_pretrained(partial)
        # llama.cpp reads it for some architectures; transformers 5 does not write it again.
        sentencepiece = base.find("tokenizer.model")
        if sentencepiece is not None and not (partial / "tokenizer.model").exists():
            shutil.copyfile(sentencepiece, partial / "tokenizer.model")
        _take_place(partial, output_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _settle_generation_config(model: PreTrainedModel, folder: Path) -> None:
    try:
        model.generation_config.save_pretrained(folder)
    except ValueError:
        # Published with a temperature but without do_sample, which transformers may load but not save.
        model.generation_config.do_sample = True


def _take_place(partial: Path, output_dir: Path) -> None:
    """Rename `partial`; a folder that was there is deleted after it."""
    old = output_dir.with_name(f".{output_dir.name}.old-{os.getpid()}")
    if output_dir.exists():
        output_dir.rename(old)
    try:
        partial.rename(output_dir)
    except OSError:
        if old.exists():
            old.rename(output_dir)
        raise
    shutil.rmtree(old, ignore_errors=True)


def merge_and_compare(
    policy: Policy,
    base: AdapterSource,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Tensor],
    arguments: MergeArguments,
) -> tuple[PreTrainedModel, list[Comparison]]:
    """The merged model, and its answers to the prompts beside those of base + adapter; one model at a time."""
    dtype = getattr(torch, arguments.dtype)
    options = {"max_new_tokens": arguments.max_completion_length, "pad_token_id": tokenizer.pad_token_id}
    # A quantized base keeps its own dtypes: the adapter was trained on it as it is.
    model = load_base(base, "auto" if arguments.dequantize else dtype, arguments.trust_remote_code)
    check_vocabulary(model, tokenizer)
    model = attach(model, policy)
    before = answers(model, prompts, **options)
    if arguments.dequantize:
        model = dequantized(model.unload(), dtype)
        model = attach(model, policy)
    model = merge(model)
    return model, compare(model, before, **options)


def run(arguments: MergeArguments) -> None:
    """Check what was given, merge, check what came of it, write."""
    console = Console()
    policy = find_policy(arguments.adapter)
    base = find_base(arguments.model_name_or_path, policy)
    output_dir = Path(arguments.output_dir).resolve()
    check_output_dir(output_dir, arguments.overwrite, (policy.source, base))
    check_quantization(base, quantization(base, arguments.trust_remote_code), arguments.dequantize)
    tokenizer = find_tokenizer(policy, base, arguments.trust_remote_code)
    with user_errors(""):
        prompts = read_prompts(arguments.prompts)
        encoded = encode(tokenizer, prompts)
    model, comparisons = merge_and_compare(policy, base, tokenizer, encoded, arguments)
    console.print(comparison_table(tokenizer, prompts, comparisons))
    check_outputs(model, comparisons, arguments.tolerate_differences, console)
    with user_errors(""):
        write(model, tokenizer, base, output_dir, arguments.max_shard_size)
    console.print(f"written to {output_dir}", markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and do what it says.

    Raises:
        SystemExit: with one line that says what was wrong.
    """
    parser = TrlParser(MergeArguments)
    with user_errors("See --help."):
        (parsed,) = parser.parse_args_and_config(arguments, fail_with_unknown_args=True)
    try:
        run(parsed)
    except torch.OutOfMemoryError as error:
        raise SystemExit("The GPU is too small for the base; CUDA_VISIBLE_DEVICES= works on the CPU.") from error


if __name__ == "__main__":
    main()
