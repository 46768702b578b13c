"""Peaks of real PPO runs, counted in live tensor bytes, and the plan of the same runs.

python tests/measured_memory.py prints the table of docs/memory.md.
"""

from __future__ import annotations

import gc
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from bases import quantization
from builders import tiny_config, tiny_tokenizer
from ppo_lora import MemoryPlan, PPOTrainer, plan_memory
from ppo_lora.live_bytes import LiveBytes
from runs import config as run_config
from runs import count_w5

VOCABULARY = 1024
PHASES = {"sampling": "sampling", "scoring": "scoring", "update": "updating"}
"""The plan's phases and the trainer's."""
PROMPT, RESPONSE = 24, 12
SHAPES = {
    "llama": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_key_value_heads=2),
    "gpt2": dict(n_embd=128, n_layer=2, n_positions=256),
    "gpt_neox": dict(hidden_size=128, intermediate_size=512, num_hidden_layers=2),
    "qwen2": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_key_value_heads=2),
}


def save_model(folder, architecture: str = "llama", **changes) -> str:
    """A small base in a folder."""
    torch.manual_seed(0)
    config = tiny_config(architecture, VOCABULARY, **{**SHAPES[architecture], **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def long_prompts(rows: int, longest: int = PROMPT) -> Dataset:
    """Prompts of two lengths, so that there is padding; most are the longest."""
    lengths = [longest - (9 if row % 4 == 3 else 0) for row in range(rows)]
    texts = [" ".join(f"w{3 + (row + j) % 900}" for j in range(length)) for row, length in enumerate(lengths)]
    return Dataset.from_dict({"prompt": texts})


def plan_config(folder, **changes):
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "max_steps": 2,
        "health_warnings": False,
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
    trainer._collector._stop_token_ids = [-1]  # all responses are of full length
    live.count(_tensors_of(trainer.base))
    enter = trainer._enter
    trainer._enter = lambda phase: (gc.collect(), live.enter_phase(phase), enter(phase))[-1]
    with live:
        trainer.train()
    return live


def planned(model_folder, folder, quantization=None, trainer_options=None, **changes) -> MemoryPlan:
    """The plan of such a run, from configurations alone."""
    args = plan_config(folder, model_init_kwargs={"dtype": "float32"}, **changes)
    return plan_memory(model_folder, args, quantization_config=quantization, search=False, **(trainer_options or {}))


def _tensors_of(base):
    for tensor in (*base.parameters(), *base.buffers()):
        yield tensor
        yield from (value for value in vars(tensor).values() if isinstance(value, torch.Tensor))
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = getattr(state, "state2", None)


def main() -> None:
    """All cases side by side."""
    print("| base | kind | checkpointing | " + " | ".join([*PHASES, "peak"]) + " |")
    print("| --- " * (len(PHASES) + 4) + "|")
    for architecture in ("llama", "gpt2", "gpt_neox", "qwen2"):
        model = save_model(tempfile.mkdtemp(), architecture)
        for kind in ("float32", "nf4", "nf4-double", "int8"):
            for checkpointing in (False, True):
                options = {"gradient_checkpointing": checkpointing}
                plan = planned(model, tempfile.mkdtemp(), quantization(kind), **options)
                live = measured(model, tempfile.mkdtemp(), quantization(kind), **options)
                ratios = [f"{plan.phases[phase] / live.peaks[real]:.3f}" for phase, real in PHASES.items()]
                peak = f"{plan.peak / 2**20:.2f} / {live.peak / 2**20:.2f} MiB = {plan.peak / live.peak:.3f}"
                print(
                    f"| {architecture} | {kind} | {'on' if checkpointing else 'off'} | {' | '.join(ratios)} | {peak} |"
                )


if __name__ == "__main__":
    main()
