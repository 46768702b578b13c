"""A picture of a run: score, KL and what else was logged, over the episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_PANELS = {
    "objective/scores": ("score", "#2563eb"),
    "objective/kl": ("KL to the reference, nats a response", "#d97706"),
    "completions/mean_length": ("length, tokens a response", "#059669"),
}
"""Metric key to title and colour."""


def draw_curves(history: Sequence[Mapping[str, float]], path: str | Path) -> bool:
    """Draw what a trainer logged.

    Args:
        history: a trainer's ``state.log_history``.
        path: of the PNG.

    Returns:
        Whether there was something to draw; nothing is written otherwise.
    """
    rows = [entry for entry in history if "episode" in entry and all(key in entry for key in _PANELS)]
    if not rows:
        return False
    figure = Figure(figsize=(4.2 * len(_PANELS), 3.2), dpi=110, layout="constrained")
    for axes, (key, (title, colour)) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        _draw(axes, [row["episode"] for row in rows], [row[key] for row in rows], title, colour)
    figure.savefig(path)
    return True


def _draw(axes: Axes, episodes: Sequence[float], values: Sequence[float], title: str, colour: str) -> None:
    axes.plot(episodes, values, color=colour, linewidth=1.8, marker="o" if len(values) < 20 else "", markersize=3)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("episode", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
