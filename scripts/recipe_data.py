"""Data sets of the small recipes: JSONL files that `datasets.load_dataset(folder)` and TRL read."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write one JSONL file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of one JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
