"""What scripts/evaluate.py shows: tables, the picture, and the rows of samples.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ppo_lora import Comparison, Evaluation

COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#be185d", "#4d7c0f")
BASE_COLOUR, GRID_COLOUR = "#6b7280", "#e5e7eb"
BINS = 24
_BEST_OF_LINE: dict[str, Any] = {"linestyle": "--", "marker": ".", "linewidth": 1.2}
SHOWN_PROMPTS = 3


def sample_rows(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Every response with its prompt, policy and numbers; a score is None where the scorer gave none."""
    for row, prompt in enumerate(evaluation.prompts):
        for policy, samples in evaluation.policies.items():
            for k, completion in enumerate(samples.completions[row]):
                scores = {name: table[row, k].item() for name, table in samples.scores.items()}
                yield {
                    "prompt": prompt,
                    "policy": policy,
                    "sample": k,
                    "completion": completion,
                    "scores": {name: None if math.isnan(score) else score for name, score in scores.items()},
                    "kl": samples.kl[row, k].item(),
                    "tokens": len(samples.completion_ids[row][k]),
                    "stopped": bool(samples.stopped[row, k]),
                }


# Tables


def tables(comparison: Comparison) -> list[Table]:
    """Each policy's numbers, win rates where there are pairs, and best-of-n where n goes beyond 1."""
    wins = [win_rate_table(comparison)] if comparison.win_rates else []
    best = [best_of_table(comparison)] if max(comparison.best_of_kl) > 1 else []
    return [policies_table(comparison), *wins, *best]


def policies_table(comparison: Comparison) -> Table:
    """A column a policy; means with their 95% intervals."""
    policies = comparison.policies.values()
    title = f"Prompts: {comparison.prompts}. Responses of each policy to each: {comparison.samples}"
    table = _table(title, "", *comparison.policies)
    for scorer in next(iter(policies)).scores:
        _add_distribution(table, scorer, [policy.scores[scorer] for policy in policies])
    _add_distribution(table, f"KL to {comparison.reference}, nats", [policy.kl for policy in policies])
    _add_distribution(table, "length, tokens", [policy.length for policy in policies])
    table.add_row("ended (stop token)", *(f"{policy.stopped:.1%}" for policy in policies))
    table.add_row("distinct-1", *(f"{policy.distinct_1:.3f}" for policy in policies))
    table.add_row("distinct-2", *(f"{policy.distinct_2:.3f}" for policy in policies))
    return table


def _add_distribution(table: Table, name: str, columns: Sequence[Any]) -> None:
    """Five lines: mean, interval of the mean, standard deviation, quantiles."""
    write = _format([share for each in columns if each is not None for share in each.quantiles.values()])
    lines = [_distribution_lines(each, write) for each in columns]
    below = ("95% interval", "std", "median", "5% to 95%")
    labels = (escape(name), *(f"[dim]  {label}[/]" for label in below))
    for place, label in enumerate(labels):
        table.add_row(label, *(each[place] for each in lines), end_section=place == len(labels) - 1)


def _distribution_lines(column: Any, write: Callable[[float], str]) -> list[str]:
    if column is None:
        return ["[dim]no scores[/]", "", "", "", ""]
    below = (
        f"{write(column.estimate.low)} to {write(column.estimate.high)}",
        write(column.std),
        write(column.quantiles[0.5]),
        f"{write(column.quantiles[0.05])} to {write(column.quantiles[0.95])}",
    )
    return [f"[bold]{write(column.estimate.mean)}[/]", *(f"[dim]{line}[/]" for line in below)]


def win_rate_table(comparison: Comparison) -> Table:
    """A row a pair, a column a scorer."""
    scorers = list(dict.fromkeys(win.scorer for win in comparison.win_rates))
    table = _table("Win rates, with 95% intervals", "", *scorers)
    pairs = dict.fromkeys((win.policy, win.against) for win in comparison.win_rates)
    rates = {(win.policy, win.against, win.scorer): win.rate for win in comparison.win_rates}
    for pair in pairs:
        cells = (_share(rates[(*pair, scorer)]) for scorer in scorers)
        table.add_row(f"{pair[0]} over {pair[1]}", *cells)
    return table


def _share(rate: Any) -> str:
    if rate is None:
        return "[dim]no scores[/]"
    return f"[bold]{rate.mean:.1%}[/] [dim]{rate.low:.1%} to {rate.high:.1%}[/]"


def best_of_table(comparison: Comparison) -> Table:
    """A row a scorer and policy, a column each n."""
    table = _table("Expected score of the best of n samples", "", "n =", *map(str, comparison.best_of_kl))
    for scorer in next(iter(comparison.policies.values())).scores:
        found = {name: policy.best_of.get(scorer, {}) for name, policy in comparison.policies.items()}
        write = _format([score for best in found.values() for score in best.values()])
        for place, (name, best) in enumerate(found.items()):
            cells = (write(best[n]) if n in best else "" for n in comparison.best_of_kl)
            table.add_row("" if place else escape(scorer), name, *cells)
        table.rows[-1].end_section = True
    bounds = (f"{kl:.2f}" for kl in comparison.best_of_kl.values())
    table.add_row("KL to the policy itself, nats", "at most", *bounds, style="dim")
    return table


