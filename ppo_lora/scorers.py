"""Where scores come from: the reward adapter on the base, and reward functions with GRPO's signature."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .responses import Responses
from .reward_calls import RewardFunction, RewardLog, call_functions, check_parameters, function_name, parameters_of
from .reward_values import SourceRewards, checked_rewards
from .roles import Role
from .rows import batches_by_length
from .shared_base import SharedBase
from .splitting import RowLimit
from .types import Rollout


@dataclass(frozen=True)
class Judgement:
    """What all reward sources say of a batch.

    Attributes:
        finals: [B] float32, the weighted sum of the rewards of whole responses; NaN where no source scored a row.
        steps: [B, T] float32, the weighted sum of the rewards of tokens and spans; None where there are none.
        by_source: by source name [B] float32, all that a row got of it, unweighted; NaN where it had nothing to say.
        metrics: what is to be logged: what functions logged, and how many steps they rewarded how.
        extras: columns for the table of completions, B values each.
    """

    finals: Tensor
    steps: Tensor | None
    by_source: dict[str, Tensor]
    metrics: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def scores(self) -> Tensor:
        """[B] float32, everything together; NaN where no source scored a row."""
        return self.finals if self.steps is None else self.finals + self.steps.sum(dim=1)


class Scorer:
    """The weighted sum of all reward sources.

    Args:
        base: its reward role is the first source, if it has one.
        reward_funcs: functions ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or
            async. None means that the function has nothing to say about that row; instead of a number a row may have
            a list of rewards of its tokens, or of spans of its text (see docs/rewards.md).
        weights: one for each source, the reward role first; all 1 if None.
        batch_size: rows per pass of the reward role.

    Raises:
        ValueError: there is no source, the number of weights differs from the number of sources, or all of them are 0.
        TypeError: a reward function cannot be called, or not with completions.
    """

    def __init__(
        self,
        base: SharedBase,
        reward_funcs: Sequence[RewardFunction],
        weights: Sequence[float] | None,
        batch_size: int,
    ):
        self._base = base if Role.REWARD in base.roles else None
        self._functions = list(reward_funcs)
        self._batch_size, self.limit = batch_size, RowLimit("scoring")
        self._scored_any = self._warned = False
        for function in self._functions:
            if not callable(function):
                raise TypeError(
                    f"reward_funcs holds {function!r}; expected functions f(prompts, completions, completion_ids, "
                    "**columns). A SEQ_CLS adapter goes to reward_adapter."
                )
            check_parameters(function)
        reward_role = [] if self._base is None else ["reward_adapter"]
        self.names = _distinct(reward_role + [function_name(function) for function in self._functions])
        if not self.names:
            raise ValueError(
                "There is no reward source. Give reward_adapter (a SEQ_CLS adapter for the base, as `trl reward` "
                "writes) or reward_funcs (functions of prompts and completions), or both."
            )
        self.weights = [1.0] * len(self.names) if weights is None else list(weights)
        if len(self.weights) != len(self.names):
            raise ValueError(
                f"reward_weights has {len(self.weights)} numbers; expected {len(self.names)}, one for each of "
                f"{self.names}."
            )
        if not any(self.weights):
            raise ValueError(
                f"reward_weights is {self.weights} for {self.names}, so nothing is rewarded; expected at least one "
                "that is not 0."
            )

    @property
    def models(self) -> set[str]:
        """Names of the sources that are models, and so say something else for every response."""
        are_models = [True] * (self._base is not None) + [getattr(f, "is_model", False) for f in self._functions]
        return {name for name, is_model in zip(self.names, are_models, strict=True) if is_model}

    @property
    def logs(self) -> bool:
        """Whether a function has a parameter ``log_metric``, and so may log metrics of its own."""
        return any("log_metric" in parameters_of(function) for function in self._functions)

    def __call__(self, responses: Responses, **context: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Score every row; :meth:`judge` without the details.

        Returns:
            ``(scores, by_source)``: [B] float32, and by source name [B] float32 with NaN where it had nothing to say.
        """
        judgement = self.judge(responses, **context)
        return judgement.scores, judgement.by_source

    def judge(self, responses: Responses, **context: Any) -> Judgement:
        """Score every row.

        Args:
            responses: what to score.
            context: more keyword arguments for the functions (``trainer_state``), beside TRL's ``log_metric`` and
                ``log_extra``.

        Raises:
            ValueError, TypeError, RuntimeError: a function broke its contract; the message names it and the row. Or no
                response of the first batch was scored.
        """
        sources = [] if self._base is None else [SourceRewards(self._reward_role(responses.rollout))]
        log = RewardLog(len(responses.prompts))
        context = {**context, "log_metric": log.log_metric, "log_extra": log.log_extra}
        results = call_functions(self._functions, responses, context)
        for name, result in zip(self.names[len(sources) :], results, strict=True):
            sources.append(checked_rewards(name, result, responses))
        unscored = self._unscored(sources, responses)
        device = responses.rollout.sequences.device
        named = dict(zip(self.names, sources, strict=True))
        weighted = list(zip(sources, self.weights, strict=True))
        finals = torch.stack([weight * source.finals.to(device) for source, weight in weighted], dim=1).nansum(dim=1)
        finals = torch.where(unscored.to(device), math.nan, finals)
        steps = [weight * source.steps.to(device) for source, weight in weighted if source.steps is not None]
        return Judgement(
            finals=finals,
            steps=torch.stack(steps).sum(dim=0) if steps else None,
            by_source={name: source.values.to(device) for name, source in named.items()},
            metrics={**_step_metrics(named), **log.metrics},
            extras=log.extras,
        )

    def _unscored(self, sources: list[SourceRewards], responses: Responses) -> Tensor:
        """[B] bool, True where no source has anything to say. The first such row is warned of."""
        silent = torch.stack([source.finals.isnan().cpu() for source in sources]).all(dim=0)
        if bool(silent.all()) and not self._scored_any:
            raise ValueError(
                f"{self.names} returned None for all {len(silent)} completions, and so judge nothing. Return a number "
                "for the rows that they apply to, or leave them out."
            )
        self._scored_any = True
        if bool(silent.any()) and not self._warned:
            self._warned = True
            prompt = textwrap.shorten(repr(responses.prompts[int(silent.nonzero()[0])]), 300)
            warnings.warn(
                f"{self.names} returned None for {int(silent.sum())} of {len(silent)} responses, first to {prompt}. "
                "Nothing is learned from such responses; completions/unscored_ratio counts them.",
                stacklevel=2,
            )
        return silent

    @torch.no_grad()
    def _reward_role(self, rollout: Rollout) -> Tensor:
        base, mask = self._base, rollout.attention_mask.cpu()
        assert base is not None
        scores = torch.zeros(len(mask), dtype=torch.float32, device=rollout.sequences.device)
        for batch in batches_by_length(mask.sum(dim=1), self._batch_size, packed=base.packs_rows):
            for rows, given in self.limit.run(batch, lambda rows: base.scores(rollout.sequences[rows], mask[rows])):
                scores[rows] = given
        if not bool(scores.isfinite().all()):
            row = int((~scores.isfinite()).nonzero()[0])
            raise FloatingPointError(
                f"The reward adapter's score of row {row} is {scores[row].item()}. Its head may hold broken weights, "
                "or the dtype overflows (use bfloat16 or float32)."
            )
        return scores


def _distinct(names: list[str]) -> list[str]:
    """Number the names that occur more than once, so that metrics do not overwrite each other."""
    distinct: list[str] = []
    for name in names:
        numbered = [f"{name}_{i}" for i in range(2 * len(names))]
        candidates = [name] if names.count(name) == 1 else [other for other in numbered if other not in names]
        distinct.append(next(other for other in candidates if other not in distinct))
    return distinct


def _step_metrics(sources: dict[str, SourceRewards]) -> dict[str, Any]:
    """How many tokens or spans a response has of those that reward them, and what one of them gets in the mean."""
    metrics: dict[str, Any] = {}
    for name, source in sources.items():
        if source.steps is not None and source.step_counts is not None:
            count = source.step_counts.nansum()
            metrics[f"rewards/{name}/steps"] = source.step_counts.nanmean()
            metrics[f"rewards/{name}/step_mean"] = source.steps.sum() / count if bool(count) else math.nan
    return metrics
