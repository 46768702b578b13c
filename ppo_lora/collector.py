"""Experience from prompts: what the trainer, in training and in evaluation, does with the policy of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .config import PPOConfig
from .masking import Reduce
from .rollout import (
    TokenScores,
    build_experience,
    final_scores,
    rollout_metrics,
    sample,
    score_tokens,
    seeded,
    source_metrics,
)
from .scorers import Responses, Scorer, read_responses
from .shared_base import SharedBase
from .types import Experience, Prompts, Rollout


@dataclass(frozen=True)
class ScoredRollout:
    """What scorers and people see of a rollout, what training needs of it, what is logged, each source's scores."""

    responses: Responses
    experience: Experience
    tokens: TokenScores
    by_source: dict[str, Tensor]
    metrics: dict[str, Tensor]


class Collector:
    """Samples and scores.

    Args:
        base: the roles.
        scorer: the reward sources.
        tokenizer: decodes responses; its pad token fills finished rows.
        stop_token_ids: ids that end a response.
        config: sampling, penalties, advantages.
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

    def sample(self, prompts: Prompts, stream: int, number: int) -> Rollout:
        """One response to each prompt, drawn from the random numbers that ``stream`` and ``number`` name."""
        config = self._config
        with seeded(config.seed, stream, number, config.process_index):
            return self._sample(prompts, keep_logprobs=config.importance_sampling_cap is not None)

    def sample_drawn(self, prompts: Prompts, draws: Tensor) -> Rollout:
        """One response to each prompt, drawn with the given numbers; see :func:`~ppo_lora.rollout.sample`."""
        return self._sample(prompts, draws=draws)

    def _sample(self, prompts: Prompts, **options: Any) -> Rollout:
        pad = self._tokenizer.pad_token_id
        return sample(self._base, prompts, self._config, self._stop_token_ids, pad, **options)

    def score(
        self,
        prompts: Prompts,
        rollout: Rollout,
        kl_coef: float,
        reduce: Reduce | None = None,
        trainer_state: Any = None,
    ) -> ScoredRollout:
        """Score a rollout and estimate its advantages.

        Args:
            prompts: what was answered.
            rollout: the answers.
            kl_coef: weight of the KL penalty.
            reduce: sums a tensor over all processes, for whitening; None for one process.
            trainer_state: for the reward functions.
        """
        config = self._config
        responses = read_responses(prompts, rollout, self._tokenizer)
        raw_scores, by_source = self._scorer(responses, trainer_state=trainer_state)
        tokens = score_tokens(self._base, rollout, config)
        scores = final_scores(raw_scores, rollout, config)
        experience = build_experience(rollout, tokens, scores, kl_coef, config, reduce)
        metrics = rollout_metrics(experience, tokens, rollout, kl_coef, config) | source_metrics(by_source)
        metrics["completions/distinct_ratio"] = torch.tensor(distinct_ratio(responses.completion_ids))
        return ScoredRollout(responses, experience, tokens, by_source, metrics)


def distinct_ratio(completions: Sequence[Sequence[int]]) -> float:
    """The share of responses, lists of token ids, that no earlier one equals: 1 where all differ."""
    return len(set(map(tuple, completions))) / len(completions)
