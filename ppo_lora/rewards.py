"""Per-token rewards: the KL penalty at every token and the score at the last one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .masking import last_true_index


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled tokens.

    With r = log pi(a|s) - log pi_ref(a|s): k1 = r (unbiased), k2 = r^2 / 2, k3 = exp(-r) - 1 + r (unbiased, never
    negative). Source: Schulman, "Approximating KL divergence", 2020.

    Args:
        logprobs: [B, T] float, under the policy that sampled.
        ref_logprobs: [B, T] float, under the reference.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.

    Returns:
        [B, T] float, in nats.

    Raises:
        ValueError: for an unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator is {estimator!r}; expected one of {sorted(KL_ESTIMATORS)}.")
    return KL_ESTIMATORS[estimator](logprobs - ref_logprobs)


def kl_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
    kl_estimator: str = "k1",
    *,
    normalize_by_length: bool = False,
    later_only: bool = False,
) -> Tensor:
    """The KL penalty's part of each token's reward: -kl_coef * KL_t.

    Args:
        logprobs: [B, T] float, policy log-probabilities in nats.
        ref_logprobs: [B, T] float, reference log-probabilities in nats.
        mask: [B, T] bool, True at real response tokens.
        kl_coef: weight of the penalty.
        kl_estimator: see :func:`kl_penalty`.
        normalize_by_length: divide by the number of the response's tokens, so that a row's sum is its mean KL a token.
        later_only: give each token the penalty of the one after it, so that its return holds those of later tokens and
            not its own. That is for a KL in the loss, which gives each token's own KL its exact gradient.

    Returns:
        [B, T] float; 0 at masked positions.
    """
    penalty = -kl_coef * kl_penalty(logprobs, ref_logprobs, kl_estimator)
    penalty = torch.where(mask, penalty, torch.zeros_like(penalty))
    if normalize_by_length:
        penalty = penalty / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.nn.functional.pad(penalty[:, 1:], (0, 1)) if later_only else penalty


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
    kl_estimator: str = "k1",
    *,
    normalize_by_length: bool = False,
    later_only: bool = False,
) -> Tensor:
    """Rewards of each token: -kl_coef * KL_t everywhere, and the score added at the last real token.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2; Ouyang et al. 2022 (arXiv 2203.02155), equation 2.

    Args:
        scores: [B] float, one score a response.
        logprobs: [B, T] float, policy log-probabilities in nats.
        ref_logprobs: [B, T] float, reference log-probabilities in nats.
        mask: [B, T] bool, True at real response tokens.
        kl_coef: weight of the penalty.
        kl_estimator: see :func:`kl_penalty`.
        normalize_by_length, later_only: see :func:`kl_rewards`.

    Returns:
        [B, T] float; 0 at masked positions.
    """
    options = {"normalize_by_length": normalize_by_length, "later_only": later_only}
    rewards = kl_rewards(logprobs, ref_logprobs, mask, kl_coef, kl_estimator, **options)
    last = torch.arange(mask.shape[1], device=mask.device) == last_true_index(mask)[:, None]
    return rewards + torch.where(last & mask, scores[:, None].to(rewards.dtype), torch.zeros_like(rewards))


def subtract_missing_eos(scores: Tensor, stopped: Tensor, penalty: float) -> Tensor:
    """Take ``penalty`` off the score of every response without a stop token (TRL's ``missing_eos_penalty``).

    Args:
        scores: [B] float.
        stopped: [B] bool, True where the response ended with a stop token.
        penalty: a positive number, in units of the score.
    """
    return torch.where(stopped, scores, scores - penalty)


def replace_missing_eos(scores: Tensor, stopped: Tensor, score: float) -> Tensor:
    """Give every response without a stop token this fixed ``score`` (the EOS trick of arXiv 2403.17031).

    Args:
        scores: [B] float; NaN, for a response that nobody scored, stays.
        stopped: [B] bool, True where the response ended with a stop token.
        score: what an unfinished response is worth, in units of the score.
    """
    return torch.where(stopped | scores.isnan(), scores, torch.full_like(scores, score))


def clip_scores(scores: Tensor, score_clip: float) -> Tensor:
    """Scores cut to the range from -``score_clip`` to ``score_clip`` (TRL <= 0.11's ``score_clip``), [B] float."""
    return scores.clamp(-score_clip, score_clip)


def overlong_penalties(lengths: Tensor, max_length: int, buffer_length: int, penalty: float) -> Tensor:
    """What responses lose for their length: nothing up to the buffer, ``penalty`` at the limit, linear in between.

    penalty * clip((|y| - (max_length - buffer_length)) / buffer_length, 0, 1). Source: DAPO (Yu et al. 2025, arXiv
    2503.14476), section 3.4, equation 13, where the penalty is 1.

    Args:
        lengths: [B] int64, tokens of each response, the stop token included.
        max_length: the longest that a response may be, in tokens.
        buffer_length: the last tokens before it, over which the penalty grows.
        penalty: a positive number, in units of the score.

    Returns:
        [B] float32, not negative; to be subtracted.
    """
    over = lengths.float() - (max_length - buffer_length)
    return penalty * (over / buffer_length).clamp(0.0, 1.0)


def add_step_rewards(rewards: Tensor, step_rewards: Tensor, mask: Tensor) -> Tensor:
    """Per-token rewards with those of reward sources that judge tokens or steps on top, [B, T] float.

    Args:
        rewards: [B, T] float, as :func:`token_rewards` gives them.
        step_rewards: [B, T] float, each at the token that ends its step.
        mask: [B, T] bool, True at real response tokens.
    """
    return rewards + torch.where(mask, step_rewards.to(rewards.dtype), torch.zeros_like(rewards))
