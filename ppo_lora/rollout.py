"""From prompts to Experience: sample, score, penalize, estimate advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .advantages import generalized_advantage_estimation, truncated_importance_weights
from .config import PPOConfig, SamplingOptions
from .losses import explained_variance
from .masking import Reduce, first_stop_mask, masked_mean, masked_whiten, whitening
from .rewards import (
    add_step_rewards,
    kl_rewards,
    overlong_penalties,
    replace_missing_eos,
    subtract_missing_eos,
    token_rewards,
)
from .roles import Role, RoleName
from .rows import Rows, batches_by_length, compact_rows
from .shared_base import SharedBase
from .splitting import RowLimit
from .types import Experience, Prompts, Rollout


@dataclass(frozen=True)
class TokenScores:
    """What the base says of each sampled token, all [B, T] float32 and 0 at padding.

    ``exact_kl`` is None unless ``log_exact_kl`` asks for it.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    entropy: Tensor
    exact_kl: Tensor | None = None


def sample(
    base: SharedBase,
    prompts: Prompts,
    config: SamplingOptions,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    draws: Tensor,
    role: RoleName = Role.POLICY,
    keep_logprobs: bool = False,
    limit: RowLimit | None = None,
) -> Rollout:
    """Sample one response to each prompt.

    Args:
        base: whose ``role`` answers.
        prompts: B prompts.
        config: lengths, temperature and batch size.
        stop_token_ids: ids that end a response.
        pad_token_id: fills finished rows.
        draws: [B, max_completion_length] float64, uniform numbers to draw each row's tokens with, whatever rows are
            sampled beside it.
        role: policy, reference, or a further policy.
        keep_logprobs: note the log-probabilities that the tokens were sampled with.
        limit: how many rows fit.

    Returns:
        A rollout with T the longest response.
    """
    mask = prompts.attention_mask.cpu()
    lengths, width = mask.sum(dim=1), mask.shape[1]
    responses = torch.full(draws.shape, pad_token_id, dtype=torch.long, device=base.device)
    logprobs = torch.zeros(draws.shape if keep_logprobs else (0, 0), dtype=torch.float32, device=base.device)

    def answer(rows: Tensor) -> int:
        real = slice(width - int(lengths[rows].max()), width)
        answers, drawn_with = base.sample(
            prompts.input_ids[rows, real].to(base.device),
            prompts.attention_mask[rows, real].to(base.device),
            draws[rows],
            stop_token_ids,
            pad_token_id,
            role,
            config.temperature,
            **config.generation_options,
        )
        responses[rows, : answers.shape[1]] = answers
        if keep_logprobs:
            logprobs[rows, : answers.shape[1]] = drawn_with
        return answers.shape[1]

    limit, longest = limit or RowLimit("sampling"), 0
    for batch in lengths.argsort(descending=True, stable=True).split(config.local_rollout_forward_batch_size):
        longest = max(longest, *(length for _, length in limit.run(batch, answer)))
    rollout = assemble(prompts, responses[:, :longest], stop_token_ids)
    return replace(rollout, sampling_logprobs=logprobs[:, :longest]) if keep_logprobs else rollout


def assemble(prompts: Prompts, responses: Tensor, stop_token_ids: Sequence[int]) -> Rollout:
    """Put prompts and sampled responses together and mark what is real.

    Args:
        prompts: B prompts of P tokens.
        responses: [B, T] int64, anything after the first stop token.
        stop_token_ids: ids that end a response.
    """
    mask, stopped = first_stop_mask(responses, stop_token_ids)
    device = responses.device
    return Rollout(
        sequences=torch.cat([prompts.input_ids.to(device), responses], dim=1),
        attention_mask=torch.cat([prompts.attention_mask.to(device), mask], dim=1),
        response_mask=mask,
        stopped=stopped,
    )


@torch.no_grad()
def score_tokens(base: SharedBase, rollout: Rollout, config: PPOConfig, limit: RowLimit | None = None) -> TokenScores:
    """Log-probabilities under policy and reference, entropies and values, through the pass that training uses.

    The log-probabilities do not come from generation: then the ratio would not start at 1, nor the KL at 0.

    Args:
        base: the roles.
        rollout: the sampled rows.
        config: temperature, and how many rows at a time.
        limit: how many rows fit.
    """
    mask, limit = rollout.attention_mask.cpu(), limit or RowLimit("scoring")
    device = rollout.sequences.device

    def read(rows: Tensor) -> Rows:
        sequences = rollout.sequences[rows.to(device)]
        return compact_rows(sequences, mask[rows], rollout.response_length, base.packs_rows)

    order, pieces = [], []
    for batch in batches_by_length(mask.sum(dim=1), config.local_rollout_forward_batch_size, packed=base.packs_rows):
        for rows, scores in limit.run(batch, lambda rows: score_rows(base, read(rows), config)):
            order.append(rows)
            pieces.append(scores)
    back = torch.cat(order).argsort().to(device)
    return TokenScores(*(torch.cat(column)[back] for column in zip(*pieces, strict=True)))


