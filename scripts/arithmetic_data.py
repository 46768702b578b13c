"""The arithmetic recipe's world: sums of two-digit numbers, by a textbook and by pupils, in TRL's data set formats.

The textbook puts the sign in front, `+37,45=82`, and is right. Pupils write `37+45=72`: most of them forget to carry.
The base has read both. SFT copies pupils, so it adds badly. PPO sees problems, and is told which answers are right.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from recipe_data import write_rows

Problem = tuple[int, int]

OPERANDS = range(10, 100)
DIGITS = "0123456789"
SIGNS = f"{DIGITS}+,="
HELD_OUT_PAIRS = 250
TEXTBOOK_SHARE = 0.5
"""Of the base's texts; pupils wrote the others."""
RIGHT_SHARE = 0.3
"""Of the pupils."""


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems for training, and those that nothing is trained on, in neither order of their numbers."""
    pairs = [(first, second) for first in OPERANDS for second in OPERANDS if first < second]
    chosen = random.Random(seed).sample(pairs, HELD_OUT_PAIRS)
    held_out = [*chosen, *((second, first) for first, second in chosen)]
    apart = set(held_out)
    train = [(first, second) for first in OPERANDS for second in OPERANDS if (first, second) not in apart]
    return train, held_out


def write_prompt(problem: Problem) -> str:
    """Return the text that asks for the sum, as pupils write it."""
    first, second = problem
    return f"{first}+{second}="


def forget_carries(problem: Problem) -> int:
    """Add digit by digit and drop every carry."""
    first, second = problem
    return (first // 10 + second // 10) % 10 * 10 + (first + second) % 10


def pupil_answer(problem: Problem, rng: random.Random) -> int:
    """Return what a random pupil answers; all are right where there is nothing to carry."""
    return sum(problem) if rng.random() < RIGHT_SHARE else forget_carries(problem)


def wrong_answer(problem: Problem, rng: random.Random) -> int:
    """Return the sum without its carries, or with another last digit where it has none."""
    answer = forget_carries(problem)
    if answer != sum(problem):
        return answer
    return answer - answer % 10 + int(rng.choice(DIGITS.replace(str(answer % 10), "")))


def base_corpus(size: int, seed: int) -> list[str]:
    """Return `size` texts for the base model, sums of the training problems by the textbook or by a pupil."""
    rng = random.Random(seed)
    train, _ = split_problems(seed)
    return [_base_text(problem, rng) for problem in rng.choices(train, k=size)]


def _base_text(problem: Problem, rng: random.Random) -> str:
    first, second = problem
    if rng.random() < TEXTBOOK_SHARE:
        return f"+{first},{second}={first + second}"
    return f"{write_prompt(problem)}{pupil_answer(problem, rng)}"


def demonstrations(among: Sequence[Problem], size: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `size` rows in TRL's prompt-completion format, by pupils."""
    problems = rng.choices(among, k=size)
    return [{"prompt": write_prompt(each), "completion": str(pupil_answer(each, rng))} for each in problems]


def preferences(among: Sequence[Problem], size: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `size` rows in TRL's preference format, a right answer and a wrong one."""
    return [
        {"prompt": write_prompt(each), "chosen": str(sum(each)), "rejected": str(wrong_answer(each, rng))}
        for each in rng.choices(among, k=size)
    ]


def questions(among: Sequence[Problem]) -> list[dict[str, str]]:
    """Return every problem in TRL's prompt-only format, with the answer for the checker."""
    return [{"prompt": write_prompt(each), "answer": str(sum(each))} for each in among]


def write_data_sets(folder: Path, seed: int, size: int) -> None:
    """Write `sft`, `preference` and `prompts` below `folder`, each with a train and a test split.

    The test splits are about the held-out problems. `size` counts the demonstrations and the preference pairs.
    """
    for split, among in zip(("train", "test"), split_problems(seed), strict=True):
        rng = random.Random(f"{seed} {split}")
        rows = size if split == "train" else len(among)
        write_rows(folder / "sft" / f"{split}.jsonl", demonstrations(among, rows, rng))
        write_rows(folder / "preference" / f"{split}.jsonl", preferences(among, rows, rng))
        write_rows(folder / "prompts" / f"{split}.jsonl", questions(among))
