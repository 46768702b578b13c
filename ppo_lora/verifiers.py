"""Reward functions for answers that can be checked, with GRPO's signature.

In a YAML: ``reward_funcs: [ppo_lora.verifiers.numeric_answer_reward]``. They read text and compare numbers: nothing in
a text is ever run, and each search takes time linear in its length.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

LONGEST_NUMBER = 100
"""Characters of the longest number that is read; longer ones count as none (Python itself refuses 4300 digits)."""

LONGEST_EXPONENT = 3
"""Digits of the longest exponent: 1e9999999999 would fill the memory."""

_BOX = "\\boxed{"
_PLAIN_NUMBER = r"\s?([-+−]?[0-9][0-9.,]*)\s?"
_FRACTION = re.compile(r"\\[dt]?frac\s?\{" + _PLAIN_NUMBER + r"\}\s?\{" + _PLAIN_NUMBER + r"\}")
_GROUPING = r"(?<=[0-9])(?:\\[!,]|\{,\})(?=[0-9]{3})"  # 1{,}000 and 1\,000
_CURRENCY = r"(?<![0-9])\\?[$€£¥]\s?(?=[-+−]?\.?[0-9])"
_IGNORED = re.compile(f"{_GROUPING}|{_CURRENCY}")
_NUMBER_PATTERN = (
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)"  # not the 2 of CO2, nor what follows 1.2 in 1.2.3
    r"(?:(?<![)\]}])(?P<sign>[-+−]))?"  # after a bracket it is an operator
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
    r"(?:[eE](?P<exponent>[-+]?[0-9]+))?"
    r"(?:\s?/\s?(?P<over>[0-9]+(?:\.[0-9]+)?))?"
)
_NUMBER = re.compile(_NUMBER_PATTERN)
_MARKED = re.compile(r"####\s*" + _NUMBER_PATTERN)


def numeric_answer_reward(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1 where the completion's answer is the number of the data set's ``answer`` or ``solution`` column, else 0.

    A text's answer is the last number in its last ``\\boxed{...}``; without a box, the number right after its last
    ``####`` (GSM8K's form); without either, its last number. Numbers are compared exactly, as fractions: ``42``,
    ``+42.00``, ``$42``, ``84/2`` and ``\\frac{84}{2}`` are one number, and ``0.33`` is not ``1/3``. Commas group
    thousands; units and percent signs are ignored.

    Args:
        completions: B texts, or B lists of chat messages, of which the last one counts.
        answer: B right answers: numbers, or texts that hold them.
        solution: the same; read where there is no ``answer``.
        columns: what else reward functions are called with; not used.

    Returns:
        B rewards: 1.0, 0.0, or None where the right answer has no number.

    Raises:
        ValueError: the data set has neither column.
    """
    expected = solution if answer is None else answer
    if expected is None:
        raise ValueError(
            "numeric_answer_reward needs a column 'answer' or 'solution' with the right answers; it was called with "
            f"{sorted(columns)}. Rename yours: dataset.rename_column('...', 'answer')."
        )
    return [_match(given, _expected(right)) for given, right in zip(completions, expected, strict=True)]


def format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the completion says which number is its answer, in ``\\boxed{...}`` or after ``####``, else 0.

    Args:
        completions: B texts, or B lists of chat messages, of which the last one counts.
        columns: what else reward functions are called with; not used.

    Returns:
        B rewards, 1.0 or 0.0.
    """
    return [float(_announced(_plain(completion)) is not None) for completion in completions]


def _match(completion: Any, expected: Fraction | None) -> float | None:
    return None if expected is None else float(_answer(_plain(completion)) == expected)


def _expected(right: Any) -> Fraction | None:
    """The right answer; None for texts without a number, None, NaN and infinities."""
    try:
        return Fraction(str(right))  # a number, also where Python writes it as 1e-07
    except (ValueError, ZeroDivisionError):
        return _answer(_plain(str(right)))


def _plain(completion: Any) -> str:
    """The text of a completion, without what may stand inside a number: currency, LaTeX's grouping and fractions."""
    return _IGNORED.sub("", _FRACTION.sub(r"\1/\2", _text(completion)))


def _text(completion: Any) -> str:
    """A completion as text: itself, or the content of its last message, which may come in parts."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text") or "") for part in content)
    return str(content or "")


def _answer(text: str) -> Fraction | None:
    found = _announced(text) if _BOX in text else _announced(text) or _last(_NUMBER, text)
    return None if found is None else _value(found)


def _announced(text: str) -> re.Match[str] | None:
    """The number that the text names as its answer: the last one in its last box, else the one after its last mark."""
    _, box, rest = text.rpartition(_BOX)
    return _last(_NUMBER, _until_closed(rest)) if box else _last(_MARKED, text)


def _until_closed(text: str) -> str:
    """What stands before the brace that closes one opened just before ``text``; all of it if none does."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return text


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _value(found: re.Match[str]) -> Fraction | None:
    number, exponent, over = found["number"].replace(",", ""), found["exponent"] or "0", found["over"] or "1"
    too_long = len(number) + len(over) > LONGEST_NUMBER or len(exponent.lstrip("+-")) > LONGEST_EXPONENT
    if too_long or not over.strip("0."):
        return None
    value = Fraction(f"{number}e{exponent}") / Fraction(over)
    return -value if found["sign"] in ("-", "−") else value
