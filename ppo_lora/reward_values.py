"""What a reward function may return, checked: a number a completion, rewards of tokens or spans, or None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .responses import Responses
from .spans import rewards_of_spans

_STEPS = "a finite number for each token, or pairs ((start, end), reward) of spans of the text"


@dataclass(frozen=True)
class SourceRewards:
    """One reward source's rewards.

    Attributes:
        finals: [B] float32, rewards of whole responses; 0 where tokens or spans were rewarded, NaN for None.
        steps: [B, T] float32, rewards of tokens; None where no row has any.
        step_counts: [B] float32, how many tokens or spans were rewarded; NaN for rows with a number or None.
    """

    finals: Tensor
    steps: Tensor | None = None
    step_counts: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """[B] float32, everything that a row gets; NaN for None."""
        return self.finals if self.steps is None else self.finals + self.steps.sum(dim=1)


def checked_rewards(name: str, result: Any, responses: Responses) -> SourceRewards:
    """A reward function's result as tensors.

    Args:
        name: of the function.
        result: a list with, for each completion, a number, None, as many numbers as it has tokens, or pairs of a span
            ``(start, end)`` of its text and a reward.
        responses: what was rewarded.

    Raises:
        ValueError: it is something else; the message names the function and the row.
    """
    rows = len(responses.prompts)
    result = _plain(result)
    if not isinstance(result, (list, tuple)) or len(result) != rows:
        given = f"{len(result)} values" if isinstance(result, (list, tuple)) else f"a {type(result).__name__}"
        raise ValueError(f"The reward function {name} returned {given}; expected a list of {rows}, one a completion.")
    result = [_plain(value) for value in result]
    stepped = [isinstance(value, (list, tuple)) for value in result]
    finals = torch.tensor(
        [0.0 if steps else _final(name, value, row, responses) for row, (value, steps) in _rows(result, stepped)]
    )
    if not any(stepped):
        return SourceRewards(finals)
    tokens = torch.zeros(rows, responses.rollout.response_length)
    counts = torch.full((rows,), math.nan)
    for row, (value, steps) in _rows(result, stepped):
        if steps:
            rewards = _token_rewards(name, value, row, responses)
            tokens[row, : len(rewards)] = torch.tensor(rewards)
            counts[row] = float(len(value))
    return SourceRewards(finals, tokens, counts)


def _rows(result: list[Any], stepped: list[bool]) -> Any:
    return enumerate(zip(result, stepped, strict=True))


def _plain(value: Any) -> Any:
    """Tensors and arrays as numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _final(name: str, value: Any, row: int, responses: Responses) -> float:
    return math.nan if value is None else _number(name, value, value, row, responses)


def _token_rewards(name: str, value: Sequence[Any], row: int, responses: Responses) -> list[float]:
    """One row's rewards of tokens or of spans, as one number a token."""
    tokens = len(responses.completion_ids[row])
    items = [_plain(item) for item in value]
    pairs = [_pair(item) for item in items]
    if all(pair is not None for pair in pairs):
        spans = [(pair[0], _number(name, pair[1], value, row, responses)) for pair in pairs if pair is not None]
        try:
            return rewards_of_spans(spans, responses.token_ends(row) if spans else [0] * tokens)
        except ValueError as error:
            raise ValueError(f"The reward function {name} returned {value!r} for row {row}: {error}.") from error
    numbers = [_number(name, item, value, row, responses) for item in items]
    if len(numbers) != tokens:
        raise ValueError(
            f"The reward function {name} returned {len(numbers)} numbers for row {row}, whose completion has {tokens} "
            f"tokens; expected {_STEPS}."
        )
    return numbers


def _pair(item: Any) -> tuple[tuple[int, int], Any] | None:
    """``((start, end), reward)``; None for anything else."""
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        return None
    span, reward = _plain(item[0]), _plain(item[1])
    if not isinstance(span, (list, tuple)) or len(span) != 2 or not all(type(place) is int for place in span):
        return None
    return (span[0], span[1]), reward


def _number(name: str, value: Any, given: Any, row: int, responses: Responses) -> float:
    try:
        number = math.nan if isinstance(value, str) else torch.tensor(float(value), dtype=torch.float32).item()
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        wanted = _STEPS if isinstance(given, (list, tuple)) else "a finite number, or None where it does not apply"
        raise ValueError(
            f"The reward function {name} returned {given!r} for row {row} (completion "
            f"{responses.completions[row]!r}); expected {wanted}."
        )
    return number
