"""A plan of the memory as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import psutil
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .config import PPOConfig
from .memory_plan import MemoryPlan, plan_memory
from .shared_base import SharedBase

_WORTH_A_PLAN = 2**28
"""Bytes of weights from which on a run on the CPU begins with a plan."""


def plan_report(plan: MemoryPlan) -> RenderableType:
    """Parts, phases against the GPU, the largest sizes that fit and what saves memory."""
    pieces: list[RenderableType] = [_parts_table(plan), Text(), _phases_table(plan), Text(), verdict(plan)]
    if plan.largest:
        pieces += [Text(), _sizes_table(plan)]
    if plan.levers:
        pieces += [Text(), _levers_table(plan)]
    return Group(*pieces)


def verdict(plan: MemoryPlan) -> Text:
    """One line: the peak, where it is, and whether that fits."""
    text = f"planned peak {gibibytes(plan.peak)} in {plan.peak_phase}"
    if plan.gpu is None or plan.usable is None:
        return Text(text, style="bold")
    have = f"{gibibytes(plan.usable)} of {gibibytes(plan.gpu)} usable"
    word, style = ("fits", "bold green") if plan.fits else ("does not fit", "bold red")
    return Text(f"{text}; {have}: {word}", style=style)


def startup_plan(base: SharedBase, args: PPOConfig, prompt_length: int) -> Text | None:
    """The line of a run's plan for the panel before its first rollout.

    None where there is no GPU and the base is so small that planning would take longer than it is worth, and where
    the plan fails: a run is not stopped by what is said of it.
    """
    weights = sum(tensor.numel() * tensor.element_size() for tensor in base.model.parameters())
    if not torch.cuda.is_available() and weights < _WORTH_A_PLAN:
        return None
    try:
        return verdict(plan_memory(base, args, prompt_length=prompt_length, search=False))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return Text(f"memory not planned: {' '.join(str(error).split())[:200]}", style="yellow")


def measured_peak() -> Text:
    """What a run took at the most: the allocator's peak on a GPU, resident memory on the CPU."""
    if torch.cuda.is_available():
        return Text(f"measured peak {gibibytes(torch.cuda.max_memory_allocated())} of the GPU")
    return Text(f"resident memory {gibibytes(psutil.Process().memory_info().rss)}")


def gibibytes(size: int) -> str:
    """A size for people: GiB, or MiB where that is less than a tenth."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 / 10 else f"{size / 2**20:,.2f} MiB"


def _table(*columns: str, words: Sequence[str] = ()) -> Table:
    """A table without lines; its first column and those named in ``words`` are text, the others numbers."""
    table = Table(header_style="dim", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        justify: Literal["left", "right"] = "left" if not number or name in words else "right"
        table.add_column(name, justify=justify, style="" if number else "bold")
    return table


def _parts_table(plan: MemoryPlan) -> Table:
    table = _table("part", "memory")
    for name, size in plan.parts.items():
        table.add_row("logits chunk (in these)" if name == "logits chunk" else name, gibibytes(size))
    return table


def _phases_table(plan: MemoryPlan) -> Table:
    table = _table("phase", "peak", *(["of the GPU"] if plan.gpu else []))
    for name, size in plan.phases.items():
        style = "bold yellow" if name == plan.peak_phase else ""
        share = [f"{size / plan.gpu:.0%}"] if plan.gpu else []
        table.add_row(name, gibibytes(size), *share, style=style)
    return table


def _sizes_table(plan: MemoryPlan) -> Table:
    table = _table("option", "is", "largest that fits")
    for option, largest in plan.largest.items():
        table.add_row(option, str(plan.given[option]), str(largest) if largest else "none")
    return table


def _levers_table(plan: MemoryPlan) -> Table:
    table = _table("lever", "run's peak", "option", words=["option"])
    for lever in plan.levers:
        sign = "-" if lever.saved > 0 else "+"
        change = f"{sign}{gibibytes(abs(lever.saved))}" if lever.saved else "no change"
        table.add_row(lever.name, change, lever.how)
    return table
