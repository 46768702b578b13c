"""Generalized advantage estimation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from batches import RUBBISH, assert_close, lawful, ragged, ragged_batches, spoiled
from ppo_lora import generalized_advantage_estimation as gae
from ppo_lora.advantages import truncated_importance_weights

REWARDS = torch.tensor([[1.0, 0.0, 2.0], [3.0, 7.0, 7.0]])
VALUES = torch.tensor([[0.5, 1.0, 1.5], [2.0, 7.0, 7.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])

unit = st.floats(0, 1)


def _oracle(rewards, values, mask, gamma, lam):
    rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    return zip(*(oracles.gae(*row, gamma, lam) for row in rows), strict=True)


def test_gae_by_hand():
    # deltas of row 0: 1 + 0.5 * 1.0 - 0.5 = 1.0;  0 + 0.5 * 1.5 - 1.0 = -0.25;  2 - 1.5 = 0.5;  gamma * lam = 0.4
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.5, lam=0.8)
    assert_close(advantages, [[1.0 + 0.4 * -0.05, -0.25 + 0.4 * 0.5, 0.5], [1.0, 0.0, 0.0]])
    assert_close(returns, [[1.48, 0.95, 2.0], [3.0, 0.0, 0.0]])


@given(ragged_batches(shortest=0), unit, unit)
@lawful
def test_gae_equals_the_explicit_sum(batch, gamma, lam):
    rewards, values = batch.normal(), batch.normal()
    advantages, returns = gae(rewards, values, batch.mask, gamma, lam)
    expected_advantages, expected_returns = _oracle(rewards, values, batch.mask, gamma, lam)
    assert_close(advantages, expected_advantages, 1e-4)
    assert_close(returns, expected_returns, 1e-4)


@given(ragged_batches(), unit)
@lawful
def test_lambda_one_is_the_monte_carlo_return_minus_the_value(batch, gamma):
    rewards, values, mask = batch.normal(), batch.normal(), batch.mask.tolist()
    advantages, returns = gae(rewards, values, batch.mask, gamma, lam=1.0)
    for i, row in enumerate(rewards.tolist()):
        for t in range(sum(mask[i])):
            to_come = oracles.discounted_return(row, mask[i], gamma, t)
            assert returns[i, t].item() == pytest.approx(to_come, abs=1e-4)
            assert advantages[i, t].item() == pytest.approx(to_come - values[i, t].item(), abs=1e-4)


@given(ragged_batches(), unit)
@lawful
def test_lambda_zero_is_the_td_error(batch, gamma):
    rewards, values, lengths = batch.normal(), batch.normal(), batch.mask.sum(dim=1).tolist()
    advantages, _ = gae(rewards, values, batch.mask, gamma, lam=0.0)
    for i, length in enumerate(lengths):
        for t in range(length):
            following = values[i, t + 1].item() if t + 1 < length else 0.0
            td_error = rewards[i, t].item() + gamma * following - values[i, t].item()
            assert advantages[i, t].item() == pytest.approx(td_error, abs=1e-5)


@given(ragged_batches(), unit, unit)
@lawful
def test_values_that_foresee_everything_leave_no_advantage(batch, gamma, lam):
    rewards, mask = batch.normal(), batch.mask.tolist()
    values = [
        [oracles.discounted_return(row, mask[i], gamma, t) for t in range(len(row))]
        for i, row in enumerate(rewards.tolist())
    ]
    advantages, _ = gae(rewards, torch.tensor(values), batch.mask, gamma, lam)
    assert_close(advantages, torch.zeros_like(advantages), 1e-4)


@given(ragged_batches(), unit, unit)
@lawful
def test_gae_is_linear(batch, gamma, lam):
    first, second = (batch.normal(), batch.normal()), (batch.normal(), batch.normal())
    both = gae(first[0] + 2 * second[0], first[1] + 2 * second[1], batch.mask, gamma, lam)
    apart = [gae(*one, batch.mask, gamma, lam) for one in (first, second)]
    for k in range(2):
        assert_close(both[k], apart[0][k] + 2 * apart[1][k], 1e-4)


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_padding_never_matters(rubbish):
    batch = ragged(seed=3)
    rewards, values, mask = batch.normal(), batch.normal(), batch.mask
    clean = gae(rewards, values, mask, 0.9, 0.95)
    dirty = gae(spoiled(rewards, mask, rubbish), spoiled(values, mask, rubbish), mask, 0.9, 0.95)
    for with_zeros, with_rubbish in zip(clean, dirty, strict=True):
        assert torch.equal(with_zeros, with_rubbish)
        assert not with_zeros[~mask].any()


def test_wider_padding_changes_nothing():
    batch = ragged(seed=4)
    rewards, values = batch.normal(), batch.normal()
    wider = [torch.nn.functional.pad(x, (0, 3)) for x in (rewards, values, batch.mask)]
    for narrow, wide in zip(gae(rewards, values, batch.mask, 1.0, 0.9), gae(*wider, 1.0, 0.9), strict=True):
        assert torch.equal(wide, torch.nn.functional.pad(narrow, (0, 3)))


def test_the_input_is_left_alone():
    rewards, values, mask = REWARDS.clone(), VALUES.clone(), MASK.clone()
    gae(rewards, values, mask, 0.9, 0.9)
    assert torch.equal(rewards, REWARDS) and torch.equal(values, VALUES) and torch.equal(mask, MASK)


def test_importance_weights_by_hand():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    logprobs = torch.tensor([[0.5, 3.0, 0.1], [0.4, math.nan, 9.0]]).log()
    sampling = torch.tensor([[0.25, 1.0, 0.2], [0.4, 1.0, math.inf]]).log()
    weights = truncated_importance_weights(logprobs, sampling, mask, cap=2.5)
    assert_close(weights, [[2.0, 2.5, 0.5], [1.0, 1.0, 1.0]])
