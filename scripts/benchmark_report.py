"""What the benchmark shows: terminal tables, a markdown fragment, and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from benchmark_summary import PHASES, Summary

NAMES = {"trl": "TRL 1.12", "separate": "ours, separate", "shared": "ours, shared"}
SHORT = {"trl": "TRL 1.12", "separate": "ppo_lora\nseparate value", "shared": "ppo_lora\nshared value"}
COLOURS = {
    "sampling": "#2563eb",
    "scoring": "#0d9488",
    "policy_update": "#d97706",
    "value_update": "#f2c14e",
    "updating": "#b4530a",
    "optimizer": "#b45f5f",
    "other": "#9aa4b2",
}
LABELS = {
    "policy_update": "policy update",
    "value_update": "value update",
    "optimizer": "optimizer",
    "updating": "update, all of it",
}
PADDING = {"all": "all phases", "sampling": "sampling", "scoring": "scoring", "updating": "update"}
MEMORY, INK = "#4b5563", "#1f2937"

Rows = tuple[list[str], list[list[str]]]


def measure_rows(summaries: Sequence[Summary]) -> Rows:
    """One workload's measures, a column for each contender; what nobody has is left out."""
    rows = [
        *((f"{LABELS.get(name, name)}, s", [_seconds(each, name) for each in summaries]) for name in PHASES),
        ("iteration, s", [f"{each.seconds:.2f}" + _bracket(sum(each.floors.values())) for each in summaries]),
        ("real tokens a second", [f"{each.tokens_per_second:.1f}" for each in summaries]),
        ("peak memory, MiB", [f"{each.peak_mib:.0f}" for each in summaries]),
        *(
            (f"padding, {where}", [f"{each.padding.get(phase, 0.0):.1%}" for each in summaries])
            for phase, where in PADDING.items()
        ),
        ("update, share of the product's rate", [f"{each.update_rate:.2f}" for each in summaries]),
        ("the product's rate, GFLOP/s", [f"{each.rate / 1e9:.0f}" for each in summaries]),
        ("a copy's bandwidth, GB/s", [f"{each.bandwidth / 1e9:.1f}" for each in summaries]),
        ("mean response, tokens", [f"{each.mean_response:.1f}" for each in summaries]),
        ("real tokens an iteration", [f"{each.tokens:.0f}" for each in summaries]),
    ]
    told = [[name, *cells] for name, cells in rows if any(cells)]
    return [summaries[0].workload, *(NAMES[each.name] for each in summaries)], told


def _seconds(summary: Summary, phase: str) -> str:
    """Seconds and, in brackets, the floor; nothing where the phase is not told apart."""
    if phase not in summary.phases:
        return ""
    return f"{summary.phases[phase]:.2f}" + _bracket(_floor(summary, phase))


def _bracket(floor: float) -> str:
    return f" ({floor:.2f})" if floor else ""


def _floor(summary: Summary, phase: str) -> float:
    if phase == "updating" and summary.floors:
        return summary.floors["policy_update"] + summary.floors["value_update"]
    return summary.floors.get(phase, 0.0)


def wanted_rows(ratios: Sequence[dict[str, Any]]) -> Rows:
    """What issue 5 wants beside what was measured."""
    words = {None: "", True: "yes", False: "no"}
    return ["workload", "value adapter", "what", "measured", "wanted", "reached"], [
        [
            row["workload"],
            row["value adapter"],
            row["what"],
            f"{row['measured']:.2f}",
            row["wanted"] or "",
            words[row["reached"]],
        ]
        for row in ratios
    ]


