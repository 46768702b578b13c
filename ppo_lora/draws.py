"""How tokens are drawn: with random numbers that belong to a response and not to its batch."""

from __future__ import annotations

import torch
from torch import Tensor


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
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, (numbers * cumulative[:, -1])[:, None], right=True).squeeze(1)
    return tokens.clamp(max=probabilities.shape[1] - 1)  # NaN belongs nowhere
