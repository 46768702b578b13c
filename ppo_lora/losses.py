"""Clipped policy and value losses and what is watched beside them. All tensors are [B, T].

Losses are token means, or sums weighted with ``weights`` [B, T] (see :func:`aggregation_weights`): those of the pieces
of a batch add up to that of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import masked_mean, masked_sum, masked_var
from .rewards import kl_penalty

LOSS_AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_constant")


def aggregation_weights(mask: Tensor, how: str, tokens: Tensor, rows: Tensor, longest: int) -> Tensor:
    """What each token's loss counts in an optimizer step, of which ``mask`` may be a piece.

    ``token_mean``: 1 / tokens, as in TRL's former PPO. ``sequence_mean``: 1 / (rows * length of the token's response),
    the mean over responses of their means (Shao et al. 2024, arXiv 2402.03300, equation 3). ``sequence_sum_constant``:
    1 / (rows * longest), without a bias towards short or long responses (Liu et al. 2025, arXiv 2503.20783).

    Args:
        mask: [B, T] bool, True at real tokens.
        how: one of ``LOSS_AGGREGATIONS``.
        tokens: scalar, real tokens in the step; there may be none, where no response was scored.
        rows: scalar, responses in the step.
        longest: the longest that a response can be, in tokens.

    Returns:
        [B, T] float32; 0 at masked positions.

    Raises:
        ValueError: for an unknown aggregation.
    """
    real = mask.float()
    if how == "token_mean":
        return real / tokens.clamp(min=1)
    if how == "sequence_mean":
        return real / (rows * real.sum(dim=1, keepdim=True).clamp(min=1))
    if how == "sequence_sum_constant":
        return real / (rows * longest)
    raise ValueError(f"loss_aggregation is {how!r}; expected one of {list(LOSS_AGGREGATIONS)}.")


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float,
    *,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, negated: mean of max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps)).

    Sources: Schulman et al. 2017 (arXiv 1707.06347), equation 7; two clip ranges: Yu et al. 2025 (arXiv 2503.14476),
    section 3.1; dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.

    Args:
        logprobs: [B, T] float, log pi(a_t|s_t) in nats under the policy being trained.
        old_logprobs: [B, T] float, the same under the policy that sampled.
        advantages: [B, T] float.
        mask: [B, T] bool, True at real tokens.
        cliprange: eps; the lower one where there are two.
        cliprange_high: the upper eps; None for the same.
        dual_clip: c > 1: where A < 0, the loss of a token is at most -A * c. None for no such bound.
        weights: [B, T] float; None for a mean over the mask.

    Returns:
        ``(loss, clip_fraction)``, scalars; the share of tokens whose gradient the clips remove has no gradient.
    """
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, mask))
    unclipped = -advantages * ratio
    high = cliprange if cliprange_high is None else cliprange_high
    losses = torch.maximum(unclipped, -advantages * ratio.clamp(1.0 - cliprange, 1.0 + high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    clip_fraction = masked_mean((losses != unclipped).to(ratio.dtype), mask)
    return masked_sum(losses, mask, weights), clip_fraction.detach()


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange_value: float,
    *,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Half the mean of the larger of two squared errors: the value's, and the value's clipped to old +- eps.

    Source: the N+ implementation details (arXiv 2403.17031), value function clipping.

    Args:
        values: [B, T] float, V(s_t) under the value role being trained.
        old_values: [B, T] float, V(s_t) when the rollout was made.
        returns: [B, T] float.
        mask: [B, T] bool, True at real tokens.
        cliprange_value: eps, in units of the value; infinite for no clipping.
        weights: [B, T] float; None for a mean over the mask.

    Returns:
        ``(loss, clip_fraction)``, scalars.
    """
    values, old_values, returns = (torch.where(mask, x, torch.zeros_like(x)) for x in (values, old_values, returns))
    clipped = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    clip_fraction = masked_mean((clipped_error > error).to(values.dtype), mask)
    return 0.5 * masked_sum(torch.maximum(error, clipped_error), mask, weights), clip_fraction.detach()


def entropy_bonus(entropy: Tensor, mask: Tensor, entropy_coef: float, *, weights: Tensor | None = None) -> Tensor:
    """What the entropy adds to the loss: -entropy_coef times its token mean (Schulman et al. 2017, equation 9).

    Args:
        entropy: [B, T] float, entropy of the policy's next-token distribution in nats.
        mask: [B, T] bool, True at real tokens.
        entropy_coef: weight of the bonus.
        weights: [B, T] float; None for a mean over the mask.
    """
    return -entropy_coef * masked_sum(entropy, mask, weights)


def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_estimator: str,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """A loss whose gradient is that of the KL to the reference at the sampled states, whichever estimator is taken.

    With r = log pi - log pi_ref and the ratio w = pi / pi_old: the mean of w * k1(r) or w * k3(r), differentiated
    through w as well (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), or of w * k2(r) with w held constant. Without w,
    the expected gradient of k1 would be 0 and that of k3 the gradient of KL(reference || policy). A token's effect on
    the KL of later tokens is not in it: that belongs into its advantage.

    Args:
        logprobs: [B, T] float, in nats, under the policy being trained.
        old_logprobs: [B, T] float, under the policy that sampled.
        ref_logprobs: [B, T] float, under the reference.
        mask: [B, T] bool, True at real tokens.
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        weights: [B, T] float; None for a mean over the mask.

    Returns:
        A scalar, in nats a token where it is a mean.
    """
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, mask))
    ratio = ratio.detach() if kl_estimator == "k2" else ratio
    real, ref = (torch.where(mask, each, torch.zeros_like(each)) for each in (logprobs, ref_logprobs))
    kl = kl_penalty(real, ref, kl_estimator)
    return masked_sum(ratio * kl, mask, weights)


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


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect value, 0 for a constant one, below 0 for a worse one.

    Args:
        values: [B, T] float.
        returns: [B, T] float.
        mask: [B, T] bool, True at real tokens.

    Returns:
        A scalar; NaN where the returns are all the same.
    """
    variance = masked_var(returns, mask)
    return torch.where(variance > 0, 1.0 - masked_var(returns - values, mask) / variance, torch.nan)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old, and 0 at padding, where either may hold anything (an infinity times 0 would be NaN)."""
    return torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
