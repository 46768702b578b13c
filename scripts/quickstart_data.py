"""The quickstart's generated world: product reviews, the gold rule that judges them, and data sets in TRL's formats.

The gold rule stands in for a person's taste: the share of praising words among a review's judging words. It labels the
preference pairs and it grades the final policy; training sees it only through those pairs.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe_data import write_rows

COLOURS = tuple("red blue green black white yellow grey silver orange purple golden brown".split())
THINGS = (
    *"lamp chair kettle mug radio clock desk bag jacket tent scooter camera".split(),
    *("desk lamp", "coffee mug", "garden chair", "alarm clock"),
)
OPENINGS = ("review of the {product} :", "my honest review of the {product} :", "what i think of the {product} :")

PRAISE = tuple("solid graceful lovely superb reliable comfortable neat pleasant".split())
BLAME = tuple("flimsy nasty noisy dull fragile clumsy shabby poor".split())
PRAISE_CUES, BLAME_CUES = ("luckily", "like"), ("sadly", "regret")
PARTS = tuple("handle finish shape colour size weight packaging manual surface lid base".split())
VERBS = ("is", "looks", "feels", "seems", "turned out")
JUDGING_CLAUSES = (
    "the {part} {verb} {word} .",
    "{cue} the {part} {verb} {word} .",
    "i {feel} the {word} {part} .",
    "this {thing} {verb} {word} .",
    "it has a {word} {part} .",
    "my sister calls it {word} .",
    "a {word} {thing} with a {second} {part} .",
)
PLAIN_CLAUSES = (
    "it came on a monday .",
    "i use it every day .",
    "we bought it for the kitchen .",
    "my old {thing} was {colour} too .",
)
PLAIN_SHARE = 0.15
BEST_GOLD_SCORE = 1.0


def gold_score(text: str) -> float:
    """Judge a review: the share of praising words among its judging words, from 0 to 1.

    A review without a judging word, or one that does not end with a full stop, is worth 0.
    """
    words = text.split()
    praise = sum(word in PRAISE for word in words)
    blame = sum(word in BLAME for word in words)
    if praise + blame == 0 or words[-1] != ".":
        return 0.0
    return praise / (praise + blame)


def gold_reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Apply the gold rule to each completion; a reward function that PPO logs with weight 0, so never learns from."""
    return [gold_score(completion) for completion in completions]


def vocabulary() -> list[str]:
    """Return every word that a generated text can hold, sorted."""
    judging = (*PRAISE, *BLAME, *PRAISE_CUES, *BLAME_CUES)
    texts = (*COLOURS, *THINGS, *OPENINGS, *judging, *PARTS, *VERBS, *JUDGING_CLAUSES, *PLAIN_CLAUSES)
    words = {word for text in texts for word in text.split()}
    return sorted(word for word in words if not word.startswith("{"))


def products() -> list[tuple[str, str]]:
    """Return every (colour, thing)."""
    return [(colour, thing) for colour in COLOURS for thing in THINGS]


def split_products(seed: int, held_out_share: float = 0.125) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the products for training and those that no training stage sees."""
    shuffled = products()
    random.Random(seed).shuffle(shuffled)
    held_out = int(len(shuffled) * held_out_share)
    return shuffled[held_out:], shuffled[:held_out]


def write_prompt(product: tuple[str, str], opening: str) -> str:
    """Return the text that asks for a review of `product`."""
    return opening.format(product=" ".join(product))


def write_review(product: tuple[str, str], rng: random.Random, clauses: int | None = None) -> str:
    """Return a random review of `product` with a mood of its own: two to four clauses, or `clauses`."""
    mood = rng.choice((0.1, 0.9))
    return " ".join(_clause(product, mood, rng) for _ in range(clauses or rng.randint(2, 4)))


def _clause(product: tuple[str, str], mood: float, rng: random.Random) -> str:
    colour, thing = product
    if rng.random() < PLAIN_SHARE:
        return rng.choice(PLAIN_CLAUSES).format(thing=thing, colour=rng.choice(COLOURS))
    words, (cue, feel) = (PRAISE, PRAISE_CUES) if rng.random() < mood else (BLAME, BLAME_CUES)
    word, second = rng.choice(words), rng.choice(words)
    parts = {"part": rng.choice(PARTS), "verb": rng.choice(VERBS), "thing": thing}
    return rng.choice(JUDGING_CLAUSES).format(word=word, second=second, cue=cue, feel=feel, **parts)


def base_corpus(size: int, seed: int) -> list[str]:
    """Return `size` texts for the base model: a prompt and a rambling review of one to seven clauses."""
    rng = random.Random(seed)
    train, _ = split_products(seed)
    texts = []
    for _ in range(size):
        product = rng.choice(train)
        review = write_review(product, rng, clauses=rng.randint(1, 7))
        texts.append(f"{write_prompt(product, rng.choice(OPENINGS))} {review}")
    return texts


def demonstrations(among: Sequence[tuple[str, str]], size: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `size` rows in TRL's prompt-completion format."""
    rows = []
    for _ in range(size):
        product = rng.choice(among)
        prompt = write_prompt(product, rng.choice(OPENINGS))
        rows.append({"prompt": prompt, "completion": f" {write_review(product, rng)}"})
    return rows


def preferences(among: Sequence[tuple[str, str]], size: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `size` rows in TRL's preference format, two reviews of a product ordered by the gold rule."""
    rows: list[dict[str, str]] = []
    while len(rows) < size:
        product = rng.choice(among)
        rejected, chosen = sorted((write_review(product, rng) for _ in range(2)), key=gold_score)
        if gold_score(chosen) > gold_score(rejected):
            prompt = write_prompt(product, rng.choice(OPENINGS))
            rows.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
    return rows


def prompts(among: Sequence[tuple[str, str]], rng: random.Random) -> list[dict[str, str]]:
    """Return every prompt for these products in TRL's prompt-only format, shuffled."""
    rows = [{"prompt": write_prompt(product, opening)} for product in among for opening in OPENINGS]
    rng.shuffle(rows)
    return rows


def write_data_sets(folder: Path, seed: int, size: int) -> None:
    """Write `sft`, `preference` and `prompts` below `folder`, each with a train and a test split.

    Each is a folder that `datasets.load_dataset(folder)` and TRL's `--dataset_name folder` read. The test splits are
    about products that the train splits never name. `size` counts the demonstrations and the preference pairs.
    """
    for index, (split, among) in enumerate(zip(("train", "test"), split_products(seed), strict=True)):
        rng = random.Random(f"{seed} {split}")
        rows = size if index == 0 else max(size // 8, 64)
        write_rows(folder / "sft" / f"{split}.jsonl", demonstrations(among, rows, rng))
        write_rows(folder / "preference" / f"{split}.jsonl", preferences(among, rows, rng))
        write_rows(folder / "prompts" / f"{split}.jsonl", prompts(among, rng))