def by_workload(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """The summaries of each workload."""
    workloads = dict.fromkeys(each.workload for each in summaries)
    return [[each for each in summaries if each.workload == workload] for workload in workloads]


def terminal_table(title: str, rows: Rows) -> Table:
    """For the terminal: words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(rows[0]):
        words = place == 0 or name in ("what", "value adapter")
        table.add_column(name, justify="left" if words else "right")
    for row in rows[1]:
        table.add_row(*row)
    return table


def markdown_table(rows: Rows) -> str:
    """For docs/benchmarks.md."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(summaries: Sequence[Summary], ratios: Sequence[dict[str, Any]], facts: Sequence[str]) -> str:
    """The fragment that goes into docs/benchmarks.md."""
    legend = "Seconds by phase; in brackets the floor, from operations and bytes at the measured rates."
    tables = [markdown_table(measure_rows(each)) for each in by_workload(summaries)]
    return (
        "\n\n".join(["\n".join(f"- {fact}" for fact in facts), legend, *tables, markdown_table(wanted_rows(ratios))])
        + "\n"
    )


def picture(summaries: Sequence[Summary], path: Path) -> None:
    """Bars of time by phase, and of memory, a row for each workload."""
    workloads = by_workload(summaries)
    figure = Figure(figsize=(10, 0.9 + 0.85 * sum(map(len, workloads))), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(hspace=0.06, wspace=0.03)
    axes = figure.subplots(len(workloads), 2, squeeze=False, width_ratios=[2.1, 1])
    for (times, memory), rows in zip(axes, workloads, strict=True):
        _time_bars(times, rows)
        _memory_bars(memory, rows)
        times.set_title(f"{rows[0].workload}: seconds an iteration", loc="left", color=INK, fontsize=11, weight="bold")
        memory.set_title("peak memory, MiB", loc="left", color=INK, fontsize=11, weight="bold")
    shown = [name for name in COLOURS if any(_shown(each).get(name, 0) for each in summaries)]
    handles = [Patch(color=COLOURS[name], label=LABELS.get(name, name)) for name in shown]
    handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=1.2, label="floor"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def _shown(summary: Summary) -> dict[str, float]:
    """Phases that make up the iteration: the update's parts where they are told, else the whole."""
    phases = dict(summary.phases)
    if "policy_update" not in phases:
        return phases
    phases["other"] += phases.pop("updating") - sum(
        phases.get(name, 0.0) for name in ("policy_update", "value_update", "optimizer")
    )
    return {name: max(0.0, seconds) for name, seconds in phases.items()}


def _time_bars(axes: Axes, rows: Sequence[Summary]) -> None:
    peer = next((each for each in rows if each.name == "trl"), None)
    for place, each in enumerate(rows):
        left, shown = 0.0, _shown(each)
        for name in COLOURS:
            floor = _floor(each, name)
            axes.barh(place, shown.get(name, 0.0), left=left, color=COLOURS[name], height=0.62)
            if name in shown and floor:
                axes.barh(place, floor, left=left, height=0.62, facecolor="none", edgecolor=INK, linewidth=1.2)
            left += shown.get(name, 0.0)
        faster = f"  ({peer.seconds / each.seconds:.2f}x)" if peer is not None and each is not peer else ""
        axes.text(left, place, f" {each.seconds:.1f} s{faster}", va="center", color=INK, fontsize=10)
    _style(axes, rows, 1.3)


def _memory_bars(axes: Axes, rows: Sequence[Summary]) -> None:
    peer = next((each for each in rows if each.name == "trl"), None)
    for place, each in enumerate(rows):
        axes.barh(place, each.peak_mib, color=MEMORY, height=0.62)
        share = f"  ({each.peak_mib / peer.peak_mib:.2f})" if peer is not None and each is not peer else ""
        axes.text(each.peak_mib, place, f" {each.peak_mib:.0f}{share}", va="center", color=INK, fontsize=10)
    _style(axes, rows, 1.35)
    axes.set_yticks([])


def _style(axes: Axes, rows: Sequence[Summary], room: float) -> None:
    axes.set_yticks(range(len(rows)), [SHORT[each.name] for each in rows], fontsize=10, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] / 1.05 * room)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#9aa4b2")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors="#6b7280", labelsize=9)
