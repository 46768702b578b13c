"""Diversity, win rates, best-of-n, and bootstrap intervals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from batches import lawful
from ppo_lora import best_of_n, best_of_n_kl, bootstrap_interval, distinct_n, statistics, win_rate

tokens = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=5)
small = st.integers(-3, 3).map(float)  # few values, so that there are ties
up_to_4, up_to_6 = st.integers(1, 4), st.integers(1, 6)


@st.composite
def score_rows(draw, prompts=up_to_4, samples=up_to_6):
    """[N, K] of small whole numbers."""
    rows, columns = draw(prompts), draw(samples)
    return torch.tensor(
        draw(st.lists(st.lists(small, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    )


# Diversity


def test_distinct_n_by_hand():
    texts = [[1, 2, 1, 2], [1, 2]]
    assert distinct_n(texts, 1) == 2 / 6
    assert distinct_n(texts, 2) == 2 / 4  # (1, 2) three times, (2, 1) once; none across the texts
    assert distinct_n(texts, 4) == 1.0
    assert distinct_n(texts, 5) == distinct_n([], 1) == 0.0
    assert distinct_n(["a b a".split()], 1) == 2 / 3


@given(tokens, st.integers(1, 4))
@lawful
def test_distinct_n_is_the_count(texts, n):
    assert distinct_n(texts, n) == oracles.distinct_n(texts, n)


@given(tokens, st.integers(1, 3))
@lawful
def test_the_same_texts_twice_are_half_as_distinct(texts, n):
    assert distinct_n([*texts, *texts], n) == distinct_n(texts, n) / 2
    assert distinct_n(texts[::-1], n) == distinct_n(texts, n)


# Intervals


def test_bootstrap_interval_by_hand():
    # Means of two draws from {0, 1}: 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap_interval(torch.tensor([0.0, 1.0])) == (0.0, 1.0)
    assert bootstrap_interval(torch.tensor([0.0, 1.0]), level=0.4) == (0.5, 0.5)
    # Three draws from {0, 0, 3}: 0, 1, 2, 3 with probability 8/27, 12/27, 6/27, 1/27; cumulated .30, .74, .96, 1.
    values = torch.tensor([0.0, 0.0, 3.0])
    assert bootstrap_interval(values, level=0.2) == (1.0, 1.0)
    assert bootstrap_interval(values, level=0.8) == (0.0, 2.0)
    assert bootstrap_interval(values, level=0.96) == (0.0, 3.0)


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    draws = torch.randn(400, 60, generator=torch.Generator().manual_seed(0))
    for level in (0.5, 0.95):
        intervals = [bootstrap_interval(values, level=level, resamples=300, seed=i) for i, values in enumerate(draws)]
        covered = sum(low <= 0.0 <= high for low, high in intervals) / len(draws)
        assert abs(covered - level) < 0.06


def test_rows_are_drawn_whole():
    pairs = torch.randn(20, 1, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.0, 1.0])
    difference = bootstrap_interval(pairs, lambda rows: (rows[..., 1] - rows[..., 0]).mean(1))
    assert difference == pytest.approx((1.0, 1.0), abs=1e-6)
    low, high = bootstrap_interval(pairs)
    assert high - low > 0.3


def test_a_statistic_of_ones_own():
    values = torch.tensor([0.0, 0.0, 0.0, 9.0])
    assert bootstrap_interval(values, lambda rows: rows.amax(1), level=0.5) == (0.0, 9.0)
    assert bootstrap_interval(values, lambda rows: rows.median(1).values, level=0.5) == (0.0, 0.0)


@given(st.lists(small, min_size=1, max_size=8), st.floats(-4, 4), st.floats(-4, 4), st.integers(0, 5))
@lawful
def test_intervals_move_with_the_values(values, scale, shift, seed):
    rows = torch.tensor(values, dtype=torch.float64)
    low, high = bootstrap_interval(rows, resamples=50, seed=seed)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    expected = sorted((scale * low + shift, scale * high + shift))
    assert bootstrap_interval(scale * rows + shift, resamples=50, seed=seed) == pytest.approx(expected, abs=1e-9)


@given(st.floats(-100, 100, width=32), st.integers(1, 20))
@lawful
def test_what_never_varies_has_no_interval(value, rows):
    assert bootstrap_interval(torch.full((rows,), value), resamples=20) == (value, value)


def test_the_seed_fixes_the_interval_and_no_other_random_number():
    values = torch.randn(30, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    first = bootstrap_interval(values, resamples=100, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert (
        bootstrap_interval(values, resamples=100, seed=3) == first != bootstrap_interval(values, resamples=100, seed=4)
    )


def test_many_rows_are_drawn_in_parts(monkeypatch):
    seen = []
    monkeypatch.setattr(statistics, "_ENTRIES_AT_ONCE", 7)

    def mean(rows):
        seen.append(len(rows))
        return rows.mean(1)

    assert bootstrap_interval(torch.tensor([0.0, 1.0]), mean, level=0.4, resamples=1000) == (0.5, 0.5)
    assert set(seen) == {3, 1} and sum(seen) == 1000


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (torch.zeros(0), {}, "row for each prompt"),
        (torch.tensor(1.0), {}, "row for each prompt"),
        (torch.zeros(2), {"level": 95}, "such as 0.95"),
        (torch.zeros(2), {"level": 0.0}, "such as 0.95"),
        (torch.zeros(2), {"resamples": 0}, "at least 1"),
    ],
)
def test_intervals_that_mean_nothing_are_refused(values, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values, **options)


# Win rates


def test_win_rate_by_hand():
    a = torch.tensor([[1.0, 2.0], [0.0, 0.0], [5.0, 5.0]])
    b = torch.tensor([[1.0, 3.0], [0.0, 0.0], [-1.0, 4.0]])
    # Row 0: 1-1 is a tie, 2-1 a win, 1-3 and 2-3 are losses.
    assert win_rate(a, b).tolist() == [1.5 / 4, 0.5, 1.0]
    assert win_rate(a, b).dtype == torch.float32


@given(score_rows(), st.data())
@lawful
def test_win_rate_counts_pairs(a, data):
    b = data.draw(score_rows(prompts=st.just(len(a))))
    given_rates = win_rate(a, b).tolist()
    assert given_rates == pytest.approx([oracles.win_rate(*rows) for rows in zip(a.tolist(), b.tolist(), strict=True)])


@given(score_rows(), st.data())
@lawful
def test_win_rate_laws(a, data):
    b = data.draw(score_rows(prompts=st.just(len(a))))
    torch.testing.assert_close(win_rate(a, b) + win_rate(b, a), torch.ones(len(a)))
    torch.testing.assert_close(win_rate(a, a), torch.full((len(a),), 0.5))
    assert torch.equal(win_rate(a.exp(), b.exp()), win_rate(a, b))
    assert (win_rate(a + 10, b) == 1).all()


# Best of n


def test_best_of_n_by_hand():
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 6.0]])
    # Pairs of row 0: {3, 1}, {3, 2}, {1, 2} with maxima 3, 3, 2; of row 1: 6, 6, 0.
    assert best_of_n(scores, 1) == pytest.approx((2.0 + 2.0) / 2)
    assert best_of_n(scores, 2) == pytest.approx((8 / 3 + 4.0) / 2)
    assert best_of_n(scores, 3) == pytest.approx((3.0 + 6.0) / 2)


@given(score_rows(), st.data())
@lawful
def test_best_of_n_is_the_mean_over_all_subsets(scores, data):
    n = data.draw(st.integers(1, scores.shape[1]))
    expected = [oracles.best_of_n(row, n) for row in scores.tolist()]
    assert best_of_n(scores, n) == pytest.approx(sum(expected) / len(expected), abs=1e-9)


@given(score_rows(samples=st.integers(2, 6)))
@lawful
def test_best_of_n_grows_from_the_mean_to_the_mean_maximum(scores):
    found = [best_of_n(scores, n) for n in range(1, scores.shape[1] + 1)]
    assert found[0] == pytest.approx(scores.mean().item(), abs=1e-6)
    assert found[-1] == pytest.approx(scores.amax(1).mean().item(), abs=1e-6)
    assert all(later >= earlier - 1e-9 for earlier, later in zip(found, found[1:], strict=False))


@pytest.mark.parametrize(("samples", "right", "k"), [(5, 2, 3), (10, 1, 4), (6, 6, 2), (7, 0, 3), (200, 3, 100)])
def test_best_of_n_of_right_and_wrong_is_pass_at_k(samples, right, k):
    scores = torch.zeros(1, samples)
    scores[0, :right] = 1.0
    expected = 1 - math.comb(samples - right, k) / math.comb(samples, k)
    assert best_of_n(scores, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("samples", "n"), [(4, 2), (100, 7), (3000, 1), (3000, 1500), (3000, 2999)])
def test_best_of_n_of_1_to_k(samples, n):
    """The expected largest of n numbers from 1..K is n (K + 1) / (n + 1), where binomials overflow too."""
    scores = torch.arange(1.0, samples + 1)[torch.randperm(samples, generator=torch.Generator().manual_seed(0))]
    assert best_of_n(scores[None], n) == pytest.approx(n * (samples + 1) / (n + 1), rel=1e-12)


def test_best_of_n_is_unbiased():
    """Samples of a coin with P(1) = 0.3: the best of 3 is 1 with probability 1 - 0.7^3."""
    coins = (torch.rand(20000, 8, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    assert best_of_n(coins, 3) == pytest.approx(1 - 0.7**3, abs=0.01)


def test_a_sample_that_is_never_the_best_may_be_minus_infinity():
    scores = torch.tensor([[-math.inf, 1.0, 2.0]])
    assert best_of_n(scores, 2) == pytest.approx(5 / 3)
    assert best_of_n(scores, 1) == -math.inf


@pytest.mark.parametrize("n", [0, -1, 4])
def test_best_of_more_than_there_are_is_refused(n):
    with pytest.raises(ValueError, match="3 samples of each prompt"):
        best_of_n(torch.zeros(2, 3), n)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1), (0, 3), (2, 0)])
def test_scores_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="K samples of each of N prompts"):
        best_of_n(torch.zeros(shape), 1)
    with pytest.raises(ValueError, match="scores_b has shape"):
        win_rate(torch.zeros(2, 3), torch.zeros(shape))


def test_scores_that_cannot_be_compared_are_refused():
    broken = torch.tensor([[1.0, math.nan]])
    for refused in (lambda: best_of_n(broken, 1), lambda: win_rate(broken, broken)):
        with pytest.raises(ValueError, match="NaN"):
            refused()
    with pytest.raises(ValueError, match="same prompts"):
        win_rate(torch.zeros(2, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="at least 1"):
        distinct_n([[1]], 0)


def test_best_of_n_kl_by_hand():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(0.6931471805599453 - 0.5)
    assert best_of_n_kl(16) == pytest.approx(2.772588722239781 - 15 / 16)
    with pytest.raises(ValueError, match="at least 1"):
        best_of_n_kl(0)


@pytest.mark.parametrize("n", [2, 5, 64])
def test_best_of_n_kl_is_the_integral(n):
    """Of scores uniform on [0, 1] the best has the density f = n u^(n - 1); KL is the integral of f log f."""
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    density = n * u ** (n - 1)
    assert torch.xlogy(density, density).mean().item() == pytest.approx(best_of_n_kl(n), abs=1e-4)


@given(st.integers(1, 12), st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
@lawful
def test_best_of_n_kl_bounds_that_of_a_few_responses(n, weights):
    """Responses with probabilities p, F cumulated in the order of scores: the best is i with F_i^n - F_(i-1)^n."""
    p = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    below = torch.cat([p.new_zeros(1), p.cumsum(0)])
    best = below[1:] ** n - below[:-1] ** n
    exact = (torch.xlogy(best, best) - torch.xlogy(best, p)).sum().item()
    assert exact <= best_of_n_kl(n) + 1e-9
