"""The arithmetic recipe's verdict: how many held-out problems the SFT policy and PPO's solve, on one loaded base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ppo_lora import Role, SharedBase

MAX_NEW_TOKENS = 5


@dataclass(frozen=True)
class Exam:
    """What one policy answered.

    Args:
        prompts: one a problem.
        expected: the right answers.
        greedy: its answers, the most probable token each time.
        sampled: answers sampled at temperature 1, one a problem.
    """

    prompts: list[str]
    expected: list[str]
    greedy: list[str]
    sampled: list[str]

    @property
    def greedy_accuracy(self) -> float:
        """The share of greedy answers that are exactly the expected text and end there."""
        return mean(map(str.__eq__, self.greedy, self.expected))

    @property
    def sampled_accuracy(self) -> float:
        """The same of the sampled answers."""
        return mean(map(str.__eq__, self.sampled, self.expected))


def hold_exam(
    base: SharedBase, tokenizer: PreTrainedTokenizerBase, role: Role, rows: Sequence[dict[str, str]], seed: int
) -> Exam:
    """Let `role` (policy or reference) answer the prompts of `rows`."""
    prompts = [row["prompt"] for row in rows]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)

    def answers(**generation: Any) -> list[str]:
        sequences = base.generate(**batch, role=role, max_new_tokens=MAX_NEW_TOKENS, **generation)
        return tokenizer.batch_decode(sequences[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    torch.manual_seed(seed)
    return Exam(
        prompts=prompts,
        expected=[row["answer"] for row in rows],
        greedy=answers(do_sample=False),
        sampled=answers(do_sample=True, temperature=1.0),
    )


def gains(before: Exam, after: Exam) -> tuple[float, float]:
    """Return by how much the greedy and the sampled accuracy rose, as shares."""
    return after.greedy_accuracy - before.greedy_accuracy, after.sampled_accuracy - before.sampled_accuracy


def accuracy_table(before: Exam, after: Exam) -> Table:
    """Return the accuracies of SFT against PPO."""
    table = Table(
        title=f"{len(before.prompts)} problems that no training set has, exact answers", title_justify="left"
    )
    table.add_column("answers", no_wrap=True)
    for name in ("SFT", "PPO", "gain"):
        table.add_column(name, justify="right", style="bold" if name == "PPO" else None)
    greedy, sampled = gains(before, after)
    for name, old, new, gain in (
        ("greedy", before.greedy_accuracy, after.greedy_accuracy, greedy),
        ("sampled at temperature 1", before.sampled_accuracy, after.sampled_accuracy, sampled),
    ):
        table.add_row(name, f"{old:.1%}", f"{new:.1%}", f"{100 * gain:+.1f} points")
    return table


def answers_table(before: Exam, after: Exam, count: int = 5) -> Table:
    """Return the first `count` problems that SFT's greedy answer missed, with the answers before and after PPO."""
    table = Table(title="The first that SFT missed, greedy", title_justify="left")
    for name in ("problem", "SFT", "PPO"):
        table.add_column(name)
    missed = [index for index, answer in enumerate(before.greedy) if answer != before.expected[index]]
    for index in missed[:count]:
        table.add_row(before.prompts[index], before.greedy[index], after.greedy[index])
    return table


def build_summary(before: Exam, after: Exam, seconds: float, peak_rss_mb: float) -> dict[str, Any]:
    """Return what summary.json holds; accuracies are shares, gains differences of shares."""
    greedy, sampled = gains(before, after)
    return {
        "greedy_before": before.greedy_accuracy,
        "greedy_after": after.greedy_accuracy,
        "greedy_gain": round(greedy, 4),
        "sampled_before": before.sampled_accuracy,
        "sampled_after": after.sampled_accuracy,
        "sampled_gain": round(sampled, 4),
        "problems": len(before.prompts),
        "seconds": round(seconds, 1),
        "peak_rss_mb": round(peak_rss_mb, 1),
    }
