"""Scores brought to a common scale: by their running moments, or by their mean over demonstrations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .masking import Reduce

SCORE_NORMALIZATIONS = ("none", "running", "dataset")
_ROUNDING = torch.finfo(torch.float32).eps
"""Scores are float32: a spread below this times their mean is rounding."""


@dataclass(frozen=True)
class Moments:
    """How many numbers there were, their mean, and the sum of squared distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Unbiased (divided by n - 1); 0 where there are fewer than two, or where they differ by rounding only."""
        if self.count < 2:
            return 0.0
        std = math.sqrt(self.squares / (self.count - 1))
        return 0.0 if std <= _ROUNDING * abs(self.mean) else std


def moments(scores: Tensor, reduce: Reduce | None = None) -> Moments:
    """The moments of all processes' scores, in float64.

    Args:
        scores: [B] float; NaN is no score.
        reduce: sums a tensor over all processes; None for one process.
    """
    reduce = reduce or (lambda total: total)
    numbers = scores[~scores.isnan()].double()
    count = torch.full_like(numbers.sum(), numbers.numel())
    count, total = reduce(torch.stack([count, numbers.sum()]))
    mean = total / count.clamp(min=1)
    squares = reduce((numbers - mean.to(numbers.device)).square().sum())
    return Moments(int(count.item()), mean.item(), squares.item())


def merge(first: Moments, second: Moments) -> Moments:
    """The moments of both sets of numbers together.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    count = first.count + second.count
    if count == 0:
        return Moments()
    distance = second.mean - first.mean
    return Moments(
        count,
        first.mean + distance * second.count / count,
        first.squares + second.squares + distance**2 * first.count * second.count / count,
    )


class ScoreNormalizer:
    """Leaves scores as they are, and is what the other ways are made from."""

    kind = "none"

    def observe(self, scores: Tensor, reduce: Reduce | None = None) -> None:
        """Learn from a batch of training scores, [B] float, of this process.

        Args:
            scores: the batch.
            reduce: sums a tensor over all processes; None for one process.
        """

    def __call__(self, scores: Tensor) -> Tensor:
        """The scores as rewards see them; [B] float32 to [B] float32."""
        return scores

    def description(self) -> dict[str, Any]:
        """For the manifest: the kind and its numbers."""
        return {"kind": self.kind, **self.state_dict()}

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if state["kind"] != self.kind:
            raise ValueError(
                f"The checkpoint was made with score_normalization={state['kind']!r}, this run has {self.kind!r}; a "
                "run resumes with the options it began with."
            )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class RunningNormalizer(ScoreNormalizer):
    """(score - mean) / std, with the moments of every training score so far, those of the batch included.

    Where the standard deviation is 0 (a single score, or all the same), only the mean is taken off; before any score
    was seen, nothing is done. As TRL <= 0.11's ``use_score_scaling`` with ``use_score_norm``.
    """

    kind = "running"

    def __init__(self) -> None:
        self.moments = Moments()

    def observe(self, scores: Tensor, reduce: Reduce | None = None) -> None:
        """See :meth:`ScoreNormalizer.observe`."""
        self.moments = merge(self.moments, moments(scores, reduce))

    def __call__(self, scores: Tensor) -> Tensor:
        """See the class."""
        centred = scores.double() - self.moments.mean
        return (centred / (self.moments.std or 1.0)).to(scores.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The moments."""
        return {"kind": self.kind, **asdict(self.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it is the state of another normalizer.
        """
        self._check_kind(state)
        self.moments = Moments(state["count"], state["mean"], state["squares"])


class DatasetNormalizer(ScoreNormalizer):
    """score - mean, the mean being that of a data set of demonstrations, so that these are worth 0.

    Source: Huang et al. 2024 (arXiv 2403.17031), on the reward model's normalisation; there is no scaling.

    Attributes:
        mean: of the demonstrations' scores; None until it was measured.
    """

    kind = "dataset"

    def __init__(self) -> None:
        self.mean: float | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """See the class.

        Raises:
            RuntimeError: the mean was not measured yet.
        """
        if self.mean is None:
            raise RuntimeError("The mean score of the demonstrations was not measured yet.")
        return (scores.double() - self.mean).to(scores.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The mean."""
        return {"kind": self.kind, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it is the state of another normalizer.
        """
        self._check_kind(state)
        self.mean = state["mean"]


def score_normalizer(kind: str) -> ScoreNormalizer:
    """The normalizer of this name.

    Raises:
        ValueError: there is none.
    """
    for made in (ScoreNormalizer, RunningNormalizer, DatasetNormalizer):
        if made.kind == kind:
            return made()
    raise ValueError(f"score_normalization is {kind!r}; expected one of {list(SCORE_NORMALIZATIONS)}.")
