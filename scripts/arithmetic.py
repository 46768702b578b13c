"""PPO with a checker on a tiny model that adds badly: the arithmetic recipe, offline, on the CPU, in minutes.

    python scripts/arithmetic.py [prepare | evaluate] [--output_dir runs/arithmetic] [--seed 0]

`prepare` makes the data sets and the base. `evaluate` compares SFT with PPO on held-out problems, and ends with exit
code 1 if PPO did not raise both the greedy and the sampled accuracy by 20 percentage points. Without either: prepare,
trl sft, trl reward, scripts/ppo.py, evaluate.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from arithmetic_data import write_data_sets
from recipe_data import read_rows
from recipe_stages import SCRIPTS, Stages, peak_memory_mb, ppo_command, quiet_environment, trl_command

if TYPE_CHECKING:
    from arithmetic_evaluation import Exam

# torch and what imports it are imported inside functions, after main() has set the environment.

CONFIGS = SCRIPTS.parent / "configs" / "arithmetic"
ROWS = 1536
WANTED_GAIN = 0.20


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=("prepare", "evaluate"), help="only this; everything if left out")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/arithmetic"), help="where everything is written")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the base and every training")
    return parser.parse_args(arguments)


def prepare(stages: Stages, root: Path, seed: int) -> None:
    """Write the data sets and the base model, unless the same base lies there already."""
    from transformers.utils import logging

    from arithmetic_base import base_settings, make_base
    from recipe_base import is_made

    logging.disable_progress_bar()
    with stages.stage("sums in TRL's data set formats") as remarks:
        write_data_sets(root / "data", seed, ROWS)
        remarks.append(f"{ROWS} demonstrations, {ROWS} preference pairs")
    settings = base_settings(seed)
    with stages.stage("tiny Llama from scratch, then NF4") as remarks:
        if is_made(root / "base", settings):
            remarks.append("used again from an earlier run")
        else:
            remarks.append(f"loss {make_base(root / 'base', settings):.3f} nats a token of the answers")


def train(stages: Stages, root: Path, seed: int) -> None:
    """Run the recipe's three commands."""
    with stages.stage("trl sft"):
        stages.run("sft", trl_command(CONFIGS / "sft.yaml", root, "sft", seed))
    with stages.stage("trl reward"):
        stages.run("reward", trl_command(CONFIGS / "reward.yaml", root, "preference", seed))
    with stages.stage("accelerate launch scripts/ppo.py"):
        roles = ("--policy_adapter", str(root / "sft"), "--value_adapter", str(root / "reward"))
        stages.run("ppo", [*ppo_command(CONFIGS / "ppo.yaml", root, "prompts", seed), *roles])


def evaluate(stages: Stages, root: Path, seed: int) -> "tuple[Exam, Exam]":
    """Return the SFT policy's and PPO's answers to the held-out problems, from one loaded base."""
    from arithmetic_evaluation import hold_exam
    from ppo_lora import Role, SharedBase
    from recipe_evaluation import load_tokenizer, pair_accuracy

    nf4 = root / "base" / "nf4"
    with stages.stage("SFT against PPO on held-out problems") as remarks:
        adapters = {"policy": root / "ppo", "reference": root / "sft", "reward": root / "reward"}
        base = SharedBase.from_pretrained(str(nf4), **{role: str(path) for role, path in adapters.items()})
        tokenizer = load_tokenizer(nf4)
        rows = read_rows(root / "data" / "prompts" / "test.jsonl")
        before, after = (hold_exam(base, tokenizer, role, rows, seed) for role in (Role.REFERENCE, Role.POLICY))
        pairs = read_rows(root / "data" / "preference" / "test.jsonl")
        remarks.append(f"reward adapter right on {pair_accuracy(base, tokenizer, pairs):.1%} of the held-out pairs")
    return before, after


def report(console: Console, root: Path, before: "Exam", after: "Exam", start: float) -> int:
    """Print the tables, write summary.json, and return the exit code."""
    from arithmetic_evaluation import accuracy_table, answers_table, build_summary

    summary = build_summary(before, after, time.perf_counter() - start, peak_memory_mb())
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for table in (accuracy_table(before, after), answers_table(before, after)):
        console.print()
        console.print(table)
    console.print()
    for name, value in (
        ("in all", f"{summary['seconds']:.0f} s, at most {summary['peak_rss_mb']:.0f} MiB in a process"),
        ("summary", root / "summary.json"),
    ):
        console.print(f"{name:<8} {value}", markup=False, highlight=False, soft_wrap=True)
    return verdict(console, min(summary["greedy_gain"], summary["sampled_gain"]))


def verdict(console: Console, gain: float) -> int:
    """Return the exit code, and say why if it is not 0."""
    if gain >= WANTED_GAIN:
        return 0
    console.print(
        f"[red]PPO gained {100 * gain:.1f} points[/]; expected {100 * WANTED_GAIN:.0f} or more in both rows."
    )
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    start = time.perf_counter()
    options = parse_arguments(arguments)
    root = options.output_dir.resolve()
    os.environ.update(quiet_environment(root))
    warnings.simplefilter("ignore", FutureWarning)  # what libraries will rename is no news for the reader
    console = Console()
    stages = Stages(console, root / "logs")
    if options.part != "evaluate":
        prepare(stages, root, options.seed)
    if options.part is None:
        train(stages, root, options.seed)
    if options.part == "prepare":
        return 0
    return report(console, root, *evaluate(stages, root, options.seed), start)


if __name__ == "__main__":
    raise SystemExit(main())
