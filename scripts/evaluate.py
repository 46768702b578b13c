"""Base, SFT and PPO policies side by side on a prompt set, on one loaded base.

python scripts/evaluate.py --model_name_or_path runs/quickstart/base/nf4 --dataset_name runs/quickstart/data/prompts \
    --policies base sft=runs/quickstart/sft ppo=runs/quickstart/ppo --reward_adapter runs/quickstart/reward

One process, on the GPU where there is one. Tables go to the terminal; evaluation.json, evaluation.png and
samples.jsonl go to --output_dir.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from rich.console import Console
from rich.progress import Progress
from trl import ModelConfig, TrlParser, get_quantization_config

from evaluate_report import draw, sample_rows, samples_table, tables
from ppo_lora import (
    Evaluation,
    EvaluationConfig,
    SharedBase,
    choose_reference,
    compare_policies,
    evaluate_policies,
    hub_errors,
    load_function,
    load_policies,
    parse_policies,
    provenance,
)


@dataclass
class EvaluationArguments:
    """What is compared, on which prompts, by which scorers, and where the results go."""

    dataset_name: str = field(metadata={"help": "Prompts, text or chat messages: a folder or Hub id."})
    policies: list[str] = field(
        metadata={
            "help": "'base' for the base without an adapter, and name=adapter, where an adapter is a folder or "
            "`id[@revision][:subfolder]`."
        }
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to take the prompts from."})
    max_prompts: int | None = field(default=None, metadata={"help": "Take the first so many prompts. Default: all."})
    reference: str | None = field(
        default=None,
        metadata={"help": "Policy that the KL is measured from. Default: sft if there is one, else base."},
    )
    reward_adapter: str | None = field(default=None, metadata={"help": "SEQ_CLS reward adapter for the same base."})
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Reward functions by dotted name, such as my_module.my_reward."}
    )
    output_dir: str = field(default="runs/eval", metadata={"help": "Where the results go."})

    def __post_init__(self) -> None:
        if self.reward_adapter is None and not self.reward_funcs:
            raise ValueError("Nothing scores the responses: give --reward_adapter, --reward_funcs, or both.")
        if self.max_prompts is not None and self.max_prompts < 1:
            raise ValueError(f"max_prompts is {self.max_prompts}; expected at least 1.")
        if Path(self.output_dir).exists() and not Path(self.output_dir).is_dir():
            raise ValueError(f"output_dir is {self.output_dir}, which is a file; give a folder.")


def read_prompts(arguments: EvaluationArguments) -> Dataset:
    """The prompts, at most --max_prompts of them.

    Raises:
        OSError, ValueError: there is no such data set or split.
    """
    name, split = arguments.dataset_name, arguments.dataset_test_split
    with hub_errors("data set", name):
        dataset = load_dataset(name, name=arguments.dataset_config, split=split)
    if "prompt" not in dataset.column_names:
        raise ValueError(f"The data set {name} has the columns {dataset.column_names}; expected 'prompt'.")
    return dataset if arguments.max_prompts is None else dataset.take(min(arguments.max_prompts, len(dataset)))


def load_base(
    arguments: EvaluationArguments, config: EvaluationConfig, model: ModelConfig, policies: dict[str, str | None]
) -> SharedBase:
    """The base with every adapter on it."""
    if model.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing; give the base that the adapters were trained on.")
    return load_policies(
        model.model_name_or_path,
        policies,
        config,
        reward=arguments.reward_adapter,
        quantization_config=get_quantization_config(model),
        revision=model.model_revision,
        attn_implementation=model.attn_implementation,
        dtype=model.dtype,
    )


@contextmanager
def progress_bars(console: Console, policies: Sequence[str], responses: int) -> Iterator[Callable[[str, int], None]]:
    """One bar a policy, gone when all is done."""
    with Progress(console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=responses) for name in policies}
        yield lambda name, count: progress.advance(tasks[name], count)


def settings(arguments: EvaluationArguments, config: EvaluationConfig, model: ModelConfig) -> dict[str, Any]:
    """The options that the numbers depend on."""
    used = ("model_name_or_path", "model_revision", "dtype", "attn_implementation", "load_in_4bit", "load_in_8bit")
    return {**{name: getattr(model, name) for name in used}, **asdict(arguments), **asdict(config)}


def write(folder: Path, report: dict[str, Any], evaluation: Evaluation) -> None:
    """Write evaluation.json and samples.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in sample_rows(evaluation))
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")


def main(arguments: EvaluationArguments, config: EvaluationConfig, model: ModelConfig) -> None:
    """Load, sample, compare, and show the result."""
    console, start = Console(), time.perf_counter()
    policies = parse_policies(arguments.policies)
    reference = choose_reference(policies, arguments.reference)
    functions = [load_function(name) for name in arguments.reward_funcs or []]
    dataset = read_prompts(arguments)
    base = load_base(arguments, config, model, policies)
    with progress_bars(console, list(policies), len(dataset) * config.num_samples) as progress:
        evaluation = evaluate_policies(base, list(policies), dataset, functions, config, reference, progress=progress)
    comparison = compare_policies(evaluation, config.best_of, config.seed)
    report = {**comparison.entry(), "settings": settings(arguments, config, model), **provenance(base)}
    folder = Path(arguments.output_dir)
    write(folder, report, evaluation)
    draw(evaluation, comparison, folder / "evaluation.png")
    for table in (*tables(comparison), samples_table(evaluation)):
        console.print(table, "")
    console.print(f"{folder}  {time.perf_counter() - start:.0f} s", markup=False, highlight=False, soft_wrap=True)


def run(given: Sequence[str] | None = None) -> None:
    """Parse the command line and compare.

    Raises:
        SystemExit: what was given cannot be compared; the message is one line.
    """
    try:
        parser = TrlParser((EvaluationArguments, EvaluationConfig, ModelConfig))
        main(*parser.parse_args_and_config(given, fail_with_unknown_args=True))
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # what libraries will rename is no news for the reader
    run()
