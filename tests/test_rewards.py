"""KL estimates and per-token rewards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from batches import RUBBISH, assert_close, lawful, ragged, ragged_batches, spoiled
from ppo_lora import kl_penalty, token_rewards
from ppo_lora.rewards import KL_ESTIMATORS, kl_rewards, replace_missing_eos, subtract_missing_eos

ESTIMATORS = ("k1", "k2", "k3")
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.0]])
REF_LOGPROBS = torch.tensor([[-1.5, -1.0, -0.5], [-0.75, -3.0, -2.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
SCORES = torch.tensor([2.0, -1.0])


def test_the_estimators_are_these_three():
    assert sorted(KL_ESTIMATORS) == list(ESTIMATORS)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2.0, 0.0]),
    ],
)
def test_kl_by_hand(estimator, expected):
    assert_close(kl_penalty(LOGPROBS, REF_LOGPROBS, estimator)[0], expected)


def test_k1_is_the_default():
    assert torch.equal(kl_penalty(LOGPROBS, REF_LOGPROBS), LOGPROBS - REF_LOGPROBS)


nats = st.floats(-10, 10, width=32)


@given(nats, nats)
@lawful
def test_kl_laws(new, ref):
    policy, reference = torch.tensor([[new]]), torch.tensor([[ref]])
    estimates = {name: kl_penalty(policy, reference, name) for name in ESTIMATORS}
    swapped = {name: kl_penalty(reference, policy, name) for name in ESTIMATORS}
    assert torch.equal(swapped["k1"], -estimates["k1"])
    assert torch.equal(swapped["k2"], estimates["k2"])
    assert estimates["k2"] >= 0 and estimates["k3"] >= 0
    for name in ESTIMATORS:
        assert_close(estimates[name], [[oracles.kl_penalty(new, ref, name)]], 1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_of_a_policy_to_itself_is_exactly_zero(estimator):
    assert torch.equal(kl_penalty(LOGPROBS, LOGPROBS, estimator), torch.zeros(2, 3))


def test_k3_keeps_its_digits_for_close_policies():
    assert_close(kl_penalty(torch.tensor([[1e-4]]), torch.zeros(1, 1), "k3") * 1e8, [[0.5]], 2e-2)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k3", True), ("k2", False)])
def test_k1_and_k3_have_the_kl_as_their_mean(estimator, unbiased):
    policy, reference = [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]
    kl = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    estimates = kl_penalty(torch.tensor([policy]).log(), torch.tensor([reference]).log(), estimator)
    mean = (torch.tensor([policy]) * estimates).sum().item()
    assert (mean == pytest.approx(kl, abs=1e-5)) is unbiased


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match=r"kl_estimator is 'k4'; expected one of \['k1', 'k2', 'k3'\]"):
        kl_penalty(LOGPROBS, REF_LOGPROBS, "k4")


def test_rewards_by_hand():
    rewards = token_rewards(SCORES, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.1)
    assert_close(rewards, [[-0.05, 0.1, 2.0], [-1.05, 0.0, 0.0]])


@given(ragged_batches(), st.sampled_from(ESTIMATORS), st.floats(0, 2))
@lawful
def test_rewards_equal_the_oracle(batch, estimator, kl_coef):
    scores, logprobs, ref_logprobs = batch.rows(), batch.normal(), batch.normal()
    rewards = token_rewards(scores, logprobs, ref_logprobs, batch.mask, kl_coef, estimator)
    rows = zip(scores.tolist(), logprobs.tolist(), ref_logprobs.tolist(), batch.mask.tolist(), strict=True)
    assert_close(rewards, [oracles.token_rewards(*row, kl_coef, estimator) for row in rows], 1e-4)


@given(ragged_batches(), st.floats(0, 2))
@lawful
def test_a_row_sums_to_its_score_less_the_penalty(batch, kl_coef):
    scores, logprobs, ref_logprobs = batch.rows(), batch.normal(), batch.normal()
    rewards = token_rewards(scores, logprobs, ref_logprobs, batch.mask, kl_coef)
    kl = ((logprobs - ref_logprobs) * batch.mask).sum(dim=1)
    assert_close(rewards.sum(dim=1), scores - kl_coef * kl, 1e-4)


def test_without_a_penalty_only_the_last_token_is_rewarded():
    rewards = token_rewards(SCORES, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.0)
    assert_close(rewards, [[0, 0, 2], [-1, 0, 0]], 0)


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_padding_never_matters(estimator, rubbish):
    batch = ragged(seed=2)
    scores, logprobs, ref_logprobs = batch.rows(), batch.normal(), batch.normal()
    clean = token_rewards(scores, logprobs, ref_logprobs, batch.mask, 0.3, estimator)
    for spoil_new, spoil_ref in ((True, False), (False, True), (True, True)):
        new = spoiled(logprobs, batch.mask, rubbish) if spoil_new else logprobs
        ref = spoiled(ref_logprobs, batch.mask, rubbish) if spoil_ref else ref_logprobs
        assert torch.equal(token_rewards(scores, new, ref, batch.mask, 0.3, estimator), clean)
    assert torch.equal(clean[~batch.mask], torch.zeros(int((~batch.mask).sum())))


def test_a_row_without_real_tokens_has_no_reward():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert torch.equal(token_rewards(SCORES, LOGPROBS, REF_LOGPROBS, nothing, 0.1), torch.zeros(2, 3))


def test_missing_eos_takes_the_penalty_off_unfinished_rows():
    stopped = torch.tensor([True, False])
    assert_close(subtract_missing_eos(SCORES, stopped, 0.75), [2.0, -1.75])


def test_missing_eos_score_replaces_that_of_unfinished_rows():
    stopped = torch.tensor([False, True])
    assert_close(replace_missing_eos(SCORES, stopped, -5.0), [-5.0, -1.0])


@given(ragged_batches(), st.sampled_from(["k1", "k2", "k3"]))
@lawful
def test_a_normalised_penalty_sums_to_the_mean(batch, estimator):
    columns = batch.normal(), batch.normal()
    rewards = kl_rewards(*columns, batch.mask, 0.3, estimator, normalize_by_length=True)
    for row, logprobs, ref_logprobs, mask in zip(rewards, *columns, batch.mask.tolist(), strict=True):
        pairs = zip(logprobs.tolist(), ref_logprobs.tolist(), mask, strict=True)
        real = [oracles.kl_penalty(new, ref, estimator) for new, ref, kept in pairs if kept]
        assert_close(row.sum(), -0.3 * sum(real) / len(real), 1e-4)


def test_later_penalties_only_by_hand():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    logprobs, ref_logprobs = torch.tensor([[1.0, 2.0, 4.0], [8.0, 9.0, 9.0]]), torch.zeros(2, 3)
    scores = torch.tensor([10.0, 20.0])
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, 0.5, later_only=True)
    assert_close(rewards, [[-1.0, -2.0, 10.0], [20.0, 0.0, 0.0]])
