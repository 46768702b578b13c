"""From what the processes measured to the numbers that are told: medians, shares, floors, ratios. No libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmark_operations import Machine, Rollout, Shape, floors, update
from benchmark_work import LORA_RANK, Work

NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0}
WEIGHT_BYTES = {"nf4": 0.5, "int8": 1.0}
PHASES = ("sampling", "scoring", "policy_update", "value_update", "optimizer", "updating", "other")
WANTED = {
    "fixed": {"separate": 1.4, "shared": 2.0, "memory": 0.40, "rate": 0.85},
    "ragged": {"separate": 2.5, "shared": 3.5, "memory": 0.40, "rate": 0.75},
}
"""What issue 5 wants at the default sizes: times and memory as ratios, the update's share of the product's rate."""


@dataclass(frozen=True)
class Summary:
    """One contender on one workload; each number the median over its processes.

    Attributes:
        name: ``trl``, ``separate`` or ``shared``.
        workload: ``fixed`` or ``ragged``.
        seconds: of an iteration.
        phases: seconds by phase.
        floors: the least seconds by phase, from operations and bytes; empty for the peer.
        tokens_per_second: real tokens, prompts and responses, over the whole iteration.
        peak_mib: above the imported interpreter.
        padding: share of computed tokens that were not real, by phase and in ``all``.
        update_rate: the update's needed operations a second, as a share of a matrix product's.
        rate: that product's operations a second.
        bandwidth: bytes a second of a copy.
        mean_response: tokens.
        tokens: real tokens of an iteration.
        runs: processes.
    """

    name: str
    workload: str
    seconds: float
    phases: dict[str, float]
    floors: dict[str, float]
    tokens_per_second: float
    peak_mib: float
    padding: dict[str, float]
    update_rate: float
    rate: float
    bandwidth: float
    mean_response: float
    tokens: float
    runs: int = 1


def shape_of(work: Work) -> Shape:
    """The shape of a workload's base."""
    return Shape(work.hidden, work.intermediate, work.layers, work.vocab, LORA_RANK)


def machine_of(work: Work, rates: dict[str, float]) -> Machine:
    """The measured machine, with the bytes of the workload's numbers."""
    number = NUMBER_BYTES[work.dtype]
    return Machine(rates["rate"], rates["bandwidth"], number, WEIGHT_BYTES.get(work.quantization, number))


def counted(iterations: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """All but the first, which is warm-up; the only one where there is one."""
    return iterations[1:] or iterations


def padding_shares(counts: dict[str, dict[str, int]]) -> dict[str, float]:
    """Share of computed tokens that were not real, by phase and in ``all``."""
    total = {kind: sum(count[kind] for count in counts.values()) for kind in ("computed", "real")}
    return {phase: 1 - count["real"] / count["computed"] for phase, count in {**counts, "all": total}.items()}


def update_rate(work: Work, result: dict[str, Any], value: str, shape: Shape | None = None) -> float:
    """Operations that the update needed for real tokens, a second, over those of the matrix product.

    Where fewer tokens than the rollout's went through the layers (a row's last predicts nothing), those count.

    Args:
        work: the workload.
        result: of a process.
        value: ``separate``, ``shared`` or ``full``.
        shape: the base's, where it is not a plain Llama of the workload's sizes.
    """
    shape, iterations = shape or shape_of(work), counted(result["iterations"])
    rollouts = [Rollout(**iteration["rollout"]) for iteration in iterations]
    passes = work.epochs * (1 if value == "shared" else 2)
    tokens = passes * sum(rollout.tokens for rollout in rollouts)
    share = min(1.0, result["padding"]["updating"]["real"] / tokens)
    operations = work.epochs * sum(sum(update(shape, rollout, value).values()) for rollout in rollouts)
    seconds = sum(iteration["updating"] for iteration in iterations)
    return share * operations / seconds / result["rates"]["rate"]


def phase_seconds(iteration: dict[str, Any]) -> dict[str, float]:
    """Seconds by phase, and what is in none as ``other``."""
    phases = {name: iteration[name] for name in PHASES if name in iteration}
    known = sum(iteration[name] for name in ("sampling", "scoring", "updating"))
    return {**phases, "other": max(0.0, iteration["seconds"] - known)}


def summarize_run(name: str, work: Work, result: dict[str, Any]) -> Summary:
    """The numbers of one process."""
    iterations = counted(result["iterations"])
    rollouts = [Rollout(**iteration["rollout"]) for iteration in iterations]
    value = "full" if name == "trl" else name
    machine = machine_of(work, result["rates"])
    tokens, seconds = sum(each.tokens for each in rollouts), sum(each["seconds"] for each in iterations)
    floor = [] if name == "trl" else [floors(shape_of(work), each, work.epochs, value, machine) for each in rollouts]
    return Summary(
        name=name,
        workload=work.name,
        seconds=median(each["seconds"] for each in iterations),
        phases=_medians([phase_seconds(each) for each in iterations]),
        floors=_medians(floor),
        tokens_per_second=tokens / seconds,
        peak_mib=result["peak_mib"],
        padding=padding_shares(result["padding"]),
        update_rate=update_rate(work, result, value),
        rate=machine.rate,
        bandwidth=machine.bandwidth,
        mean_response=sum(each.response_tokens for each in rollouts) / sum(len(each.rows) for each in rollouts),
        tokens=tokens / len(rollouts),
    )


def _medians(records: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(record[key] for record in records) for key in (records[0] if records else {})}


def combine(runs: Sequence[Summary]) -> Summary:
    """The median of each number over a contender's processes."""
    records = [asdict(run) for run in runs]
    numbers = {
        key: _medians([record[key] for record in records])
        if isinstance(first, dict)
        else median(record[key] for record in records)
        for key, first in records[0].items()
        if key not in ("name", "workload", "runs")
    }
    return Summary(name=runs[0].name, workload=runs[0].workload, runs=len(runs), **numbers)


def ratios(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Rows of what is wanted and what was measured: workload, what, value, wanted, reached (None without the peer)."""
    rows = []
    for workload in dict.fromkeys(each.workload for each in summaries):
        by_name = {each.name: each for each in summaries if each.workload == workload}
        peer, wanted = by_name.pop("trl", None), WANTED[workload]
        for name, ours in by_name.items():
            if peer is not None:
                time, memory = peer.seconds / ours.seconds, ours.peak_mib / peer.peak_mib
                speed = ours.tokens_per_second / peer.tokens_per_second
                rows.append(_row(workload, name, "iteration, TRL time / ours", time, wanted[name]))
                rows.append(_row(workload, name, "real tokens a second, ours / TRL", speed, None))
                rows.append(_row(workload, name, "peak memory, ours / TRL", memory, wanted["memory"], most=True))
            rows.append(_row(workload, name, "update's share of the product's rate", ours.update_rate, wanted["rate"]))
    return rows


def _row(
    workload: str, name: str, what: str, value: float, wanted: float | None, most: bool = False
) -> dict[str, Any]:
    reached = None if wanted is None else (value <= wanted if most else value >= wanted)
    return {
        "workload": workload,
        "value adapter": name,
        "what": what,
        "measured": value,
        "wanted": None if wanted is None else f"{'<=' if most else '>='} {wanted:g}",
        "reached": reached,
    }
