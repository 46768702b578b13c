"""Write a recipe's data in TRL's formats, where the public data set has another form.

    python scripts/prepare.py --recipe gsm8k --output_dir data/gsm8k

Writes the folders `sft`, `preference` and `prompts`, each with a train and a test split, which `load_dataset(folder)`
and `dataset_name: folder` in a YAML read. `--source` takes the raw data set from elsewhere: another Hub id, or a
folder with files named by split.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

Row = dict[str, Any]
Sets = dict[str, list[Row]]

PROMPT_WORDS = 4
REVIEW_WORDS = 80
EVALUATION_PROMPTS = 256
"""Prompts of a test split: an evaluation answers all of them, each time."""


def imdb(rows: Sequence[Row], rng: random.Random) -> Sets:
    """Reviews (text, label 1 = positive) as beginnings to complete, and pairs of a positive and a negative one.

    Only whole sentences of a review are kept, up to 80 words: its end is one that EOS may follow.
    """
    sets: Sets = {"sft": [], "preference": [], "prompts": []}
    reviews: dict[int, list[str]] = {0: [], 1: []}
    for row in rng.sample(list(rows), len(rows)):
        words = _beginning(row["text"]).split(" ")
        if len(words) < 2 * PROMPT_WORDS:
            continue
        prompt, completion = " ".join(words[:PROMPT_WORDS]), " " + " ".join(words[PROMPT_WORDS:])
        sets["sft"].append({"prompt": prompt, "completion": completion})
        sets["prompts"].append({"prompt": prompt})
        reviews[row["label"]].append(prompt + completion)
    # The prompt is inside each of the two: one review's opening would not fit the other.
    sets["preference"] = [{"chosen": good, "rejected": bad} for good, bad in zip(reviews[1], reviews[0], strict=False)]
    return sets


def gsm8k(rows: Sequence[Row], rng: random.Random) -> Sets:
    """Problems (question, answer), and pairs of a solution and the same one with a slip in it."""
    sets: Sets = {"sft": [], "preference": [], "prompts": []}
    for row in rows:
        prompt, answer = f"Question: {row['question'].strip()}\nAnswer:", row["answer"]
        right, wrong = f" {without_notes(answer)}", f" {without_notes(with_a_slip(answer, rng))}"
        sets["sft"].append({"prompt": prompt, "completion": right})
        if wrong != right:
            sets["preference"].append({"prompt": prompt, "chosen": right, "rejected": wrong})
        sets["prompts"].append({"prompt": prompt, "answer": answer.rpartition("####")[2].strip()})
    return sets


@dataclass(frozen=True)
class Recipe:
    """Where a recipe's raw data come from, and what makes TRL's formats of one split of them."""

    source: str
    config: str | None
    convert: Callable[[Sequence[Row], random.Random], Sets]


RECIPES = {
    "gsm8k": Recipe("openai/gsm8k", "main", gsm8k),
    "imdb": Recipe("stanfordnlp/imdb", None, imdb),
}


def _beginning(text: str) -> str:
    """The first whole sentences of a review, up to 80 words; empty if the first one is longer."""
    plain = " ".join(text.replace("<br />", " ").split())
    kept = ""
    for sentence in re.split(r"(?<=[.!?]) ", plain):
        longer = f"{kept} {sentence}".strip()
        if len(longer.split(" ")) > REVIEW_WORDS:
            break
        kept = longer
    return kept


_NOTE = re.compile(r"<<[^<>]*?=([^<>=]*)>>")


def without_notes(answer: str) -> str:
    """The solution without GSM8K's calculator notes, as in `48/2 = <<48/2=24>>24`."""
    return _NOTE.sub("", answer)


def with_a_slip(answer: str, rng: random.Random) -> str:
    """A solution with a wrong result at a random step, carried on to its end, and a wrong final answer.

    Args:
        answer: a solution of GSM8K, notes included.
        rng: draws the step and the wrong numbers.
    """
    final = answer.rpartition("####")[2].strip()
    notes = list(_NOTE.finditer(answer))
    slip = rng.choice(notes) if notes else None
    wrong = answer if slip is None else _changed(answer, slip.end(), slip[1], rng)
    if wrong.rpartition("####")[2].strip() == final:
        last = list(_NOTE.finditer(wrong))[-1:]
        wrong = _changed(wrong, last[0].end() if last else wrong.rindex("####"), final, rng)
    return wrong


def _changed(text: str, start: int, number: str, rng: random.Random) -> str:
    """`text` with every `number` after `start` replaced by one that is up to a third away, but never the same."""
    old = number.strip()
    digits, _, decimals = old.replace(",", "").partition(".")
    if not re.fullmatch(r"-?[0-9]{1,12}", digits):
        return text
    distance = rng.randint(1, max(2, abs(int(digits)) // 3))
    shifted = int(digits) + distance * rng.choice((-1, 1) if int(digits) > distance else (1,))
    new = (f"{shifted:,}" if "," in old else str(shifted)) + (f".{decimals}" if decimals else "")
    alone = rf"(?<![0-9])(?<![0-9][.,]){re.escape(old)}(?![0-9])(?![.,][0-9])"
    return text[:start] + re.sub(alone, new, text[start:])


def prepare(recipe: Recipe, output_dir: Path, source: str | None = None, seed: int = 0) -> dict[str, int]:
    """Write a recipe's folders below `output_dir`; returns the number of rows by file."""
    raw = load_dataset(source or recipe.source, name=None if source else recipe.config)
    written = {}
    for split in ("train", "test"):
        sets = recipe.convert(list(raw[split]), random.Random(f"{seed} {split}"))
        if split == "test":
            sets["prompts"] = sets["prompts"][:EVALUATION_PROMPTS]
        for name, rows in sets.items():
            path = output_dir / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows).to_json(path, force_ascii=False)
            written[str(path)] = len(rows)
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, write, and say what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", required=True, choices=sorted(RECIPES), help="whose data")
    parser.add_argument("--output_dir", type=Path, required=True, help="where the folders are written")
    parser.add_argument("--source", help="raw data set to read instead of the recipe's own: a Hub id or a folder")
    parser.add_argument("--seed", type=int, default=0, help="of the order of reviews and of the slips")
    options = parser.parse_args(arguments)
    for path, rows in prepare(RECIPES[options.recipe], options.output_dir, options.source, options.seed).items():
        print(f"{path}: {rows} rows")


if __name__ == "__main__":
    main()
