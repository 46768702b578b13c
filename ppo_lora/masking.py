"""Statistics over the real tokens of padded batches, and the masks themselves. True is a real token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the True positions of ``mask``; 0 where there is none.

    Args:
        values: float tensor of any shape.
        mask: bool tensor of the same shape.

    Returns:
        A scalar tensor.
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() / mask.sum().clamp(min=1)


def masked_sum(values: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum over the True positions of ``mask`` of ``weights * values``; the mean over them where there are no weights.

    Args:
        values: float tensor of any shape.
        mask: bool tensor of the same shape.
        weights: float tensor of the same shape, or None for one over the number of True positions.
    """
    if weights is None:
        return masked_mean(values, mask)
    return (torch.where(mask, values, torch.zeros_like(values)) * weights).sum()


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance over the True positions of ``mask`` (divided by n - 1); 0 where there are fewer than two.

    Args:
        values: float tensor of any shape.
        mask: bool tensor of the same shape.
    """
    centred = torch.where(mask, values - masked_mean(values, mask), torch.zeros_like(values))
    return centred.square().sum() / (mask.sum() - 1).clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, epsilon: float = 1e-8, reduce: Reduce | None = None
) -> Tensor:
    """Scale the True positions to unit variance, and to zero mean unless told otherwise; 0 elsewhere.

    With ``shift_mean=False`` the mean is put back after scaling, as the N+ implementation details do for rewards
    (Huang et al. 2024, arXiv 2403.17031, section on reward whitening).

    Args:
        values: [B, T] float.
        mask: [B, T] bool.
        shift_mean: subtract the mean.
        epsilon: added to the variance.
        reduce: sums a tensor over all processes, so that the moments are those of all rows; None for one process.
    """
    mean, scale = whitening(values, mask, epsilon, reduce)
    whitened = (values - mean) * scale
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, torch.zeros_like(values))


def whitening(
    values: Tensor, mask: Tensor, epsilon: float = 1e-8, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor]:
    """What :func:`masked_whiten` subtracts and what it multiplies with: ``(mean, 1 / std)``, scalars."""
    reduce = reduce or (lambda total: total)
    zeros = torch.zeros_like(values)
    total, count = reduce(torch.stack([torch.where(mask, values, zeros).sum(), mask.sum().to(values.dtype)]))
    mean = total / count.clamp(min=1)
    squares = reduce(torch.where(mask, values - mean, zeros).square().sum())
    return mean, torch.rsqrt(squares / (count - 1).clamp(min=1) + epsilon)


def first_stop_mask(responses: Tensor, stop_token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which response tokens are real: all up to the first stop token, that one included.

    The mask comes from positions and never from the pad id, so a policy that samples the pad id before it stops is
    counted right.

    Args:
        responses: [B, T] int64.
        stop_token_ids: ids that end a response.

    Returns:
        ``(mask, stopped)``: [B, T] bool, and [B] bool, True where a stop token was found.
    """
    stops = torch.isin(responses, torch.as_tensor(list(stop_token_ids), device=responses.device))
    stops_before = stops.long().cumsum(dim=1) - stops.long()
    return stops_before == 0, stops.any(dim=1)


def last_true_index(mask: Tensor) -> Tensor:
    """Index of the last True of each row; 0 for a row without one.

    Args:
        mask: [B, N] bool.

    Returns:
        [B] int64.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, torch.zeros_like(positions)).amax(dim=1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions that count real tokens only, so that left padding does not move a token. At padding: any.

    Args:
        attention_mask: [B, N] bool or 0/1.

    Returns:
        [B, N] int64.
    """
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
