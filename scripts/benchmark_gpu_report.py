"""What scripts/benchmark_gpu.py tells: wanted, measured, reached. No libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from benchmark_report import Rows, markdown_table

Result = Mapping[str, Any]
Measures = Callable[[Mapping[str, Result]], tuple[float | None, str]]
"""From what the cases measured to a number that is judged and what is told. A KeyError: it was not measured."""

NOT_MEASURED = "not measured"
COLUMNS = ["", "wanted", "measured", "reached"]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: is measured.
        wanted: in words.
        case: whose result says why there is no number.
        measured: see :data:`Measures`.
        low, high: limits of the number; None for none.
    """

    what: str
    wanted: str
    case: str
    measured: Measures
    low: float | None = None
    high: float | None = None

    def cells(self, results: Mapping[str, Result], judged: bool = True) -> list[str]:
        """What is in the table; nothing is said of what was reached where it is not ``judged``."""
        try:
            number, text = self.measured(results)
        except KeyError:
            result = results.get(self.case, {})
            reason = result.get("reason") or (result.get("planned_gib", {}).get("error") if self.low else None)
            return [self.what, self.wanted, f"{NOT_MEASURED} ({reason})" if reason else NOT_MEASURED, ""]
        return [self.what, self.wanted, text, self._reached(number) if judged else ""]

    def _reached(self, number: float | None) -> str:
        if number is None or (self.low is None and self.high is None):
            return ""
        return "yes" if (self.low or number) <= number <= (self.high or number) else "no"


def _peak(case: str) -> Measures:
    def measured(results: Mapping[str, Result]) -> tuple[float, str]:
        result = results[case]
        phases = ", ".join(f"{name} {gib:.2f}" for name, gib in result["peaks_gib"].items())
        batch = f"; {result['rows']} rows, sampled and scored {result['rollout_rows']} at a time"
        peak, loading = result["peak_gib"], result["loading_gib"]
        return peak, f"{peak:.2f} GiB (loading {loading:.2f}, {phases}){batch}"

    return measured


def _against_plan(case: str) -> Measures:
    def measured(results: Mapping[str, Result]) -> tuple[float, str]:
        peak, planned = results[case]["peak_gib"], results[case]["planned_gib"]["peak"]
        ratio = peak / planned
        return ratio, f"{ratio:.2f} ({peak:.2f} of {planned:.2f} GiB)"

    return measured


def _peer_memory(results: Mapping[str, Result]) -> tuple[float, str]:
    theirs, ours = results["trl"]["peak_gib"], results["small"]["peak_gib"]
    ratio = theirs / ours
    return ratio, f"{ratio:.2f} ({theirs:.2f} and {ours:.2f} GiB)"


def _peer_time(results: Mapping[str, Result]) -> tuple[float, str]:
    theirs, ours = results["trl"]["iterations"][-1], results["small"]["iterations"][-1]
    ratio = theirs["seconds"] / ours["seconds"]
    parts = ", ".join(
        f"{name} {theirs[name]:.1f} and {ours[name]:.1f}" for name in ("sampling", "scoring", "updating")
    )
    return ratio, f"{ratio:.2f} ({theirs['seconds']:.1f} and {ours['seconds']:.1f} s: {parts})"


def _sampling(results: Mapping[str, Result]) -> tuple[float, str]:
    plain, ours = results["sampling"]["plain"], results["sampling"]["ours"]
    ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
    told = [
        f"{each['tokens_per_second']:.0f} in {each['steps']} steps, mean {each['mean_response']:.0f}"
        for each in (ours, plain)
    ]
    return ratio, f"{ratio:.2f} ({told[0]}; plain {told[1]})"


def _update_rate(case: str) -> Measures:
    def measured(results: Mapping[str, Result]) -> tuple[float, str]:
        share, rate = results[case]["update_rate"], results[case]["rates"]["rate"]
        return share, f"{share:.2f} of {rate / 1e12:.3g} TFLOP/s"

    return measured


def _passes(results: Mapping[str, Result]) -> tuple[float, str]:
    found = results["passes"]["passes"]
    each = ", ".join(
        f"{one['ratio']:.2f} with {one['rows']} rows ({one['separate'] * 1e3:.0f} and {one['fused'] * 1e3:.0f} ms)"
        for one in found
    )
    return found[-1]["ratio"], each


_SMALL = "Qwen2.5-1.5B shape"
ROWS = (
    Row(
        "Llama-3-8B shape, four roles, checkpointing, micro-batch 1: peak",
        "at most 12 GiB",
        "peak",
        _peak("peak"),
        high=12,
    ),
    Row("the same: measured over planned", "0.9 to 1.1", "peak", _against_plan("peak"), low=0.9, high=1.1),
    Row("the same, 64 rollouts an iteration: peak", "at most 22 GiB", "rollouts", _peak("rollouts"), high=22),
    Row("the same: measured over planned", "0.9 to 1.1", "rollouts", _against_plan("rollouts"), low=0.9, high=1.1),
    Row(f"{_SMALL}, four roles, checkpointing, micro-batch 1: peak", "at most 5 GiB", "small", _peak("small"), high=5),
    Row("the same: measured over planned", "0.9 to 1.1", "small", _against_plan("small"), low=0.9, high=1.1),
    Row(f"{_SMALL}: peak of TRL 1.12 / ours", "-", "trl", _peer_memory),
    Row(f"{_SMALL}: time of an iteration, TRL 1.12 / ours", "-", "trl", _peer_time),
    Row(
        f"{_SMALL}, ragged: tokens a second of sampling, ours / plain `model.generate`",
        "at least 2",
        "sampling",
        _sampling,
        low=2,
    ),
    Row("Llama-3-8B shape: update's share of the bfloat16 product's rate", "-", "rollouts", _update_rate("rollouts")),
    Row(f"{_SMALL}: update's share of the bfloat16 product's rate", "-", "small", _update_rate("small")),
    Row(
        "Llama-3-8B shape, no gradients: time of a pass for each of four roles / of one for all",
        "-",
        "passes",
        _passes,
    ),
)


def table_rows(results: Mapping[str, Result], judged: bool = True) -> Rows:
    """The table's heading and lines, whatever of it was measured."""
    return COLUMNS, [row.cells(results, judged) for row in ROWS]


def facts(results: Mapping[str, Result], trial: bool = False) -> list[str]:
    """What the numbers were measured on; nothing where nothing was measured.

    Args:
        results: by case.
        trial: on tiny shapes or on a CPU.
    """
    known = [result for result in results.values() if "machine" in result]
    told = ["A trial of the script on tiny shapes or a CPU: no measurement."] if trial else []
    if known:
        versions = {name: each for result in known for name, each in result["versions"].items() if name != "trl"}
        machine = known[0]["machine"]
        told.append(
            f"{date.today().isoformat()}: {machine['device']}, Python {machine['python']}, "
            + ", ".join(f"{name} {each}" for name, each in sorted(versions.items()))
        )
    return told


def markdown(rows: Rows, told: Sequence[str]) -> str:
    """The fragment that goes into docs/benchmarks.md."""
    lines = "\n".join(f"- {fact}" for fact in told)
    return f"{lines}\n\n{markdown_table(rows)}\n" if told else f"{markdown_table(rows)}\n"
