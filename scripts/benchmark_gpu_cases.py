"""What scripts/benchmark_gpu.py measures of ppo_lora, a case in a process of its own.

`python benchmark_gpu_cases.py CASE WORK.json RESULT.json`. What was measured is written as soon as it is there: what a
crash leaves is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig
from transformers.utils import logging

from benchmark_gpu_base import GpuWork, Memory
from benchmark_gpu_inference import WARM_UP_TOKENS, passes, sample, shared_base
from benchmark_measure import better, machine_rates, write_result
from benchmark_ours import PACKAGES, build_on, configuration, phase_of
from benchmark_summary import update_rate
from benchmark_work import EOS, PAD, lora_options
from ppo_lora import SharedBase, plan_memory

LIMIT_GIB = 22
"""Of 64 rollouts an iteration: the sampling and scoring batch is the largest that is planned to fit."""
BATCHES = (64, 48, 32, 24, 16, 8, 4)
PLAN_MARGIN, UNPLANNED_BATCH = 0.95, 32
_REASON = 300
_SQUARES = {"cpu": 64, "cuda": 8192}

Result = dict[str, Any]


class PhasePeaks:
    """Peaks by phase, told by the layers as they run.

    Args:
        memory: read where a phase ends.
    """

    def __init__(self, memory: Memory):
        self.gib: dict[str, float] = {}
        self._memory, self._phase = memory, "sampling"

    def phase_of(self, layer_options: dict[str, Any]) -> str:
        """See benchmark_ours."""
        phase = phase_of(layer_options)
        if phase != self._phase:
            self.close()
            self._phase = phase
        return phase

    def close(self) -> None:
        """End the phase of the moment."""
        self.gib[self._phase] = max(self._memory.read(), self.gib.get(self._phase, 0.0))


def planned(work: GpuWork) -> dict[str, Any]:
    """The plan, from configurations alone, in GiB; an ``error`` where there is none, and the run goes on."""
    try:
        plan = plan_memory(
            str(work.base),
            configuration(work),
            peft_config=LoraConfig(task_type="CAUSAL_LM", **lora_options()),
            value_adapter=work.value,
            reward_adapter=str(work.reward_adapter),
            search=False,
        )
    except Exception as error:
        return {"error": f"no plan: {type(error).__name__}: {' '.join(str(error).split())}"[:_REASON]}
    return {"peak": plan.peak / 2**30, **{name: peak / 2**30 for name, peak in plan.phases.items()}}


def fitting(work: GpuWork, limit: float = LIMIT_GIB * PLAN_MARGIN) -> tuple[GpuWork, dict[str, Any]]:
    """The work with the largest sampling and scoring batch that is planned to fit, and its plan.

    Without a plan it is a batch that fits by arithmetic.
    """
    for rows in BATCHES:
        changed = replace(work, rollout_rows=rows)
        plan = planned(changed)
        if "error" in plan:
            return replace(work, rollout_rows=UNPLANNED_BATCH), plan
        if plan["peak"] <= limit:
            break
    return changed, plan


def warm_up(base: SharedBase, work: GpuWork) -> None:
    """A forward and a backward pass of each trained role, and a few sampled tokens, so that no kernel is new."""
    ids = torch.randint(EOS + 1, work.vocab, (work.micro_rows, work.prompt_length), device=base.device)
    mask, response = torch.ones_like(ids), work.prompt_length // 2
    base.generate(ids, mask, max_new_tokens=WARM_UP_TOKENS, pad_token_id=PAD, eos_token_id=EOS)
    base.logprobs("policy", ids, mask, response).sum().backward()
    base.values(ids, mask, response).sum().backward()
    for parameters in base.trainable_parameters().values():
        for parameter in parameters:
            parameter.grad = None


def make_optimizer_state(trainer: Any) -> None:
    """Let the optimizer have its moments, as from the second iteration on; gradients of 0 change nothing."""
    optimizer = trainer.create_optimizer()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train(work: GpuWork, tell: Callable[[Result], None], fit: bool = False) -> None:
    """An iteration of PPO: peaks, plan, seconds by phase, the update's share of the matrix product's rate."""
    work, plan = fitting(work) if fit else (work, planned(work))
    tell({"rows": work.prompts, "rollout_rows": work.rollout_rows, "planned_gib": plan})
    square = _SQUARES[work.device]
    rates = machine_rates(work, square=square)
    memory = Memory(work.device)
    base = shared_base(work)
    tell({"loading_gib": memory.read()})
    peaks = PhasePeaks(memory)
    trainer = build_on(base, work, peaks.phase_of)
    warm_up(base, work)
    make_optimizer_state(trainer)
    trainer.counter.reset()
    memory.read()
    peaks.gib.clear()
    trainer.train()
    peaks.close()
    tell({"peaks_gib": peaks.gib, "peak_gib": max(peaks.gib.values())})
    seen = {"iterations": trainer.iterations.seen, "padding": trainer.counter.counts()}
    rates = better(rates, machine_rates(work, square=square))
    share = update_rate(work, {**seen, "rates": rates}, work.value, work.shape)
    tell({**seen, "rates": rates, "update_rate": share, "seconds": seen["iterations"][-1]["seconds"]})


CASES: dict[str, Callable[[GpuWork, Callable[[Result], None]], None]] = {
    "peak": train,
    "rollouts": lambda work, tell: train(work, tell, fit=True),
    "small": train,
    "sampling": sample,
    "passes": passes,
}


def main(case: str, work_file: str, result_file: str) -> None:
    """Measure a case of what `work_file` says and write `result_file`, each time that something is known."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    work, result = GpuWork.load(work_file), {}

    def tell(news: Result) -> None:
        result.update(news)
        write_result(result_file, work, result, (*PACKAGES, "bitsandbytes"))

    tell({"case": case})
    CASES[case](work, tell)
    tell({"finished": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
