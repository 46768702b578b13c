"""Running moments, and scores normalised with them or shifted by the mean of demonstrations."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from batches import assert_close, lawful
from ppo_lora.normalization import (
    SCORE_NORMALIZATIONS,
    DatasetNormalizer,
    Moments,
    RunningNormalizer,
    ScoreNormalizer,
    merge,
    moments,
    score_normalizer,
)

scores = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6)


def _normalized(normalizer, batches) -> list[torch.Tensor]:
    results = []
    for batch in batches:
        normalizer.observe(torch.tensor(batch))
        results.append(normalizer(torch.tensor(batch)))
    return results


def test_moments_by_hand():
    found = moments(torch.tensor([1.0, 2.0, 6.0]))
    assert found == Moments(3, 3.0, 14.0)
    assert found.std == pytest.approx(7**0.5)


def test_merging_by_hand():
    assert merge(Moments(2, 1.0, 2.0), Moments(1, 4.0, 0.0)) == Moments(3, 2.0, 8.0)  # 0, 2 and 4
    assert merge(Moments(), Moments(2, 1.0, 2.0)) == Moments(2, 1.0, 2.0)
    assert merge(Moments(), Moments()) == Moments()


@given(st.lists(scores, min_size=1, max_size=5))
@lawful
def test_merged_moments_are_those_of_all_numbers(batches):
    found = Moments()
    for batch in batches:
        found = merge(found, moments(torch.tensor(batch)))
    everything = [x for batch in batches for x in batch]
    assert found.count == len(everything)
    assert found.mean == pytest.approx(statistics.fmean(everything), rel=1e-9, abs=1e-9)
    assert found.squares == pytest.approx(statistics.pvariance(everything) * len(everything), rel=1e-6, abs=1e-6)


@given(st.lists(st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=1, max_size=6), min_size=1, max_size=5))
@lawful
def test_running_equals_the_oracle(batches):
    expected = oracles.running_normalized(batches)
    for got, wanted in zip(_normalized(RunningNormalizer(), batches), expected, strict=True):
        assert_close(got, wanted, 1e-4)


def test_the_first_batch_is_in_its_own_moments():
    (got,) = _normalized(RunningNormalizer(), [[1.0, 2.0, 3.0]])
    assert_close(got, [-1.0, 0.0, 1.0])


def test_the_second_batch_is_seen_with_the_first():
    _, got = _normalized(RunningNormalizer(), [[0.0, 2.0], [4.0]])
    assert_close(got, [1.0])  # mean 2, standard deviation 2


@pytest.mark.parametrize("batch", [[5.0], [0.1] * 7, [0.0] * 3, [-1e6] * 5])
def test_without_a_spread_only_the_mean_is_taken_off(batch):
    normalizer = RunningNormalizer()
    for _ in range(3):
        (got,) = _normalized(normalizer, [batch])
        assert_close(got, [0.0] * len(batch), 1e-3)
        assert got.isfinite().all()


def test_rounding_is_no_spread():
    a, b = torch.tensor(0.1), torch.tensor(0.1).nextafter(torch.tensor(1.0))
    (got,) = _normalized(RunningNormalizer(), [[a.item(), b.item()] * 4])
    assert got.abs().max() < 1e-6


def test_before_any_score_nothing_is_done():
    assert RunningNormalizer()(torch.tensor([3.0, -4.0])).tolist() == [3.0, -4.0]


def test_applying_changes_no_moments():
    normalizer = RunningNormalizer()
    normalizer.observe(torch.tensor([1.0, 2.0]))
    before = normalizer.state_dict()
    normalizer(torch.tensor([100.0, 200.0]))
    assert normalizer.state_dict() == before


def test_the_moments_are_those_of_all_processes():
    """Two processes, each told the sums of both, have the moments of all four scores."""
    halves = [torch.tensor([1.0, 5.0]), torch.tensor([2.0, 12.0])]
    first = [torch.tensor([2.0, part.sum()]).double() for part in halves]
    squares = [(part.double() - 5.0).square().sum() for part in halves]
    for part in halves:
        sums = iter([first[0] + first[1], squares[0] + squares[1]])
        assert moments(part, lambda total, sums=sums: next(sums)) == moments(torch.cat(halves))


@given(st.lists(scores, min_size=1, max_size=4), scores)
@lawful
def test_state_survives_json_to_the_last_bit(batches, later):
    normalizer, again = RunningNormalizer(), RunningNormalizer()
    _normalized(normalizer, batches)
    again.load_state_dict(json.loads(json.dumps(normalizer.state_dict())))
    (one,), (other,) = _normalized(normalizer, [later]), _normalized(again, [later])
    assert torch.equal(one, other)
    assert normalizer.state_dict() == again.state_dict()


def test_dataset_shifts_and_does_not_scale():
    normalizer = DatasetNormalizer()
    normalizer.load_state_dict({"kind": "dataset", "mean": 2.5})
    normalizer.observe(torch.tensor([100.0]))
    assert normalizer(torch.tensor([2.5, 4.5, 0.0])).tolist() == [0.0, 2.0, -2.5]
    assert normalizer.description() == {"kind": "dataset", "mean": 2.5}


def test_dataset_needs_its_mean():
    with pytest.raises(RuntimeError, match="was not measured yet"):
        DatasetNormalizer()(torch.tensor([1.0]))


def test_none_does_nothing():
    normalizer, given_scores = ScoreNormalizer(), torch.tensor([1.0, 7.0])
    normalizer.observe(given_scores)
    normalizer.load_state_dict(normalizer.state_dict())
    assert torch.equal(normalizer(given_scores), given_scores)
    assert normalizer.description() == {"kind": "none"}


@pytest.mark.parametrize(("made", "other"), [("running", "dataset"), ("dataset", "running")])
def test_the_state_of_another_kind_is_refused(made, other):
    with pytest.raises(ValueError, match=f"made with score_normalization='{other}', this run has '{made}'"):
        score_normalizer(made).load_state_dict(score_normalizer(other).state_dict())


def test_by_name():
    assert [score_normalizer(kind).kind for kind in SCORE_NORMALIZATIONS] == list(SCORE_NORMALIZATIONS)
    with pytest.raises(ValueError, match="score_normalization is 'batch'; expected one of"):
        score_normalizer("batch")
