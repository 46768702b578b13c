"""Merging a tiny adapter with scripts/merge.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file

from bases import lora_config, plain_model
from builders import randomize, tiny_tokenizer

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import merge  # noqa: E402

PROMPTS = ("w5 w9 w12", "w30 w7")


def adapter_folder(folder: Path, architecture: str = "llama", tokenizer=None, **changes) -> Path:
    """A random policy adapter from plain PEFT, which names the saved tiny model as its base, and a tokenizer."""
    model = get_peft_model(plain_model(architecture), lora_config(architecture, **changes))
    randomize([parameter for name, parameter in model.named_parameters() if "lora_" in name], 1, scale=0.1)
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def run(adapter: Path | str, output: Path, *options: str) -> Path:
    given = [
        "--adapter",
        str(adapter),
        "--output_dir",
        str(output),
        "--max_completion_length",
        "12",
        "--prompts",
        *PROMPTS,
    ]
    merge.main([*given, *options])
    return output


def refused(adapter: Path | str, output: Path, *options: str) -> str:
    """The message of a refusal, after which the folder around `output` is as it was."""
    before = everything(output.parent)
    with pytest.raises(SystemExit) as refusal:
        run(adapter, output, *options)
    assert everything(output.parent) == before
    message = str(refusal.value.code)
    assert "\n" not in message and len(message) > 30
    return message


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return {key: tensor for file in Path(folder).glob("*.safetensors") for key, tensor in load_file(file).items()}
