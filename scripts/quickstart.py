"""The whole of RLHF in a few minutes on a CPU, offline, through the real scripts.

    python scripts/quickstart.py [--output_dir runs/quickstart] [--seed 0] [--short]

Generates reviews, trains a tiny base model on them, quantizes it to NF4, trains an SFT and a reward adapter on it with
TRL's command line, runs PPO with scripts/ppo.py, and compares SFT with PPO on held-out prompts. The exit code is 1 if
PPO did not raise the gold score.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from quickstart_data import write_data_sets
from recipe_data import read_rows
from recipe_stages import SCRIPTS, Stages, peak_memory_mb, ppo_command, quiet_environment, trl_command

if TYPE_CHECKING:
    from quickstart_evaluation import Reviews

# torch and what imports it are imported inside functions, after main() has set the environment.

CONFIGS = SCRIPTS.parent / "configs" / "quickstart"
MAX_NEW_TOKENS = 48
REVIEWS_PER_PROMPT = 2


@dataclass(frozen=True)
class Sizes:
    """How much is done: rows of the SFT and preference data sets, and responses that PPO samples."""

    rows: int
    episodes: int


FULL = Sizes(rows=1280, episodes=1920)
SHORT = Sizes(rows=512, episodes=768)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"), help="where everything is written")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the base and every training")
    parser.add_argument("--short", action="store_true", help="less data and fewer PPO iterations, as in CI")
    return parser.parse_args(arguments)


def make_base_and_data(stages: Stages, root: Path, sizes: Sizes, seed: int) -> None:
    """Write the data sets and the base model, unless the same base lies there already."""
    from transformers.utils import logging

    from quickstart_base import make_base
    from recipe_base import BaseSettings, is_made

    logging.disable_progress_bar()
    with stages.stage("reviews in TRL's data set formats") as remarks:
        write_data_sets(root / "data", seed, sizes.rows)
        remarks.append(f"{sizes.rows} demonstrations, {sizes.rows} preference pairs")
    settings = BaseSettings(seed=seed)
    with stages.stage("tiny Llama from scratch, then NF4") as remarks:
        if is_made(root / "base", settings):
            remarks.append("used again from an earlier run")
        else:
            remarks.append(f"loss {make_base(root / 'base', settings):.2f} nats a token")


def train_adapters(stages: Stages, root: Path, seed: int) -> None:
    """Train the SFT adapter and the reward adapter with TRL's command line."""
    with stages.stage("trl sft"):
        stages.run("sft", trl_command(CONFIGS / "sft.yaml", root, "sft", seed))
    with stages.stage("trl reward") as remarks:
        stages.run("reward", trl_command(CONFIGS / "reward.yaml", root, "preference", seed))
        remarks.append(f"right on {reward_accuracy(root):.1%} of the held-out pairs")


def reward_accuracy(root: Path) -> float:
    """Return the reward adapter's accuracy on the held-out preference pairs."""
    from ppo_lora import SharedBase
    from recipe_evaluation import load_tokenizer, pair_accuracy

    nf4 = root / "base" / "nf4"
    base = SharedBase.from_pretrained(str(nf4), reward=str(root / "reward"))
    return pair_accuracy(base, load_tokenizer(nf4), read_rows(root / "data" / "preference" / "test.jsonl"))


def run_ppo(stages: Stages, root: Path, sizes: Sizes, seed: int) -> None:
    """Train the policy with scripts/ppo.py."""
    with stages.stage("accelerate launch scripts/ppo.py") as remarks:
        command = [
            *ppo_command(CONFIGS / "ppo.yaml", root, "prompts", seed),
            *("--policy_adapter", str(root / "sft")),
            *("--reward_adapter", str(root / "reward")),
            *("--total_episodes", str(sizes.episodes)),
        ]
        stages.run("ppo", command)
        remarks.append(f"{sizes.episodes} reviews sampled")


def compare(stages: Stages, root: Path, seed: int) -> "tuple[Reviews, Reviews]":
    """Return the SFT policy's and PPO's reviews of the held-out products, from one loaded base."""
    from ppo_lora import EvaluationConfig
    from quickstart_evaluation import write_reviews

    policies = {name: str(root / name) for name in ("sft", "ppo")}
    config = EvaluationConfig(
        num_samples=REVIEWS_PER_PROMPT, temperature=1.0, max_completion_length=MAX_NEW_TOKENS, seed=seed
    )
    with stages.stage("SFT against PPO on held-out prompts"):
        rows = read_rows(root / "data" / "prompts" / "test.jsonl")
        reviews = write_reviews(root / "base" / "nf4", policies, str(root / "reward"), rows, config)
    return reviews["sft"], reviews["ppo"]


def show(console: Console, root: Path, before: "Reviews", after: "Reviews", start: float) -> None:
    """Print the tables, draw the picture, and write summary.json."""
    from quickstart_report import build_summary, comparison_table, draw_curves, samples_table

    draw_curves(root / "ppo", before, after, root / "curves.png")
    summary = build_summary(before, after, time.perf_counter() - start, peak_memory_mb())
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for table in (comparison_table(before, after), samples_table(before, after)):
        console.print()
        console.print(table)
    console.print()
    for name, value in (
        ("curves", root / "curves.png"),
        ("adapter", root / "ppo"),
        ("in all", f"{summary['seconds']:.0f} s, at most {summary['peak_rss_mb']:.0f} MiB in a process"),
    ):
        console.print(f"{name:<8} {value}", markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every stage; return 0 if PPO raised the gold score, else 1."""
    start = time.perf_counter()
    options = parse_arguments(arguments)
    root = options.output_dir.resolve()
    os.environ.update(quiet_environment(root))
    sizes = SHORT if options.short else FULL
    warnings.simplefilter("ignore", FutureWarning)  # what libraries will rename is no news for the reader
    console = Console()
    stages = Stages(console, root / "logs")
    make_base_and_data(stages, root, sizes, options.seed)
    train_adapters(stages, root, options.seed)
    run_ppo(stages, root, sizes, options.seed)
    before, after = compare(stages, root, options.seed)
    show(console, root, before, after, start)
    if after.gold <= before.gold:
        console.print(f"[red]PPO did not raise the gold score[/]: {before.gold:.3f} before, {after.gold:.3f} after.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
