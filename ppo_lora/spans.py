"""Which token a character of a completion comes from, and rewards of spans of text as rewards of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""

_REPLACEMENT = "�"
_LONGEST_WAIT = 8
"""A character has at most four bytes: tokens that show nothing certain for longer than this are broken text."""


def token_ends(ids: Sequence[int], text: str, decode: Decode) -> list[int]:
    """How many characters of the text there are after each token.

    Character c comes from the first token whose number is over c: the token that completes it, where its bytes are
    spread over several. A token that shows nothing (a special token) adds none. This works from the ids, since the
    same text may be written with other tokens; and with a few decodings of a few tokens each, since decoding every
    beginning takes time that grows with the square of the length.

    Args:
        ids: a completion's tokens.
        text: what all of them decode to.
        decode: see :data:`Decode`.

    Returns:
        As many numbers as tokens, never falling, the last one the length of the text.
    """
    ends = _by_windows(ids, text, decode)
    return ends if not ends or ends[-1] == len(text) else _by_beginnings(ids, text, decode)


def _by_windows(ids: Sequence[int], text: str, decode: Decode) -> list[int]:
    """Each token decoded behind a few that are known: ``ids[start:settled]`` show the last ``base`` characters."""
    ends: list[int] = []
    start = settled = base = known = 0
    for i in range(len(ids)):
        shown = decode(ids[start : i + 1])
        tail = shown[base:]
        matched = _common(tail, text[known : known + len(tail)])
        ends.append(known + matched)
        certain = bool(tail) and not tail.endswith(_REPLACEMENT) and matched == len(tail)
        if certain or (tail and i + 1 - settled >= _LONGEST_WAIT):
            uncertain = len(tail) - matched
            start, settled, known = settled, i + 1, known + matched
            base = len(decode(ids[start:settled])) - uncertain
    return _rising(ends)


def _by_beginnings(ids: Sequence[int], text: str, decode: Decode) -> list[int]:
    """By definition: what the text has in common with the decoding of each of its beginnings."""
    return _rising([_common(decode(ids[: i + 1]), text) for i in range(len(ids))])


def _common(first: str, second: str) -> int:
    """Characters until the two differ."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _rising(ends: list[int]) -> list[int]:
    highest = 0
    return [highest := max(highest, end) for end in ends]


def rewards_of_spans(spans: Sequence[tuple[tuple[int, int], float]], ends: Sequence[int]) -> list[float]:
    """A reward for each token: each span's reward at the token that holds the span's last character.

    Args:
        spans: ``((start, end), reward)``, characters from ``start`` up to but without ``end``.
        ends: see :func:`token_ends`.

    Returns:
        As many numbers as tokens; rewards at the same token are added.

    Raises:
        ValueError: a span is empty or reaches over the text's ends.
    """
    rewards = [0.0] * len(ends)
    length = ends[-1] if ends else 0
    for (start, end), reward in spans:
        if not 0 <= start < end <= length:
            raise ValueError(f"the span ({start}, {end}) is not inside of the completion's {length} characters")
        rewards[bisect_left(ends, end)] += reward
    return rewards