@torch.no_grad()
def score_rows(base: SharedBase, rows: Rows, config: PPOConfig) -> tuple[Tensor, ...]:
    """The fields of :class:`TokenScores` for some rows."""
    shared = base.shares_value_adapter
    logprobs, entropy, *values = base(Role.POLICY, rows, config.temperature, with_values=shared)
    ref_logprobs, _ = base(Role.REFERENCE, rows, config.temperature)
    exact_kl = [base.exact_kl(rows, config.temperature)] if config.log_exact_kl else []
    return (logprobs, ref_logprobs, values[0] if shared else base(Role.VALUE, rows), entropy, *exact_kl)


def final_scores(scores: Tensor, rollout: Rollout, config: PPOConfig) -> Tensor:
    """The scores after what is done about responses without a stop token and overlong ones, [B] float32."""
    if config.missing_eos_penalty is not None:
        scores = subtract_missing_eos(scores, rollout.stopped, config.missing_eos_penalty)
    if config.missing_eos_score is not None:
        scores = replace_missing_eos(scores, rollout.stopped, config.missing_eos_score)
    if config.overlong_penalty is not None and config.overlong_buffer_length is not None:
        lengths = rollout.response_mask.sum(dim=1)
        buffer, penalty = config.overlong_buffer_length, config.overlong_penalty
        scores = scores - overlong_penalties(lengths, config.max_completion_length, buffer, penalty)
    return scores


def build_experience(
    rollout: Rollout,
    tokens: TokenScores,
    scores: Tensor,
    kl_coef: float,
    config: PPOConfig,
    reduce: Reduce | None = None,
    step_rewards: Tensor | None = None,
) -> Experience:
    """Rewards, advantages and returns of a scored rollout.

    Args:
        rollout: the sampled rows.
        tokens: what the base says of each token.
        scores: [B] float32, after :func:`final_scores`; NaN for responses that nobody scored, from which nothing is
            learned: none of their tokens is in the experience's ``response_mask``.
        kl_coef: weight of the KL penalty.
        config: everything else.
        reduce: sums a tensor over all processes, for whitening; None for one process.
        step_rewards: [B, T] float32, rewards of tokens beside the scores.

    Raises:
        FloatingPointError: something is not finite; the message names it and the row.
    """
    mask, in_loss = rollout.response_mask & ~scores.isnan()[:, None], config.kl_in == "loss"
    rewards = token_rewards(
        scores,
        tokens.logprobs,
        tokens.ref_logprobs,
        mask,
        kl_coef,
        config.kl_estimator,
        normalize_by_length=config.normalize_kl_by_length,
        later_only=in_loss,
    )
    if step_rewards is not None:
        rewards = add_step_rewards(rewards, step_rewards, mask)
        scores = scores + step_rewards.sum(dim=1)
    scale = torch.ones((), device=mask.device)
    if config.whiten_rewards:
        scale = scale * whitening(rewards, mask, reduce=reduce)[1]
        rewards = masked_whiten(rewards, mask, shift_mean=False, reduce=reduce)
    advantages, returns = generalized_advantage_estimation(rewards, tokens.values, mask, config.gamma, config.lam)
    if config.whiten_advantages:
        scale = scale * whitening(advantages, mask, reduce=reduce)[1]
        advantages = masked_whiten(advantages, mask, reduce=reduce)
    if config.importance_sampling_cap is not None and rollout.sampling_logprobs is not None:  # None in evaluations
        advantages = advantages * importance_weights(rollout, tokens, config.importance_sampling_cap)
    experience = Experience(
        sequences=rollout.sequences,
        attention_mask=rollout.attention_mask,
        response_mask=mask,
        logprobs=tokens.logprobs,
        ref_logprobs=tokens.ref_logprobs,
        values=tokens.values,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        scores=scores,
        kl_weights=(kl_coef * scale if in_loss else torch.zeros_like(scale)).expand(len(scores)),
    )
    _check_finite(experience)
    return experience


def importance_weights(rollout: Rollout, tokens: TokenScores, cap: float) -> Tensor:
    """[B, T] float32; see :func:`~ppo_lora.advantages.truncated_importance_weights`. The policy loss is linear in the
    advantages, so that their weights are the loss's."""
    assert rollout.sampling_logprobs is not None
    return truncated_importance_weights(tokens.logprobs, rollout.sampling_logprobs, rollout.response_mask, cap)


