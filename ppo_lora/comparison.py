"""From the samples of several policies to the numbers that compare them. Nothing here samples or loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .evaluation import Evaluation, PolicySamples
from .statistics import best_of_n, best_of_n_kl, bootstrap_interval, distinct_n, win_rate

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        mean: of the prompts' own means.
        low, high: 95% bootstrap interval of the mean, over prompts.
        prompts: how many it is taken over.
    """

    mean: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True)
class Distribution:
    """How a number is spread over responses.

    Attributes:
        estimate: the mean, with its interval.
        std: standard deviation over responses (divided by their number).
        quantiles: over responses, by share.
        responses: how many have that number.
    """

    estimate: Estimate
    std: float
    quantiles: dict[float, float]
    responses: int


@dataclass(frozen=True)
class PolicySummary:
    """One policy's numbers.

    Attributes:
        scores: by scorer, in its units; None where it scored none of the policy's responses.
        kl: to the reference, nats a response, on the policy's own samples.
        length: tokens, the stop token included.
        stopped: share of responses that ended with a stop token.
        distinct_1, distinct_2: share of different n-grams of tokens among all of the policy's responses.
        best_of: by scorer and n, the expected score of the best of n samples; without what has no scores.
    """

    scores: dict[str, Distribution | None]
    kl: Distribution
    length: Distribution
    stopped: float
    distinct_1: float
    distinct_2: float
    best_of: dict[str, dict[int, float]]


@dataclass(frozen=True)
class WinRate:
    """How often a scorer prefers one policy's response to another's, a tie being half a win.

    Attributes:
        policy, against: the two.
        scorer: whose scores are compared.
        rate: over the prompts where it scored every response of both; None where there is none.
    """

    policy: str
    against: str
    scorer: str
    rate: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """The numbers of an evaluation.

    Attributes:
        prompts: N.
        samples: K, responses a prompt.
        reference: the policy that the KL is measured from.
        policies: by name.
        win_rates: of each policy against each one before it, by each scorer.
        best_of_kl: by n, an upper bound of the KL of best-of-n to the policy whose samples it chooses from, in nats.
    """

    prompts: int
    samples: int
    reference: str
    policies: dict[str, PolicySummary]
    win_rates: list[WinRate]
    best_of_kl: dict[int, float]

    def entry(self) -> dict[str, Any]:
        """All of it as JSON takes it."""
        return asdict(self)


def compare_policies(evaluation: Evaluation, best_of: Sequence[int], seed: int = 0) -> Comparison:
    """Summarize every policy and every pair.

    Args:
        evaluation: the samples, at least one policy's.
        best_of: each n of best-of-n, at most K.
        seed: of the bootstrap.
    """
    samples = evaluation.policies
    prompts, count = next(iter(samples.values())).kl.shape
    return Comparison(
        prompts=prompts,
        samples=count,
        reference=evaluation.reference,
        policies={name: _summary(each, best_of, seed) for name, each in samples.items()},
        win_rates=[
            WinRate(later, earlier, scorer, _win_rate(scores, samples[earlier].scores[scorer], seed))
            for earlier, later in combinations(samples, 2)
            for scorer, scores in samples[later].scores.items()
        ],
        best_of_kl={n: best_of_n_kl(n) for n in best_of},
    )


def _summary(samples: PolicySamples, best_of: Sequence[int], seed: int) -> PolicySummary:
    kl, length = _distribution(samples.kl, seed), _distribution(samples.lengths, seed)
    assert kl is not None and length is not None  # no response is without them
    ids = [each for row in samples.completion_ids for each in row]
    whole = {scorer: scores[_whole(scores)] for scorer, scores in samples.scores.items()}
    return PolicySummary(
        scores={scorer: _distribution(scores, seed) for scorer, scores in samples.scores.items()},
        kl=kl,
        length=length,
        stopped=samples.stopped.double().mean().item(),
        distinct_1=distinct_n(ids, 1),
        distinct_2=distinct_n(ids, 2),
        best_of={name: {n: best_of_n(rows, n) for n in best_of} for name, rows in whole.items() if len(rows)},
    )


def _distribution(values: Tensor, seed: int) -> Distribution | None:
    """Of [N, K] numbers with NaN where there is none; None where all are NaN."""
    values = values.double()
    known = values[~values.isnan()]
    if not len(known):
        return None
    quantiles = known.quantile(known.new_tensor(QUANTILES)).tolist()
    means = values.nanmean(dim=1)
    return Distribution(
        estimate=_estimate(means[~means.isnan()], seed),
        std=known.std(correction=0).item(),
        quantiles=dict(zip(QUANTILES, quantiles, strict=True)),
        responses=len(known),
    )


def _estimate(by_prompt: Tensor, seed: int) -> Estimate:
    low, high = bootstrap_interval(by_prompt, seed=seed)
    return Estimate(by_prompt.mean().item(), low, high, len(by_prompt))


def _win_rate(first: Tensor, second: Tensor, seed: int) -> Estimate | None:
    """Of [N, K] scores with [N, K] scores.

    The k-th samples of two policies were drawn with the same random numbers, so they are not independent: they are not
    compared with each other, unless there are no others.
    """
    whole = _whole(first) & _whole(second)
    if not bool(whole.any()):
        return None
    first, second, count = first[whole], second[whole], first.shape[1]
    rates = win_rate(first, second).double()
    if count > 1:
        paired = [win_rate(first[:, k : k + 1], second[:, k : k + 1]) for k in range(count)]
        rates = (count * rates - torch.stack(paired).mean(dim=0)) / (count - 1)
    return _estimate(rates, seed)


def _whole(scores: Tensor) -> Tensor:
    """[N] bool, True for prompts of which every sample has a score."""
    return ~scores.isnan().any(dim=1)
