"""From prompts to Experience: sample, score, penalize, estimate advantages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .advantages import generalized_advantage_estimation
from .config import PPOConfig, SamplingOptions
from .draws import InverseTransform, stream_seed
from .masking import Reduce, first_stop_mask, masked_mean, masked_whiten
from .rewards import kl_penalty, replace_missing_eos, subtract_missing_eos, token_rewards
from .roles import Role, RoleName
from .shared_base import SharedBase
from .types import Experience, Prompts, Rollout


@dataclass(frozen=True)
class TokenScores:
    """What the base says of each sampled token, all [B, T] float32 and 0 at padding."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    entropy: Tensor


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Draw from a stream of random numbers of its own, named by ``numbers``; the global one is left as it was."""
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(stream_seed(*numbers))
        yield


def sample(
    base: SharedBase,
    prompts: Prompts,
    config: SamplingOptions,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    role: RoleName = Role.POLICY,
    draws: Tensor | None = None,
) -> Rollout:
    """Sample one response to each prompt.

    Args:
        base: whose ``role`` answers.
        prompts: B prompts.
        config: lengths, temperature and batch size.
        stop_token_ids: ids that end a response.
        pad_token_id: fills finished rows.
        role: policy, reference, or a further policy.
        draws: [B, max_completion_length] uniform numbers to draw each row's tokens with, whatever rows are sampled
            beside it; None for torch's global random numbers.

    Returns:
        A rollout with T the longest response.
    """
    responses = []
    for rows in torch.arange(len(prompts)).split(config.local_rollout_forward_batch_size):
        ids, mask = prompts.input_ids[rows], prompts.attention_mask[rows]
        options = config.generation_options
        sequences = base.generate(
            input_ids=ids.to(base.device),
            attention_mask=mask.to(base.device),
            role=role,
            eos_token_id=list(stop_token_ids),
            pad_token_id=pad_token_id,
            **(options if draws is None else _drawn_with(draws[rows].to(base.device), options, ids.shape[1])),
        )
        responses.append(sequences[:, ids.shape[1] :])
    return assemble(prompts, _padded(responses, pad_token_id), stop_token_ids)


def _drawn_with(draws: Tensor, options: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
    """Options of ``generate`` that sample with the given numbers where ``options`` would with the global ones."""
    greedy = {name: value for name, value in options.items() if name != "temperature"}
    drawing = InverseTransform(draws, options["temperature"], prompt_length)
    return {**greedy, "do_sample": False, "logits_processor": LogitsProcessorList([drawing])}


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


def _padded(pieces: list[Tensor], pad_token_id: int) -> Tensor:
    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1]), value=pad_token_id) for p in pieces])


@torch.no_grad()
def score_tokens(base: SharedBase, rollout: Rollout, config: PPOConfig) -> TokenScores:
    """Log-probabilities under policy and reference, entropies and values, through the pass that training uses.

    The log-probabilities do not come from generation: then the ratio would not start at 1, nor the KL at 0.
    """
    size = config.local_rollout_forward_batch_size
    pieces = []
    for ids, mask in zip(rollout.sequences.split(size), rollout.attention_mask.split(size), strict=True):
        inputs = (ids, mask, rollout.response_length)
        logprobs, entropy = base.logprobs_and_entropy(Role.POLICY, *inputs, config.temperature)
        ref_logprobs = base.logprobs(Role.REFERENCE, *inputs, config.temperature)
        pieces.append((logprobs, ref_logprobs, base.values(*inputs), entropy))
    return TokenScores(*(torch.cat(column) for column in zip(*pieces, strict=True)))


def final_scores(scores: Tensor, rollout: Rollout, config: PPOConfig) -> Tensor:
    """The scores after what is done about responses without a stop token, [B] float32."""
    if config.missing_eos_penalty is not None:
        return subtract_missing_eos(scores, rollout.stopped, config.missing_eos_penalty)
    if config.missing_eos_score is not None:
        return replace_missing_eos(scores, rollout.stopped, config.missing_eos_score)
    return scores


def build_experience(
    rollout: Rollout,
    tokens: TokenScores,
    scores: Tensor,
    kl_coef: float,
    config: PPOConfig,
    reduce: Reduce | None = None,
) -> Experience:
    """Rewards, advantages and returns of a scored rollout.

    Args:
        rollout: the sampled rows.
        tokens: what the base says of each token.
        scores: [B] float32, after :func:`final_scores`.
        kl_coef: weight of the KL penalty.
        config: everything else.
        reduce: sums a tensor over all processes, for whitening; None for one process.

    Raises:
        FloatingPointError: something is not finite; the message names it and the row.
    """
    mask = rollout.response_mask
    rewards = token_rewards(scores, tokens.logprobs, tokens.ref_logprobs, mask, kl_coef, config.kl_estimator)
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False, reduce=reduce)
    advantages, returns = generalized_advantage_estimation(rewards, tokens.values, mask, config.gamma, config.lam)
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, mask, reduce=reduce)
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
    )
    _check_finite(experience)
    return experience


def _check_finite(experience: Experience) -> None:
    for name in ("logprobs", "ref_logprobs", "values", "scores", "rewards", "advantages", "returns"):
        finite = getattr(experience, name).isfinite().reshape(len(experience), -1).all(dim=1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise FloatingPointError(
                f"{name} of row {row} of the rollout batch are not finite. The weights have diverged (lower "
                "learning_rate or value_learning_rate) or the dtype overflows (use bfloat16 or float32)."
            )


def rollout_metrics(
    experience: Experience, tokens: TokenScores, rollout: Rollout, kl_coef: float, config: PPOConfig
) -> dict[str, Tensor]:
    """What happened in a rollout batch, under TRL's names; scalars, means over rows unless said otherwise.

    ``objective/kl``, ``objective/entropy`` and rewards are sums over a response's tokens, in nats.
    """
    mask = rollout.response_mask
    kl = torch.where(mask, tokens.logprobs - tokens.ref_logprobs, 0.0)
    penalty = torch.where(mask, -kl_coef * kl_penalty(tokens.logprobs, tokens.ref_logprobs, config.kl_estimator), 0.0)
    lengths = mask.sum(dim=1).float()
    non_score_reward = penalty.sum(dim=1).mean()
    return {
        "objective/kl": kl.sum(dim=1).mean(),
        "objective/entropy": -tokens.logprobs.sum(dim=1).mean(),
        "objective/non_score_reward": non_score_reward,
        "objective/rlhf_reward": non_score_reward + experience.scores.mean(),
        "objective/scores": experience.scores.mean(),
        "objective/scores_std": experience.scores.std(correction=0),
        "policy/entropy_avg": masked_mean(tokens.entropy, mask),
        "val/num_eos_tokens": rollout.stopped.float().sum(),
        "val/values_mean": masked_mean(tokens.values, mask),
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1.0 - rollout.stopped.float().mean(),
    }


def source_metrics(by_source: dict[str, Tensor], prefix: str = "rewards") -> dict[str, Any]:
    """Mean and spread of each reward source over the rows that it scored; NaN if it scored none."""
    metrics: dict[str, Any] = {}
    for name, values in by_source.items():
        mean = values.nanmean()
        metrics[f"{prefix}/{name}/mean"] = mean
        metrics[f"{prefix}/{name}/std"] = (values - mean).square().nanmean().sqrt()
    return metrics
