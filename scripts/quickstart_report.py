"""What the quickstart shows: tables, the curve picture, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.markup import escape
from rich.table import Table

from quickstart_data import BEST_GOLD_SCORE
from quickstart_evaluation import Reviews

BEFORE_COLOUR, NEUTRAL_COLOUR = "#9aa4b2", "#374151"
CURVES = {
    "objective/scores": ("Reward model's score", "#2563eb"),
    "rewards/gold_reward/mean": (f"Gold rule's score (best {BEST_GOLD_SCORE:g})", "#059669"),
    "objective/kl": ("KL to the reference, nats a review", "#d97706"),
}
"""Metric key to title and colour."""


def comparison_table(before: Reviews, after: Reviews) -> Table:
    """Return the numbers of SFT against PPO."""
    table = Table(title=f"{len(before.texts)} reviews of products no stage had seen", title_justify="left")
    table.add_column("mean of", no_wrap=True)
    table.add_column("SFT", justify="right")
    table.add_column("PPO", justify="right", style="bold")
    rows = (
        (f"gold rule's score (best {BEST_GOLD_SCORE:g})", before.gold, after.gold, "{:.3f}"),
        ("reward model's score", before.score, after.score, "{:.2f}"),
        ("KL to the reference, nats a review", before.kl, after.kl, "{:.2f}"),
        ("length, tokens", before.length, after.length, "{:.1f}"),
        ("distinct reviews (count)", before.distinct, after.distinct, "{:d}"),
    )
    for name, old, new, form in rows:
        table.add_row(name, form.format(old), form.format(new))
    return table


def samples_table(before: Reviews, after: Reviews, count: int = 3) -> Table:
    """Return the first `count` prompts whose SFT review was not all praise, with the review before and after PPO."""
    table = Table(title="The first that SFT did not praise, before and after", title_justify="left", show_lines=True)
    table.add_column("prompt", ratio=1)
    for name in ("SFT (gold score)", "PPO (gold score)"):
        table.add_column(name, ratio=2)
    improvable = [index for index, gold in enumerate(before.golds) if gold < BEST_GOLD_SCORE]
    for index in improvable[:count]:
        cells = (f"{escape(each.texts[index])} [dim]({each.golds[index]:.2f})[/]" for each in (before, after))
        table.add_row(escape(before.prompts[index]), *cells)
    return table


def read_history(ppo_dir: Path, *keys: str) -> dict[str, list[float]]:
    """Return the logged values of `keys`, one an iteration, from the newest trainer state below `ppo_dir`."""
    newest = max(ppo_dir.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history = json.loads(newest.read_text(encoding="utf-8"))["log_history"]
    rows = [row for row in history if all(key in row for key in keys)]
    return {key: [row[key] for row in rows] for key in keys}


def draw_curves(ppo_dir: Path, before: Reviews, after: Reviews, target: Path) -> None:
    """Draw reward, gold score and KL over PPO's iterations, and write the picture to `target`.

    Dashed lines and dots are the held-out prompts, before and after.
    """
    history = read_history(ppo_dir, *CURVES)
    held_out = ((before.score, after.score), (before.gold, after.gold), (before.kl, after.kl))
    figure = Figure(figsize=(12, 3.8), dpi=150, layout="constrained")
    panels = zip(figure.subplots(1, 3), CURVES.items(), held_out, strict=True)
    for axes, (key, (title, colour)), (old, new) in panels:
        _draw_curve(axes, history[key], colour, old, new)
        axes.set_title(title, fontsize=11, loc="left")
    labels = [
        Line2D([], [], color=NEUTRAL_COLOUR, linewidth=1.8, label="PPO, on its training prompts"),
        Line2D([], [], color=BEFORE_COLOUR, linewidth=1.2, linestyle="--", label="SFT, on held-out prompts"),
        Line2D([], [], color=NEUTRAL_COLOUR, linestyle="", marker="o", label="PPO at the end, on held-out prompts"),
    ]
    figure.legend(handles=labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(target)


def _draw_curve(axes: Axes, values: Sequence[float], colour: str, before: float, after: float) -> None:
    axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=1.8)
    axes.axhline(before, color=BEFORE_COLOUR, linestyle="--", linewidth=1.2)
    axes.plot(len(values), after, "o", color=colour, markeredgecolor="white", markersize=8, clip_on=False)
    axes.set_xlabel("iteration", fontsize=9)
    axes.tick_params(labelsize=9)
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def build_summary(before: Reviews, after: Reviews, seconds: float, peak_rss_mb: float) -> dict[str, Any]:
    """Return what summary.json holds."""
    return {
        "gold_before": before.gold,
        "gold_after": after.gold,
        "score_before": before.score,
        "score_after": after.score,
        "kl": after.kl,
        "length_before": before.length,
        "length_after": after.length,
        "distinct_before": before.distinct,
        "distinct_after": after.distinct,
        "reviews": len(after.texts),
        "seconds": round(seconds, 1),
        "peak_rss_mb": round(peak_rss_mb, 1),
    }
