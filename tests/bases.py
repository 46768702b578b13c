"""Shared bases on saved tiny models, adapters made with plain PEFT, and models to compare with."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from builders import nf4_config, randomize, tiny_model
from ppo_lora import Adapter, Role, SharedBase

KINDS = ("float32", "nf4")
ALL_KINDS = ("float32", "nf4", "nf4-double", "int8")
RANK = 4

_FOLDER = Path(tempfile.mkdtemp(prefix="ppo_lora_tests_"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


def quantization(kind: str) -> BitsAndBytesConfig | None:
    """The configuration that makes a base of ``kind``."""
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return None if kind == "float32" else nf4_config(double_quantization=kind == "nf4-double")


@cache
def model_folder(architecture: str = "llama", **changes) -> str:
    """A saved tiny model with weights large enough that a wrong position or adapter shows."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDER))
    tiny_model(architecture, **{"initializer_range": 0.1, **changes}).save_pretrained(folder)
    return str(folder)


def plain_model(architecture: str = "llama", kind: str = "float32", auto=AutoModelForCausalLM, **options):
    """The same model without any of ppo_lora."""
    if auto is AutoModelForSequenceClassification:
        options.setdefault("num_labels", 1)
    folder = model_folder(architecture)
    return auto.from_pretrained(folder, quantization_config=quantization(kind), **options).eval()


def lora_config(architecture: str = "llama", **changes) -> LoraConfig:
    """A small adapter on every linear layer."""
    settings = {"r": RANK, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**settings, "fan_in_fan_out": architecture == "gpt2", **changes})


def save_random_adapter(model: PeftModel, seed: int) -> str:
    """A folder with an adapter whose weights are random, those of its saved modules too."""
    randomize([p for name, p in model.named_parameters() if "lora_" in name], seed, scale=0.1)
    randomize([p for name, p in model.named_parameters() if "modules_to_save" in name], seed + 1, scale=0.3)
    folder = tempfile.mkdtemp(dir=_FOLDER)
    model.save_pretrained(folder)
    return folder


@cache
def policy_adapter(architecture: str = "llama", seed: int = 1, **changes) -> str:
    """A folder that plain PEFT wrote: a causal adapter with random weights."""
    return save_random_adapter(get_peft_model(plain_model(architecture), lora_config(architecture, **changes)), seed)


@cache
def reward_adapter(architecture: str = "llama", seed: int = 2, num_labels: int = 1, **changes) -> str:
    """A folder that plain PEFT wrote: a SEQ_CLS adapter with random weights and its head."""
    model = plain_model(architecture, auto=AutoModelForSequenceClassification, num_labels=num_labels)
    config = lora_config(architecture, task_type="SEQ_CLS", modules_to_save=["score"], **changes)
    return save_random_adapter(get_peft_model(model, config), seed)


def make_base(architecture: str = "llama", kind: str = "float32", **options) -> SharedBase:
    """A SharedBase with small fresh adapters, where the options name none."""
    options.setdefault("peft_config", lora_config(architecture))
    return SharedBase.from_pretrained(model_folder(architecture), quantization_config=quantization(kind), **options)


def full_base(architecture: str = "llama", kind: str = "float32", **options) -> SharedBase:
    """All four roles, no two of them alike: policy and value trained away from where they started."""
    options = {"policy": policy_adapter(architecture), "reward": reward_adapter(architecture), **options}
    base = make_base(architecture, kind, **options)
    for seed, role in enumerate((Role.POLICY, Role.VALUE)):
        randomize(base.trainable_parameters()[role], 10 + seed, scale=0.1)
    return base


def flat(tensors) -> torch.Tensor:
    """One vector; every tensor must be there."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def assert_close(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to ``tolerance`` times the largest number expected (or 1, if that is smaller)."""
    torch.testing.assert_close(given, expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item()))


def assert_same_gradient(given, expected, tolerance: float = 1e-5) -> None:
    """Two lists of gradients, the second not all zero, apart by less than ``tolerance`` of their length."""
    given, expected = flat(given), flat(expected)
    assert expected.norm() > 1e-3
    assert (given - expected).norm() <= tolerance * expected.norm()


def assert_same_adapter(given: Adapter, expected: Adapter) -> None:
    """Bit for bit, the head included."""
    assert given.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(given.tensors[key], expected.tensors[key]) for key in expected.tensors)
    assert (given.head is None) == (expected.head is None)
    if expected.head is not None:
        assert given.head.keys() == expected.head.keys()
        assert all(torch.equal(given.head[key], expected.head[key]) for key in expected.head)


def copied(adapter: Adapter) -> Adapter:
    """The adapter with tensors of its own."""
    head = None if adapter.head is None else {part: tensor.clone() for part, tensor in adapter.head.items()}
    return Adapter(adapter.config, {key: tensor.clone() for key, tensor in adapter.tensors.items()}, head, "a copy")
