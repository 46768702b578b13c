"""What an evaluation says about samples: diversity, win rates, best-of-n, and how certain a number is.

N prompts, K samples of each. All of it takes tensors and numbers and returns tensors or floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Statistic = Callable[[Tensor], Tensor]
"""From resampled rows [R, N, ...] to one number for each of the R resamples, [R]."""

_ENTRIES_AT_ONCE = 2**22
"""How many resampled entries are in memory at a time."""


def distinct_n(token_lists: Sequence[Sequence[Hashable]], n: int) -> float:
    """Share of different n-grams among all n-grams of a set of texts.

    Source: Li et al. 2016 (arXiv 1510.03055, distinct-1 and distinct-2), who divide by the number of tokens; divided
    by the number of n-grams, as here, texts without any repetition have 1.

    Args:
        token_lists: each text's tokens; n-grams do not cross from one text to the next.
        n: length of an n-gram, at least 1.

    Returns:
        In [0, 1]; 0 where no text has n tokens. More and longer texts have a lower share: compare like with like.

    Raises:
        ValueError: ``n`` is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1.")
    grams = [tuple(tokens[i : i + n]) for tokens in token_lists for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def row_mean(rows: Tensor) -> Tensor:
    """Mean of each resample, [R, N, ...] to [R]."""
    return rows.flatten(1).mean(1)


def bootstrap_interval(
    values: Tensor, statistic: Statistic = row_mean, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic over prompts.

    Whole rows are drawn with replacement, so that samples of one prompt stay together. Source: Efron 1979, "Bootstrap
    methods: another look at the jackknife"; Efron and Tibshirani 1993, chapter 13.

    Args:
        values: [N] or [N, ...] float32, a row for each prompt.
        statistic: from resampled rows [R, N, ...] float64 to [R]; the mean by default.
        level: share of the resamples inside the interval, in (0, 1).
        resamples: how many are drawn.
        seed: of the draws; the same seed, the same interval.

    Returns:
        ``(low, high)``, in the statistic's unit.

    Raises:
        ValueError: there is no row, or ``level`` or ``resamples`` is out of range.
    """
    if values.ndim == 0 or not values.numel():
        raise ValueError(f"values has shape {list(values.shape)}; expected a row for each prompt, and one at least.")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a share between 0 and 1, such as 0.95.")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; expected at least 1.")
    values = values.detach().cpu().double()
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, _ENTRIES_AT_ONCE // values.numel())
    sizes = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
    drawn = (torch.randint(len(values), (size, len(values)), generator=generator) for size in sizes)
    found = torch.cat([statistic(values[rows]) for rows in drawn])
    bounds = found.new_tensor([(1 - level) / 2, (1 + level) / 2])
    low, high = torch.quantile(found, bounds).tolist()
    return low, high


def win_rate(scores_a: Tensor, scores_b: Tensor) -> Tensor:
    """How often a's samples beat b's, prompt by prompt; over all prompts it is the mean.

    Every sample of a is paired with every sample of b; a tie is half a win. This is the Mann-Whitney U statistic
    divided by the number of pairs (Mann and Whitney 1947).

    Args:
        scores_a: [N, K] float, of the samples of the first policy.
        scores_b: [N, K'] float, of the second, for the same prompts.

    Returns:
        [N] float32, in [0, 1]; 0.5 where neither is better. Its interval: :func:`bootstrap_interval`.

    Raises:
        ValueError: shapes do not fit, or a score is NaN.
    """
    _check_scores(scores_a, "scores_a")
    _check_scores(scores_b, "scores_b")
    if len(scores_a) != len(scores_b):
        raise ValueError(
            f"scores_a has {len(scores_a)} prompts and scores_b {len(scores_b)}; expected the same prompts in both."
        )
    a, b = scores_a[:, :, None], scores_b[:, None, :]
    return ((a > b).float() + 0.5 * (a == b).float()).mean(dim=(1, 2))


def best_of_n(scores: Tensor, n: int) -> float:
    """Expected score of the best of n samples, estimated without bias from K samples of each prompt.

    The mean, over all sets of n of the K samples, of the largest score in the set: of the K sorted scores, the i-th
    is the largest of C(i - 1, n - 1) of the C(K, n) sets. For scores of 0 and 1 it is the estimator of pass@n (Chen
    et al. 2021, arXiv 2107.03374, section 2.1); for any score, Nakano et al. 2021 (arXiv 2112.09332).

    Args:
        scores: [N, K] float.
        n: from 1, the mean score, to K, the mean of each prompt's best.

    Returns:
        The mean over prompts, in the score's unit.

    Raises:
        ValueError: ``n`` is not in 1..K, scores have no row or column, or a score is NaN.
    """
    _check_scores(scores, "scores")
    samples = scores.shape[1]
    if not 1 <= n <= samples:
        raise ValueError(
            f"n is {n} with {samples} samples of each prompt; expected 1 to {samples}. Draw more samples, or lower n."
        )
    # Quotients of Python's whole numbers: exact to the last bit where binomials are too large for a float.
    sets = math.comb(samples, n)
    weights = torch.tensor([math.comb(i, n - 1) / sets for i in range(n - 1, samples)], dtype=torch.float64)
    # Samples that are never the best of n are left out, so that -inf among them does not become NaN.
    best = scores.detach().cpu().double().sort(dim=1).values[:, n - 1 :]
    return (best * weights).sum(1).mean().item()


def best_of_n_kl(n: int) -> float:
    """KL divergence of best-of-n sampling from the policy that is sampled: log n - (n - 1) / n.

    Exact for scores without ties (a continuous distribution), else an upper bound. Source: Stiennon et al. 2020 (arXiv
    2009.01325, appendix G.3); that it is a bound: Beirami et al. 2024 (arXiv 2401.01879).

    Args:
        n: how many samples the best is taken of, at least 1.

    Returns:
        Nats a response.

    Raises:
        ValueError: ``n`` is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1.")
    return math.log(n) - (n - 1) / n


def _check_scores(scores: Tensor, name: str) -> None:
    if scores.ndim != 2 or not scores.numel():
        raise ValueError(f"{name} has shape {list(scores.shape)}; expected [N, K], K samples of each of N prompts.")
    if scores.isnan().any():
        raise ValueError(f"{name} has NaN, which is neither better nor worse; leave those prompts out.")
