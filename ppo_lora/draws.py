"""How tokens are drawn: with random numbers that belong to a response and not to its batch."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256
"""Probabilities that are summed up before it is looked where a number falls."""

_BELOW_ONE = 1 - 2**-53


def stream_seed(*numbers: int) -> int:
    """The seed of the stream of random numbers that ``numbers`` name."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**63
    return seed


def uniform_draws(rows: int, length: int, *stream: int) -> Tensor:
    """Uniform random numbers of a stream of their own; the global random numbers are left as they were.

    Args:
        rows: responses.
        length: tokens of the longest response.
        stream: numbers that name the stream.

    Returns:
        [rows, length] float64, on the CPU, from 0 to below 1.
    """
    generator = torch.Generator().manual_seed(stream_seed(*stream))
    return torch.rand(rows, length, generator=generator, dtype=torch.float64)


def inverse_transform(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token from each row: the first at which the cumulative distribution exceeds the row's number.

    What a row says does not depend on the rows beside it, and two models that agree say the same.

    Args:
        probabilities: [B, V] float, not negative; rows need not sum to exactly 1.
        numbers: [B] float64, from 0 to below 1.

    Returns:
        [B] int64.
    """
    size = min(_BLOCK, probabilities.shape[1])
    missing = -probabilities.shape[1] % size
    blocks = torch.nn.functional.pad(probabilities, (0, missing)).unflatten(1, (-1, size))
    block, number = _first_over(blocks.sum(dim=-1), numbers)
    token, _ = _first_over(blocks[torch.arange(len(block), device=block.device), block], number)
    return (block * size + token).clamp(max=probabilities.shape[1] - 1)  # NaN belongs nowhere


def _first_over(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first places [B] at which the sums of weights [B, N] exceed numbers [B] of their wholes, and how much of
    the weights there the numbers are over what comes before them, from 0 to below 1."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = numbers * cumulative[:, -1]
    place = torch.searchsorted(cumulative, target[:, None], right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.gather(1, place).double().squeeze(1)
    over = target - (cumulative.gather(1, place).squeeze(1) - weight)
    return place.squeeze(1), (over / weight).clamp(0, _BELOW_ONE)
