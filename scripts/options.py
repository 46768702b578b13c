"""Write docs/options.md, the table of every option, from the options themselves.

python scripts/options.py [--check]
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from ppo import PPOScriptArguments
from ppo_lora import PPOConfig

TARGET = Path(__file__).parent.parent / "docs" / "options.md"
HEADER = """# Options

Made by `make options` from `PPOConfig` and the arguments of `scripts/ppo.py`; do not edit. Every option of
`transformers.TrainingArguments` works too, those of the first group with another default.
"""


def groups(config: type) -> dict[str, list[str]]:
    """The fields a configuration adds, under the comments that its source groups them by."""
    own, found, title = set(inspect.get_annotations(config)), {}, ""
    for line in inspect.getsource(config).splitlines():
        if comment := re.fullmatch(r"    # (.+?)\.?", line):
            title = comment[1]
        elif (name := re.match(r"    (\w+): ", line)) and name[1] in own:
            found.setdefault(title, []).append(name[1])
    return found


def row(field: Field[Any], annotation: str) -> str:
    """One option as a line of a table: name, type, default, help."""
    text = " ".join(str(field.metadata.get("help", "")).split())
    if choices := field.metadata.get("choices"):
        text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    default = field.default if field.default is not MISSING else field.default_factory()
    cells = [f"`{field.name}`", f"`{annotation}`", f"`{default!r}`", text]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sections() -> Iterator[tuple[str, list[str]]]:
    """Titles and their options, a line each. The annotations are the class's: HfArgumentParser rewrites Field.type."""
    for config, grouped in (
        (PPOConfig, groups(PPOConfig)),
        (PPOScriptArguments, {"Arguments of scripts/ppo.py": list(inspect.get_annotations(PPOScriptArguments))}),
    ):
        known, annotations = {field.name: field for field in fields(config)}, inspect.get_annotations(config)
        for title, names in grouped.items():
            yield title, [row(known[name], annotations[name]) for name in names]


def document() -> str:
    """The whole page."""
    head = "| option | type | default | what it does |\n| --- | --- | --- | --- |"
    tables = ["\n".join([f"\n## {title}\n", head, *rows]) for title, rows in sections()]
    return HEADER + "\n".join(tables) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or only say whether it is up to date."""
    if "--check" not in arguments:
        TARGET.write_text(document())
    elif not TARGET.exists() or TARGET.read_text() != document():
        print(f"{TARGET.name} is stale; run `make options`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
