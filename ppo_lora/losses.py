"""Clipped policy and value losses and what is watched beside them. All tensors are [B, T]; losses are token means."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import masked_mean, masked_var


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, negated: mean of max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps)).

    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7.

    Args:
        logprobs: [B, T] float, log pi(a_t|s_t) in nats under the policy being trained.
        old_logprobs: [B, T] float, the same under the policy that sampled.
        advantages: [B, T] float.
        mask: [B, T] bool, True at real tokens.
        cliprange: eps.

    Returns:
        ``(loss, clip_fraction)``, scalars; the share of tokens whose gradient the clip removes has no gradient.
    """
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, mask))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    clip_fraction = masked_mean((clipped > unclipped).to(ratio.dtype), mask)
    return masked_mean(torch.maximum(unclipped, clipped), mask), clip_fraction.detach()


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Half the mean of the larger of two squared errors: the value's, and the value's clipped to old +- eps.

    Source: the N+ implementation details (arXiv 2403.17031), value function clipping.

    Args:
        values: [B, T] float, V(s_t) under the value role being trained.
        old_values: [B, T] float, V(s_t) when the rollout was made.
        returns: [B, T] float.
        mask: [B, T] bool, True at real tokens.
        cliprange_value: eps, in units of the value.

    Returns:
        ``(loss, clip_fraction)``, scalars.
    """
    values, old_values, returns = (torch.where(mask, x, torch.zeros_like(x)) for x in (values, old_values, returns))
    clipped = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    clip_fraction = masked_mean((clipped_error > error).to(values.dtype), mask)
    return 0.5 * masked_mean(torch.maximum(error, clipped_error), mask), clip_fraction.detach()


def entropy_bonus(entropy: Tensor, mask: Tensor, entropy_coef: float) -> Tensor:
    """What the entropy adds to the loss: -entropy_coef times its token mean (Schulman et al. 2017, equation 9).

    Args:
        entropy: [B, T] float, entropy of the policy's next-token distribution in nats.
        mask: [B, T] bool, True at real tokens.
        entropy_coef: weight of the bonus.
    """
    return -entropy_coef * masked_mean(entropy, mask)


@torch.no_grad()
def policy_statistics(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the policy has moved: token means of half the squared log-ratio and of the ratio, and its variance.

    Args:
        logprobs: [B, T] float.
        old_logprobs: [B, T] float.
        mask: [B, T] bool.

    Returns:
        ``approxkl`` (nats), ``ratio`` and ``ratio_var``, scalars.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.exp()
    return {
        "approxkl": masked_mean(0.5 * log_ratio.square(), mask),
        "ratio": masked_mean(ratio, mask),
        "ratio_var": masked_var(ratio, mask),
    }


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old, and 0 at padding, where either may hold anything (an infinity times 0 would be NaN)."""
    return torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
