"""What a pass over the base computes: rows of real tokens that all begin at place 0, or one behind the other.

Without padding before them, rows of a causal model need neither a mask nor positions: no real token sees what follows
it, and the places are the positions. What is left of padding is at the ends of the shorter rows, and rows are put
together by length; packed rows have none. All is laid out on the host, so that no pass waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BATCH_COST = 64
"""What a batch costs beside its tokens, in tokens: many small ones have less padding, but each takes its time."""


@dataclass(frozen=True)
class Rows:
    """Prompts with responses as the base reads them.

    Attributes:
        input_ids: [B, N] int64, each row's tokens from place 0 on; what follows the last one is never read. [1, N] of
            packed rows, one behind the other.
        last: [B] int64, places of each row's last token among all of ``input_ids``.
        predictors: [M] int64, places of the states that predict the M response tokens, among the same.
        tokens: [M] int64, these tokens.
        places: [M] int64, where they are among the B * T of ``shape``.
        shape: (B, T).
        position_ids: [1, N] int64 of packed rows; None where places are positions.
        lengths: of packed rows, which attention tells apart by them.
    """

    input_ids: Tensor
    last: Tensor
    predictors: Tensor
    tokens: Tensor
    places: Tensor
    shape: tuple[int, int]
    position_ids: Tensor | None = None
    lengths: tuple[int, ...] = ()

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


def compact_rows(input_ids: Tensor, attention_mask: Tensor, response_length: int = 0, packed: bool = False) -> Rows:
    """Move each row's real tokens to its start, or all rows' behind one another.

    Args:
        input_ids: [B, P + T] int64.
        attention_mask: [B, P + T] bool or 0/1, True at real tokens; best on the CPU, which is where it is read.
        response_length: T; 0 for rows of which only the last state matters.
        packed: make one row of all, without any padding, unless they are of one length.

    Raises:
        ValueError: a row has no token, or a response without a token before it.
    """
    mask = attention_mask.bool().cpu()
    lengths, positions = mask.sum(dim=1), mask.long().cumsum(dim=1) - 1
    packed = packed and bool((lengths != lengths[0]).any())
    width, response = int(lengths.max()), mask[:, mask.shape[1] - response_length :]
    rows, columns = response.nonzero(as_tuple=True)
    before = positions[rows, mask.shape[1] - response_length + columns] - 1
    if not bool(lengths.min()) or bool((before < 0).any()):
        broken = int(lengths.argmin()) if not bool(lengths.min()) else int(rows[before.argmin()])
        raise ValueError(f"Row {broken} has no real token before its response; every row needs a prompt.")
    order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    order = order + torch.arange(len(mask))[:, None] * mask.shape[1]
    starts = torch.arange(len(mask)) * width
    if packed:
        order, starts = mask.flatten().nonzero().T, lengths.cumsum(dim=0) - lengths
    order, last, predictors, places = (
        index.to(input_ids.device, non_blocking=True)
        for index in (order, starts + lengths - 1, starts[rows] + before, rows * response_length + columns)
    )
    compact = input_ids.flatten()[order]
    tokens = compact.flatten()[predictors + 1]
    return Rows(
        input_ids=compact,
        last=last,
        predictors=predictors,
        tokens=tokens,
        places=places,
        shape=(len(mask), response_length),
        position_ids=positions[mask][None].to(input_ids.device, non_blocking=True) if packed else None,
        lengths=tuple(lengths.tolist()) if packed else (),
    )


def batches_by_length(lengths: Tensor, rows: int, tokens: int | None = None, packed: bool = False) -> list[Tensor]:
    """Put rows of like length together, in the batches that cost the least: their tokens, padding included, and each
    batch as much as some tokens more.

    Args:
        lengths: [B] int64, tokens of each row, on the CPU.
        rows: most rows of a batch.
        tokens: most tokens of a batch, padding included; a row that is longer is a batch of its own. None: no limit.
        packed: there is no padding.

    Returns:
        Indices of rows, longest first.
    """
    order = lengths.argsort(descending=True, stable=True)
    ordered = lengths[order].tolist()
    before = [0, *lengths[order].cumsum(dim=0).tolist()]
    best, starts = [0], [0]  # of the first so many rows: their cost, and where their last batch starts
    for stop in range(1, len(ordered) + 1):
        fitting: list[tuple[int, int]] = []
        for start in range(stop - 1, max(stop - rows, 0) - 1, -1):
            size = before[stop] - before[start] if packed else (stop - start) * ordered[start]
            if fitting and tokens is not None and size > tokens:
                break
            fitting.append((best[start] + size + BATCH_COST, start))
        cost, start = min(fitting)
        best.append(cost)
        starts.append(start)
    batches, stop = [], len(ordered)
    while stop:
        batches.append(order[starts[stop] : stop])
        stop = starts[stop]
    return batches[::-1]
