"""The GPU memory that a recipe needs, by the README's arithmetic ("How memory divides"): what the heads say."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "EleutherAI/pythia-1b-deduped": (
        "gpt_neox",
        dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=8, vocab_size=50304),
    ),
    "meta-llama/Llama-3.1-8B": (
        "llama",
        dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        ),
    ),
    "Qwen/Qwen2.5-0.5B": (
        "qwen2",
        dict(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
    ),
    "Qwen/Qwen2.5-1.5B": (
        "qwen2",
        dict(
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
    ),
}
SHAPES["meta-llama/Llama-3.1-8B-Instruct"] = SHAPES["meta-llama/Llama-3.1-8B"]
"""Model type and sizes, as the models' public config.json has them."""

OVERHEAD = 1.0
"""GiB for CUDA's context, its libraries' workspaces and fragments."""


def gib_needed(stages: dict[str, dict[str, Any]]) -> float:
    """GiB at the peak of a recipe's largest stage.

    Args:
        stages: the options in sft.yaml, reward.yaml and ppo.yaml, by "sft", "reward" and "ppo".
    """
    return max(_stage_bytes(name, options) for name, options in stages.items()) / 2**30 + OVERHEAD


def _stage_bytes(stage: str, options: dict[str, Any]) -> float:
    kind, sizes = SHAPES[options["model_name_or_path"]]
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # transformers 5.0 does not, on the meta device
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    adapter = sum(options["lora_r"] * (module.in_features + module.out_features) for module in linear)
    base = _base_bytes(sum(parameter.numel() for parameter in model.parameters()), linear, options)
    rows = options["per_device_train_batch_size"]
    if stage == "ppo":
        tokens = options["max_prompt_length"] + options["max_completion_length"]
        sampling = tokens * options["local_rollout_forward_batch_size"] * _cache_bytes(config)
        updating = tokens * rows * _activation_bytes(config, options)
        frozen = sum(role in options for role in ("policy_adapter", "reward_adapter"))  # the reference is a copy
        return base + adapter * (2 * 16 + 4 * frozen) + max(sampling, updating)
    sequences = 2 * rows if stage == "reward" else rows
    return base + 16 * adapter + sequences * options["max_length"] * _activation_bytes(config, options)


def _width(options: dict[str, Any]) -> int:
    return {"bfloat16": 2, "float32": 4}[options["dtype"]]


def _base_bytes(parameters: int, linear: list[nn.Linear], options: dict[str, Any]) -> float:
    quantized = sum(module.weight.numel() for module in linear) if options.get("load_in_4bit") else 0
    return 0.52 * quantized + _width(options) * (parameters - quantized)


def _cache_bytes(config: Any) -> float:
    """A token's keys and values in all layers, bfloat16."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * 2 * config.num_hidden_layers * heads * config.hidden_size / config.num_attention_heads


def _activation_bytes(config: Any, options: dict[str, Any]) -> float:
    """A token's checkpoints, one a layer, and what one layer keeps in bfloat16 while it is recomputed."""
    one_layer = 2 * (16 * config.hidden_size + 6 * config.intermediate_size)
    return _width(options) * config.num_hidden_layers * config.hidden_size + one_layer