def _check_finite(experience: Experience) -> None:
    for name in ("logprobs", "ref_logprobs", "values", "scores", "rewards", "advantages", "returns"):
        numbers = getattr(experience, name)
        finite = (numbers.isfinite() | (numbers.isnan() & (name == "scores"))).reshape(len(numbers), -1).all(dim=1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise FloatingPointError(
                f"{name} of row {row} of the rollout batch are not finite. The weights have diverged (lower "
                "learning_rate or value_learning_rate) or the dtype overflows (use bfloat16 or float32)."
            )


def rollout_metrics(
    experience: Experience, tokens: TokenScores, rollout: Rollout, kl_coef: float, config: PPOConfig
) -> dict[str, Any]:
    """What happened in a rollout batch, under TRL's names; scalars, means over rows unless said otherwise.

    ``objective/kl``, ``objective/entropy`` and rewards are sums over a response's tokens, in nats.
    """
    mask = rollout.response_mask
    kl = torch.where(mask, tokens.logprobs - tokens.ref_logprobs, 0.0)
    penalty = kl_rewards(
        tokens.logprobs,
        tokens.ref_logprobs,
        mask,
        kl_coef,
        config.kl_estimator,
        normalize_by_length=config.normalize_kl_by_length,
    )
    lengths = mask.sum(dim=1).float()
    non_score_reward = penalty.sum(dim=1).mean()
    score, spread = _mean_and_std(experience.scores)
    metrics = {
        "objective/kl": kl.sum(dim=1).mean(),
        "objective/entropy": -tokens.logprobs.sum(dim=1).mean(),
        "objective/non_score_reward": non_score_reward,
        "objective/rlhf_reward": non_score_reward + score,
        "objective/scores": score,
        "objective/scores_std": spread,
        "policy/entropy_avg": masked_mean(tokens.entropy, mask),
        "val/num_eos_tokens": rollout.stopped.float().sum(),
        "val/values_mean": masked_mean(tokens.values, mask),
        "val/explained_variance": explained_variance(tokens.values, experience.returns, experience.response_mask),
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1.0 - rollout.stopped.float().mean(),
        "completions/unscored_ratio": experience.scores.isnan().float().mean(),
    }
    if tokens.exact_kl is not None:
        metrics["objective/exact_kl"] = tokens.exact_kl.sum(dim=1).mean()
    if rollout.sampling_logprobs is not None:
        metrics |= _sampling_metrics(rollout.sampling_logprobs, tokens.logprobs, mask, config)
    return metrics


def _sampling_metrics(
    sampling_logprobs: Tensor, logprobs: Tensor, mask: Tensor, config: PPOConfig
) -> dict[str, Tensor]:
    """How far sampling and training are apart, under TRL's names."""
    assert config.importance_sampling_cap is not None
    difference = (logprobs - sampling_logprobs).abs()[mask]
    ratio = truncated_importance_weights(logprobs, sampling_logprobs, mask, config.importance_sampling_cap)[mask]
    return {
        "sampling/sampling_logp_difference/mean": difference.mean(),
        "sampling/sampling_logp_difference/max": difference.max(),
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
    }


def rescaling_metrics(raw_scores: Tensor, experience: Experience, config: PPOConfig) -> dict[str, Tensor]:
    """TRL's keys for the scores without normalisation and clipping, and keys for them as they are trained on.

    Args:
        raw_scores: [B] float32, without both, but with what missing EOS and length cost.
        experience: with the scores that are trained on.
        config: nothing is there to be told where it has neither.
    """
    if config.score_normalization == "none" and config.score_clip is None:
        return {}
    (raw, raw_spread), (score, spread) = _mean_and_std(raw_scores), _mean_and_std(experience.scores)
    return {
        "objective/scores": raw,
        "objective/scores_std": raw_spread,
        "objective/normalized_scores": score,
        "objective/normalized_scores_std": spread,
    }


def source_metrics(by_source: dict[str, Tensor], prefix: str = "rewards") -> dict[str, Any]:
    """Mean and spread of each reward source over the rows that it scored; NaN if it scored none."""
    metrics: dict[str, Any] = {}
    for name, values in by_source.items():
        mean = values.nanmean()
        metrics[f"{prefix}/{name}/mean"] = mean
        metrics[f"{prefix}/{name}/std"] = (values - mean).square().nanmean().sqrt()
    return metrics


def _mean_and_std(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of the scores that are not NaN; NaN where there are none."""
    known = scores[~scores.isnan()]
    return known.mean(), known.std(correction=0) if len(known) else known.mean()