def samples_table(evaluation: Evaluation) -> Table:
    """The first sample of every policy for the first prompts."""
    table = _table("First samples", "prompt", *evaluation.policies, justify="left")
    table.show_lines = True
    for row, prompt in enumerate(evaluation.prompts[:SHOWN_PROMPTS]):
        texts = (each.completions[row][0] for each in evaluation.policies.values())
        table.add_row(_readable(prompt), *map(_readable, texts))
    return table


def _table(title: str, *columns: str, justify: Any = "right") -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(escape(column), justify=justify if place else "left", overflow="fold")
    return table


def _format(numbers: Sequence[float]) -> Callable[[float], str]:
    """As many decimals for all as the largest needs to have three digits, at most four."""
    largest = max((abs(number) for number in numbers), default=0.0)
    decimals = 2 if largest == 0 else min(4, max(0, 2 - math.floor(math.log10(0.999 * largest))))
    return lambda number: f"{number:.{decimals}f}"


def _readable(content: Any, longest: int = 240) -> str:
    if not isinstance(content, str):
        content = "\n".join(f"{message['role']}: {message['content']}" for message in content)
    return escape(content if len(content) <= longest else f"{content[:longest]} ...")


# The picture


def draw(evaluation: Evaluation, comparison: Comparison, target: Path) -> None:
    """Draw a row of panels a scorer: its scores, its mean score against the KL, and best-of-n beyond n = 1."""
    scorers = list(next(iter(comparison.policies.values())).scores)
    colours = policy_colours(list(comparison.policies))
    columns = 3 if max(comparison.best_of_kl) > 1 else 2
    figure = Figure(figsize=(4.4 * columns, 3.5 * len(scorers) + 0.5), dpi=140, layout="constrained")
    rows = figure.subplots(len(scorers), columns, squeeze=False)
    for scorer, (scores, against_kl, *best) in zip(scorers, rows, strict=True):
        tables = {name: samples.scores[scorer] for name, samples in evaluation.policies.items()}
        _draw_scores(scores, tables, colours, scorer)
        _draw_against_kl(against_kl, comparison, scorer, colours)
        if best:
            _draw_best_of(best[0], comparison, scorer, colours)
    handles = [Line2D([], [], color=colour, linewidth=5, label=name) for name, colour in colours.items()]
    if columns == 3 and comparison.reference in colours:
        style = {"color": colours[comparison.reference], **_BEST_OF_LINE}
        handles.append(Line2D([], [], label=f"best of n samples of {comparison.reference}", **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=10)
    figure.savefig(target)


def policy_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each policy; grey for the base."""
    others = [name for name in names if name != "base"]
    coloured = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(others)}
    return {name: coloured.get(name, BASE_COLOUR) for name in names}


def _draw_scores(axes: Axes, tables: dict[str, Tensor], colours: dict[str, str], scorer: str) -> None:
    known = {name: table[~table.isnan()] for name, table in tables.items()}
    every = [value for values in known.values() for value in values.tolist()]
    low, high = (min(every), max(every)) if every else (0.0, 1.0)
    span = (low, high) if high > low else (low - 0.5, high + 0.5)
    for name, values in known.items():
        shares = [1 / max(1, len(values))] * len(values)
        style = {"bins": BINS, "range": span, "weights": shares, "color": colours[name]}
        axes.hist(values.tolist(), histtype="stepfilled", alpha=0.18, **style)
        axes.hist(values.tolist(), histtype="step", linewidth=1.6, **style)
    _finish(axes, f"{scorer}: distribution of scores", "score", "share of responses")


def _draw_against_kl(axes: Axes, comparison: Comparison, scorer: str, colours: dict[str, str]) -> None:
    for name, policy in comparison.policies.items():
        score = policy.scores[scorer]
        if score is not None:
            kl, mean = policy.kl.estimate, score.estimate
            bars = {"xerr": _error(kl), "yerr": _error(mean), "color": colours[name]}
            axes.errorbar(kl.mean, mean.mean, **bars, marker="o", markersize=7, linewidth=1.6, zorder=3)
    best = getattr(comparison.policies.get(comparison.reference), "best_of", {}).get(scorer, {})
    if len(best) > 1:
        kls = [comparison.best_of_kl[n] for n in best]
        axes.plot(kls, list(best.values()), color=colours[comparison.reference], **_BEST_OF_LINE)
        last = max(best)
        axes.annotate(f"n = {last}", (kls[-1], best[last]), (6, -3), textcoords="offset points", fontsize=8, va="top")
    title = f"{scorer}: score against KL"
    _finish(axes, title, f"KL to {comparison.reference}, nats a response", "mean score, with 95% intervals")


def _error(estimate: Any) -> list[list[float]]:
    """Matplotlib's lengths of the bars below and above; rounding may put a bound on the other side."""
    return [[max(0.0, estimate.mean - estimate.low)], [max(0.0, estimate.high - estimate.mean)]]


def _draw_best_of(axes: Axes, comparison: Comparison, scorer: str, colours: dict[str, str]) -> None:
    for name, policy in comparison.policies.items():
        best = policy.best_of.get(scorer, {})
        axes.plot(list(best), list(best.values()), color=colours[name], marker="o", markersize=5, linewidth=1.6)
    axes.set_xscale("log", base=2)
    ticks = list(comparison.best_of_kl)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    _finish(axes, f"{scorer}: best of n", "n", "expected best score")


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
