"""What the quickstart shows: tables, the curve picture, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from quickstart_data import BEST_GOLD_SCORE
from quickstart_evaluation import Reviews

BEFORE_COLOUR = "#9aa4b2"
CURVES = {
    "objective/scores": ("Reward model's score", "#2563eb"),
    "rewards/gold_reward/mean": (f"Gold rule's score (best {BEST_GOLD_SCORE:g})", "#059669"),
    "objective/kl": ("KL to the reference, nats a review", "#d97706"),
}
"""Metric key to title and colour."""


def comparison_table(before: Reviews, after: Reviews) -> Table:
    """Return the numbers of SFT against PPO."""
    table = Table(title=f"{len(before.texts)} reviews of products that no stage had seen", title_justify="left")
    table.add_column("mean of")
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
    """Return `count` prompts with the review before and after PPO, and each one's gold score."""
    table = Table(title="Before and after, same prompts", title_justify="left", show_lines=True)
    for name in ("prompt", "SFT", "PPO"):
        table.add_column(name, ratio=1 if name == "prompt" else 2)
    for index in range(count):
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
    figure.savefig(target)


def _draw_curve(axes: Axes, values: Sequence[float], colour: str, before: float, after: float) -> None:
    iterations = range(1, len(values) + 1)
    axes.plot(iterations, values, color=colour, linewidth=1.8, label="PPO's rollouts")
    axes.axhline(before, color=BEFORE_COLOUR, linestyle="--", linewidth=1.2, label="SFT, held out")
    axes.plot(len(values), after, "o", color=colour, markeredgecolor="white", markersize=8, label="PPO, held out")
    axes.set_xlabel("iteration")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
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
