"""Measures ppo_lora on one workload, in a process of its own: `python benchmark_ours.py WORK.json RESULT.json`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM, TrainerCallback

from benchmark_measure import PeakMemory, TokenCounter, better, machine_rates, write_result
from benchmark_work import DTYPES, Work, build_tokenizer, lora_options, model_options, prompt_texts
from ppo_lora import Experience, PPOConfig, PPOTrainer, SharedBase

PACKAGES = ("ppo_lora", "torch", "transformers", "peft", "trl")
_IMPORTED = (LlamaForCausalLM,)  # transformers imports lazily; before the memory is looked at


class Iterations(TrainerCallback):
    """Seconds between the ends of iterations, what the trainer logged of its phases, and each iteration's rollout."""

    def __init__(self, counter: TokenCounter):
        self.seen: list[dict[str, Any]] = []
        self.rollout: dict[str, list[int]] = {}
        self._counter = counter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """An iteration's end."""
        if logs is None or "loss" not in logs:
            return
        now = time.perf_counter()
        times = {name.removeprefix("time/"): value for name, value in logs.items() if name.startswith("time/")}
        self.seen.append({"seconds": now - self._since, **phases(times), "rollout": self.rollout})
        self._since = now
        if len(self.seen) == 1 and state.global_step < state.max_steps:
            self._counter.reset()


def phases(times: dict[str, float]) -> dict[str, float]:
    """Sampling, scoring, updating, and the update's parts where the trainer tells them."""
    named = {name: times[name] for name in ("sampling", "scoring", "policy_update", "value_update") if name in times}
    return {**named, "updating": times["iteration"] - times["sampling"] - times["scoring"]}


class MeasuredTrainer(PPOTrainer):
    """Tells the lengths of each rollout."""

    iterations: Iterations

    def collect(self, iteration: int) -> Experience:
        """See PPOTrainer."""
        experience = super().collect(iteration)
        responses = experience.response_mask.sum(dim=1)
        prompts = experience.attention_mask.sum(dim=1) - responses
        self.iterations.rollout = {"prompts": prompts.tolist(), "responses": responses.tolist()}
        return experience


def phase_of(layer_options: dict[str, Any]) -> str:
    """Ours caches keys and values in sampling only, and wants gradients in updates only."""
    import torch

    if layer_options.get("past_key_values") is not None:
        return "sampling"
    return "updating" if torch.is_grad_enabled() else "scoring"


def configuration(work: Work) -> PPOConfig:
    """The workload as a PPOConfig."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": work.micro_rows,
        "gradient_accumulation_steps": work.prompts // work.micro_rows,
        "max_tokens_per_micro_batch": work.micro_rows * (work.prompt_length + work.response_length),
        "num_mini_batches": 1,
        "num_ppo_epochs": work.epochs,
        "total_episodes": work.prompts * work.iterations,
        "local_rollout_forward_batch_size": work.rollout_rows,
        "max_completion_length": work.response_length,
        "max_prompt_length": work.prompt_length,
        "temperature": 1.0,
        "gradient_checkpointing": work.checkpointing,
        "bf16": DTYPES[work.dtype] != DTYPES["float32"],
        "use_cpu": work.device == "cpu",
        "startup_checks": "off",
        "health_warnings": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": work.run_seed,
        **work.config,
    }
    if "sync_timings" in {field.name for field in fields(PPOConfig)}:
        options.setdefault("sync_timings", True)
    return PPOConfig(output_dir=f"{work.cache}/runs/ours", **options)


def build(work: Work) -> MeasuredTrainer:
    """All four roles on one base, and the trainer."""
    base = SharedBase.from_pretrained(
        str(work.base),
        value=work.value,
        reward=str(work.reward_adapter),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora_options()),
        **model_options(work),
    )
    return build_on(base, work)


def build_on(base: SharedBase, work: Work, phase: Callable[[dict[str, Any]], str] = phase_of) -> MeasuredTrainer:
    """The trainer on a base that is loaded; ``phase`` tells the phases apart as :func:`phase_of`."""
    counter = TokenCounter(phase)
    counter.attach(base.backbone)
    iterations = Iterations(counter)
    trainer = MeasuredTrainer(
        base,
        args=configuration(work),
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(work)}),
        processing_class=build_tokenizer(work.vocab),
        callbacks=[iterations],
    )
    trainer.iterations, trainer.counter = iterations, counter
    return trainer


def measure(work: Work) -> dict[str, Any]:
    """Train, and return what was seen."""
    rates = machine_rates(work)
    memory = PeakMemory(work.device)
    trainer = build(work)
    loaded = memory.read()
    trainer.train()
    peak = memory.read()
    return {
        "library": "ppo_lora",
        "iterations": trainer.iterations.seen,
        "padding": trainer.counter.counts(),
        "peak_mib": peak,
        "peak_loading_mib": loaded,
        "rates": better(rates, machine_rates(work)),
    }


def main(work_file: str, result_file: str) -> None:
    """Measure what `work_file` says and write `result_file`."""
    work = Work.load(work_file)
    write_result(result_file, work, measure(work), PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
