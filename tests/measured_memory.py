"""Peaks of real PPO runs, counted in live tensor bytes, and the plan of the same runs."""

from __future__ import annotations

import gc

import torch
from builders import tiny_config, tiny_tokenizer
from datasets import Dataset
from runs import config as run_config
from runs import count_w5
from transformers import AutoModelForCausalLM

from ppo_lora import PPOTrainer
from ppo_lora.live_bytes import LiveBytes

VOCABULARY = 1024
PROMPT, RESPONSE = 24, 24
SHAPES = {
    "llama": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_key_value_heads=2),
    "gpt2": dict(n_embd=128, n_layer=3, n_positions=256),
    "gpt_neox": dict(hidden_size=128, intermediate_size=512, num_hidden_layers=3),
    "qwen2": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_key_value_heads=2),
}


def save_model(folder, architecture: str = "llama", **changes) -> str:
    """A small base in a folder; its tokens never end a response."""
    torch.manual_seed(0)
    config = tiny_config(architecture, VOCABULARY, **{**SHAPES[architecture], **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        if head is not model.get_input_embeddings().weight:
            head.zero_()  # all tokens alike: responses that end early are few
    model.save_pretrained(folder)
    return str(folder)


def long_prompts(rows: int, longest: int = PROMPT) -> Dataset:
    """Prompts of many lengths; every fourth is the longest."""
    words = [longest - 3 * (i % 4) for i in range(rows)]
    return Dataset.from_dict({"prompt": [" ".join(f"w{3 + (i + j) % 900}" for j in range(n)) for i, n in enumerate(words)]})


def plan_config(folder, **changes):
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "max_steps": 2,
        "max_prompt_length": PROMPT,
        "max_completion_length": RESPONSE,
        "local_rollout_forward_batch_size": 8,
        **changes,
    }
    return run_config(folder, **settings)


def measured(model_folder, folder, quantization=None, trainer_options=None, **changes) -> LiveBytes:
    """Train for two iterations; the counter of its live tensor bytes."""
    args = plan_config(folder, **changes)
    live = LiveBytes()
    gc.collect()
    trainer = PPOTrainer(
        model_folder,
        count_w5,
        args,
        long_prompts(32),
        processing_class=tiny_tokenizer(VOCABULARY),
        quantization_config=quantization,
        **(trainer_options or {}),
    )
    live.count(_tensors_of(trainer.base))
    enter = trainer._enter
    trainer._enter = lambda phase: (gc.collect(), live.enter_phase(phase), enter(phase))[-1]
    with live:
        trainer.train()
    return live


def _tensors_of(base):
    for tensor in (*base.parameters(), *base.buffers()):
        yield tensor
        yield from (value for value in vars(tensor).values() if isinstance(value, torch.Tensor))
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = getattr(state, "state2", None)
