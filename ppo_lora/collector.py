"""Experience from prompts: what the trainer, in training and in evaluation, does with the policy of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .config import PPOConfig
from .demonstrations import Demonstrations
from .draws import uniform_draws
from .masking import Reduce
from .normalization import score_normalizer
from .responses import Responses, read_responses
from .rewards import clip_scores
from .rollout import (
    TokenScores,
    build_experience,
    final_scores,
    rescaling_metrics,
    rollout_metrics,
    sample,
    score_tokens,
    source_metrics,
)
from .scorers import Scorer
from .shared_base import SharedBase
from .splitting import RowLimit
from .types import Experience, Prompts, Rollout


@dataclass(frozen=True)
class ScoredRollout:
    """What scorers and people see of a rollout, what training needs of it, what is logged, each source's scores."""

    responses: Responses
    experience: Experience
    tokens: TokenScores
    by_source: dict[str, Tensor]
    metrics: dict[str, Any]
    raw_scores: Tensor
    logged: dict[str, Any]
    extras: dict[str, list[Any]]


class Collector:
    """Samples and scores.

    Args:
        base: the roles.
        scorer: the reward sources.
        tokenizer: decodes responses; its pad token fills finished rows.
        stop_token_ids: ids that end a response.
        config: sampling, penalties, advantages.

    Attributes:
        normalizer: of the scores.
        limits: how many rows fit in sampling and in scoring.
    """

    def __init__(
        self,
        base: SharedBase,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        config: PPOConfig,
    ):
        self._base, self._scorer, self._tokenizer = base, scorer, tokenizer
        self._stop_token_ids, self._config = list(stop_token_ids), config
        self.normalizer = score_normalizer(config.score_normalization)
        self.limits = [RowLimit("sampling"), scorer.limit]

    def sample(self, prompts: Prompts, *stream: int) -> Rollout:
        """One response to each prompt, drawn from the random numbers that ``stream`` names, to train with."""
        config = self._config
        draws = uniform_draws(len(prompts), config.max_completion_length, config.seed, *stream, config.process_index)
        return self.sample_drawn(prompts, draws, keep_logprobs=config.importance_sampling_cap is not None)

    def sample_drawn(self, prompts: Prompts, draws: Tensor, keep_logprobs: bool = False) -> Rollout:
        """One response to each prompt, drawn with the given numbers; see :func:`~ppo_lora.rollout.sample`."""
        stops, pad = self._stop_token_ids, self._tokenizer.pad_token_id
        limit = self.limits[0]
        return sample(self._base, prompts, self._config, stops, pad, draws, keep_logprobs=keep_logprobs, limit=limit)

    def score(
        self,
        prompts: Prompts,
        rollout: Rollout,
        kl_coef: float,
        reduce: Reduce | None = None,
        trainer_state: Any = None,
        learns: bool = False,
    ) -> ScoredRollout:
        """Score a rollout and estimate its advantages.

        Args:
            prompts: what was answered.
            rollout: the answers.
            kl_coef: weight of the KL penalty.
            reduce: sums a tensor over all processes, for whitening; None for one process.
            trainer_state: for the reward functions.
            learns: whether the running moments of the scores learn from these.
        """
        config = self._config
        responses = read_responses(prompts, rollout, self._tokenizer)
        judgement = self._scorer.judge(responses, trainer_state=trainer_state)
        if learns:
            self.normalizer.observe(judgement.finals, reduce)
        tokens = score_tokens(self._base, rollout, config, self.limits[1])
        scores = final_scores(self._rescaled(judgement.finals), rollout, config)
        experience = build_experience(rollout, tokens, scores, kl_coef, config, reduce, judgement.steps)
        metrics = rollout_metrics(experience, tokens, rollout, kl_coef, config)
        raw_scores = final_scores(judgement.finals, rollout, config)
        if judgement.steps is not None:
            raw_scores = raw_scores + judgement.steps.sum(dim=1)
        metrics |= rescaling_metrics(raw_scores, experience, config)
        metrics |= source_metrics(judgement.by_source)
        metrics["completions/distinct_ratio"] = torch.tensor(distinct_ratio(responses.completion_ids))
        metrics = {**judgement.metrics, **metrics}  # what functions log does not replace what was measured
        by_source, logged = judgement.by_source, judgement.metrics
        return ScoredRollout(responses, experience, tokens, by_source, metrics, raw_scores, logged, judgement.extras)

    def _rescaled(self, scores: Tensor) -> Tensor:
        """Normalised, then clipped; [B] float32."""
        config, scores = self._config, self.normalizer(scores)
        return scores if config.score_clip is None else clip_scores(scores, config.score_clip)

    def measure_demonstrations(self, demonstrations: Demonstrations, reduce: Reduce, trainer_state: Any) -> float:
        """The mean score of a data set of demonstrations, over all processes.

        Args:
            demonstrations: prompts and their good completions.
            reduce: sums a tensor over all processes.
            trainer_state: for the reward functions.
        """
        config = self._config
        totals = torch.zeros(2, dtype=torch.float64)
        rows = range(config.process_index, len(demonstrations), config.world_size)
        for first in range(0, len(rows), config.local_rollout_forward_batch_size):
            batch = rows[first : first + config.local_rollout_forward_batch_size]
            responses = demonstrations.responses(batch, self._stop_token_ids, self._base.device)
            scores = self._scorer.judge(responses, trainer_state=trainer_state).finals.double().cpu()
            totals += torch.stack([scores.nansum(), (~scores.isnan()).sum()])
        total, count = reduce(totals).tolist()
        return total / max(count, 1)


def distinct_ratio(completions: Sequence[Sequence[int]]) -> float:
    """The share of responses, lists of token ids, that no earlier one equals: 1 where all differ."""
    return len(set(map(tuple, completions))) / len(completions)
