"""What people see in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDEST = 400


def completions_table(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    scores: Mapping[str, Sequence[float]],
    title: str,
    extras: Mapping[str, Sequence[Any]] | None = None,
) -> Table:
    """Prompts, completions and their scores, side by side.

    Args:
        prompts: text or messages.
        completions: text or messages, as many.
        scores: columns of numbers, as many.
        title: above the table.
        extras: columns of anything, as many.
    """
    table = Table(title=title, show_lines=True, title_justify="left")
    table.add_column("prompt", style="cyan", ratio=2)
    table.add_column("completion", style="green", ratio=3)
    for name in scores:
        table.add_column(name, justify="right", style="magenta")
    extras = extras or {}
    for name in extras:
        table.add_column(name, style="yellow", ratio=1)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        numbers = [f"{scores[name][row]:.3f}" for name in scores]
        others = [Text(_shortened(str(extras[name][row]))) for name in extras]
        table.add_row(Text(_readable(prompt)), Text(_readable(completion)), *numbers, *others)
    return table


def print_table(table: RenderableType) -> None:
    """Print to the terminal at its width."""
    Console().print(table)


def print_warning(text: str) -> None:
    """Print a warning to the terminal."""
    Console().print(Text.assemble(("warning ", "bold yellow"), text))


def _readable(content: Any) -> str:
    """Text of a prompt or completion, the role before each chat message, shortened in the middle when very long."""
    if not isinstance(content, str):
        content = "\n".join(f"{message['role']}: {message['content']}" for message in content)
    return _shortened(content)


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST // 2]} ... {text[-_WIDEST // 2 :]}"
