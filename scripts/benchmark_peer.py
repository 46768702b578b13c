"""Measures TRL 1.12's PPO on one workload, in a process of its own, with that TRL first on PYTHONPATH.

`python benchmark_peer.py WORK.json RESULT.json`. Its train() is one method, so phases are told apart by wrapping the
functions that it calls, from outside. It knows nothing of ppo_lora.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmark_measure import PeakMemory, Phases, TokenCounter, better, lengths, machine_rates, wait, write_result
from benchmark_work import DTYPES, PAD, Work, build_tokenizer, lora_options, model_options, prompt_ids

TRL_VERSION = "1.12.0"
PACKAGES = ("trl", "torch", "transformers", "peft")
_IMPORTED = (LlamaForCausalLM, LlamaForSequenceClassification)  # transformers imports lazily


class Watch(TrainerCallback):
    """Phases, rollouts and tokens of each iteration, from wrapped functions and Trainer's callbacks.

    Sampling begins with the iteration and ends with ``batch_generation``; scoring ends where a forward first wants
    gradients; updating ends with the iteration. The value model's part of updating is the time of its forward, and of
    the joint backward from where the gradient of its last hidden states is there: autograd goes through the policy,
    which came later in the forward, before that. The optimizer's steps, over both, are a part of their own.
    """

    def __init__(self, device: str):
        self.phases = Phases(device)
        self.counter = TokenCounter(lambda _: self.phases.phase or "")
        self.seen: list[dict[str, Any]] = []
        self.rollout: dict[str, list[int]] = {}
        self._device = device
        self._value_seconds = self._optimizer_seconds = 0.0
        self._value_since: float | None = None

    # Trainer's callbacks

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first iteration begins."""
        self.phases.enter("sampling")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An iteration ends, the next begins."""
        seconds = self.phases.pop()
        value, optimizer = self._value_seconds, self._optimizer_seconds
        parts = {"policy_update": seconds["updating"] - value - optimizer, "value_update": value}
        times = {**seconds, **parts, "optimizer": optimizer}
        self.seen.append({"seconds": sum(seconds.values()), **times, "rollout": self.rollout})
        self._value_seconds = self._optimizer_seconds = 0.0
        if len(self.seen) == 1:
            self.counter.reset()
        self.phases.enter("sampling")

    # What train() calls

    def generation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``batch_generation``."""

        def wrapped(model: Any, queries: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = function(model, queries, *args, **kwargs)
            self.rollout = lengths(queries != PAD, result[0][:, queries.shape[1] :] != PAD)
            self.phases.enter("scoring")
            return result

        return wrapped

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward``."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and self.phases.phase == "scoring":
                self.phases.enter("updating")
            return function(*args, **kwargs)

        return wrapped

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``accelerator.backward``."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._end_value()
            return result

        return wrapped

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``optimizer.step``."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = self._time()
            result = function(*args, **kwargs)
            self._optimizer_seconds += self._time() - start
            return result

        return wrapped

    def attach_value(self, backbone: torch.nn.Module) -> None:
        """Time the value model's part of updating."""
        backbone.register_forward_pre_hook(lambda *_: self._begin_value())
        backbone.register_forward_hook(self._value_forward)

    def _value_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._end_value()
            output.last_hidden_state.register_hook(lambda gradient: self._begin_value())

    def _begin_value(self) -> None:
        if self.phases.phase == "updating" or torch.is_grad_enabled():
            self._value_since = self._time()

    def _end_value(self) -> None:
        if self._value_since is not None:
            self._value_seconds += self._time() - self._value_since
            self._value_since = None

    def _time(self) -> float:
        wait(self._device)
        return time.perf_counter()


def configuration(work: Work) -> PPOConfig:
    """The workload as TRL's PPOConfig; all values that ours has too are the same."""
    return PPOConfig(
        output_dir=f"{work.cache}/runs/peer",
        per_device_train_batch_size=work.micro_rows,
        gradient_accumulation_steps=work.prompts // work.micro_rows,
        num_mini_batches=1,
        num_ppo_epochs=work.epochs,
        total_episodes=work.prompts * work.iterations,
        local_rollout_forward_batch_size=work.rollout_rows,
        response_length=work.response_length,
        stop_token="eos",
        temperature=1.0,
        learning_rate=1e-5,
        kl_coef=0.05,
        gradient_checkpointing=work.checkpointing,
        num_sample_generations=0,
        bf16=DTYPES[work.dtype] != DTYPES["float32"],
        use_cpu=work.device == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=work.run_seed,
    )


def scalar_model(work: Work, quantized: bool) -> Any:
    """A full model with one output on the base's weights, as TRL's users give for value and reward."""
    torch.manual_seed(work.seed + 1)
    return AutoModelForSequenceClassification.from_pretrained(
        work.base, num_labels=1, **model_options(work, quantized)
    )


def build(work: Work) -> tuple[PPOTrainer, Watch]:
    """The trainer with its three models, watched. The value model is trained in full, so it is never quantized."""
    watch = Watch(work.device)
    trainer = PPOTrainer(
        args=configuration(work),
        processing_class=build_tokenizer(work.vocab),
        model=AutoModelForCausalLM.from_pretrained(work.base, **model_options(work)),
        ref_model=None,
        reward_model=scalar_model(work, quantized=True),
        value_model=scalar_model(work, quantized=False),
        train_dataset=Dataset.from_dict({"input_ids": prompt_ids(work)}),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora_options()),
        callbacks=[watch],
    )
    for backbone in (trainer.policy_model.get_base_model(), trainer.value_model, trainer.reward_model):
        watch.counter.attach(backbone.model)
    watch.attach_value(trainer.value_model.model)
    ppo_trainer.batch_generation = watch.generation(ppo_trainer.batch_generation)
    ppo_trainer.forward = watch.forward(ppo_trainer.forward)
    trainer.accelerator.backward = watch.backward(trainer.accelerator.backward)
    trainer.optimizer.step = watch.step(trainer.optimizer.step)
    return trainer, watch


def measure(work: Work) -> dict[str, Any]:
    """Train, and return what was seen."""
    rates = machine_rates(work)
    memory = PeakMemory(work.device)
    trainer, watch = build(work)
    trainer.train()
    peak = memory.read()
    return {
        "library": "trl",
        "iterations": watch.seen,
        "padding": watch.counter.counts(),
        "peak_mib": peak,
        "rates": better(rates, machine_rates(work)),
    }


def main(work_file: str, result_file: str) -> None:
    """Measure what `work_file` says and write `result_file`."""
    if trl.__version__ != TRL_VERSION:
        raise SystemExit(f"TRL is {trl.__version__}; expected {TRL_VERSION}, the last with PPO, first on PYTHONPATH.")
    work = Work.load(work_file)
    write_result(result_file, work, measure(work), PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
