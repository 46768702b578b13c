"""What a pass over the base computes: rows of real tokens that all begin at place 0.

Without padding before them, rows of a causal model need neither a mask nor positions: no real token sees what follows
it, and the places are the positions. What is left of padding is at the ends of the shorter rows, and rows are put
together by length. Everything here is laid out on the host, so that no pass waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FULL = 256
"""Tokens that keep a device busy: from there on, rows of another length are better off in a batch of their own."""

_PADDING = 0.1
"""The share of padding above which they are."""


@dataclass(frozen=True)
class Rows:
    """Prompts with responses as the base reads them.

    Attributes:
        input_ids: [B, N] int64, each row's tokens from place 0 on; what follows the last one is never read.
        last: [B] int64, places of each row's last token among the B * N.
        predictors: [M] int64, places of the states that predict the M response tokens, among the B * N.
        tokens: [M] int64, these tokens.
        places: [M] int64, where they are among the B * T of ``shape``.
        shape: (B, T).
    """

    input_ids: Tensor
    last: Tensor
    predictors: Tensor
    tokens: Tensor
    places: Tensor
    shape: tuple[int, int]

    def states(self, hidden: Tensor) -> Tensor:
        """[M, H], the states that predict response tokens, from all of them, [B, N, H]."""
        return hidden.flatten(0, 1)[self.predictors]

    def last_states(self, hidden: Tensor) -> Tensor:
        """[B, H], the states of the last tokens, from all of them, [B, N, H]."""
        return hidden.flatten(0, 1)[self.last]

    def scattered(self, values: Tensor) -> Tensor:
        """[B, T] float32, the M numbers where their tokens are, 0 elsewhere."""
        whole = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.float32, device=values.device)
        return whole.index_copy(0, self.places, values.float()).view(self.shape)


def compact_rows(input_ids: Tensor, attention_mask: Tensor, response_length: int = 0) -> Rows:
    """Move each row's real tokens to its start.

    Args:
        input_ids: [B, P + T] int64.
        attention_mask: [B, P + T] bool or 0/1, True at real tokens; best on the CPU, which is where it is read.
        response_length: T; 0 for rows of which only the last state matters.

    Raises:
        ValueError: a row has no token, or a response without a token before it.
    """
    mask = attention_mask.bool().cpu()
    lengths, positions = mask.sum(dim=1), mask.long().cumsum(dim=1) - 1
    width, response = int(lengths.max()), mask[:, mask.shape[1] - response_length :]
    rows, columns = response.nonzero(as_tuple=True)
    before = positions[rows, mask.shape[1] - response_length + columns] - 1
    if not bool(lengths.min()) or bool((before < 0).any()):
        broken = int(lengths.argmin()) if not bool(lengths.min()) else int(rows[before.argmin()])
        raise ValueError(f"Row {broken} has no real token before its response; every row needs a prompt.")
    order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    starts = torch.arange(len(mask)) * width
    device = input_ids.device
    moved = [
        index.to(device, non_blocking=True)
        for index in (order, starts + lengths - 1, starts[rows] + before, rows * response_length + columns)
    ]
    compact = input_ids.gather(1, moved[0])
    tokens = compact.flatten()[moved[2] + 1]
    return Rows(compact, moved[1], moved[2], tokens, moved[3], (len(mask), response_length))


def batches_by_length(lengths: Tensor, rows: int, tokens: int | None = None) -> list[Tensor]:
    """Put rows of like length together.

    Args:
        lengths: [B] int64, tokens of each row, on the CPU.
        rows: most rows of a batch.
        tokens: most tokens of a batch, padding included; a row that is longer is a batch of its own. None for a batch
            of as many rows as there may be, unless too much of it would be padding.

    Returns:
        Indices of rows, longest first.
    """
    batches: list[list[int]] = []
    ordered = lengths.argsort(descending=True, stable=True).tolist()
    longest, real = 0, 0
    for row in ordered:
        length = int(lengths[row])
        size = (len(batches[-1]) + 1) * longest if batches else 0
        full = not batches or len(batches[-1]) == rows or (tokens is not None and size > tokens)
        if full or (real >= _FULL and real + length < (1 - _PADDING) * size):
            batches.append([])
            longest, real = length, 0
        batches[-1].append(row)
        real += length
    return [torch.tensor(batch) for batch in batches]
