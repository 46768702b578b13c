"""Clipped policy and value losses: numbers, gradients, and what is watched beside them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from batches import RUBBISH, assert_close, lawful, ragged, ragged_batches, spoiled
from ppo_lora import clipped_policy_loss, clipped_value_loss, entropy_bonus
from ppo_lora.losses import aggregation_weights, explained_variance, kl_loss, policy_statistics

LOSSES = (clipped_policy_loss, clipped_value_loss)
MASK = torch.tensor([[True, True, True], [True, False, False]])

epsilons = st.sampled_from([0.05, 0.2, 0.5])


def _gradient(loss_function, trained, *rest):
    """Loss, clip fraction and the gradient with respect to the first argument."""
    leaf = trained.clone().requires_grad_()
    loss, fraction = loss_function(leaf, *rest)
    loss.backward()
    return loss.detach(), fraction, leaf.grad


def _lists(*tensors):
    return (tensor.tolist() for tensor in tensors)


def test_policy_loss_by_hand():
    ratios = torch.tensor([[1.5, 0.5, 1.1], [2.0, 9.0, 9.0]])
    advantages = torch.tensor([[1.0, -2.0, 3.0], [-1.0, 9.0, 9.0]])
    loss, fraction = clipped_policy_loss(ratios.log(), torch.zeros(2, 3), advantages, MASK, 0.2)
    # 1.5 is cut to 1.2 and 0.5 to 0.8; 1.1 is inside; 2.0 stays, for its advantage is negative.
    assert_close(loss, -(1.2 * 1.0 + 0.8 * -2.0 + 1.1 * 3.0 + 2.0 * -1.0) / 4)
    assert_close(fraction, 0.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.3, 2.0, 0.0),
        (0.7, 2.0, -1.4),
        (1.3, -2.0, 2.6),
        (0.7, -2.0, 0.0),
        (1.1, 2.0, -2.2),
        (0.9, -2.0, 1.8),
        (1.0, 2.0, -2.0),
    ],
)
def test_policy_slope_by_hand(ratio, advantage, slope):
    one = torch.ones(1, 1, dtype=torch.bool)
    _, fraction, gradient = _gradient(
        clipped_policy_loss, torch.tensor([[ratio]]).log(), torch.zeros(1, 1), torch.tensor([[advantage]]), one, 0.2
    )
    assert_close(gradient, [[slope]])
    assert fraction.item() == (slope == 0.0)


def test_value_loss_by_hand():
    values = torch.tensor([[1.0, 2.0, 0.1], [-1.0, 9.0, 9.0]])
    returns = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 9.0, 9.0]])
    # Clipped to 0 +- 0.5: 0.5, 0.5, 0.1 and -0.5; the larger squared errors are 0.25, 4, 0.81 and 0.25.
    loss, fraction = clipped_value_loss(values, torch.zeros(2, 3), returns, MASK, 0.5)
    assert_close(loss, 0.5 * (0.25 + 4 + 0.81 + 0.25) / 4)
    assert_close(fraction, 0.5)


@pytest.mark.parametrize(
    ("value", "target", "slope"),
    [
        (1.0, 2.0, 0.0),
        (1.0, 0.5, 0.5),
        (-1.0, -2.0, 0.0),
        (-1.0, 1.0, -2.0),
        (0.1, 2.0, -1.9),
        (0.1, -2.0, 2.1),
    ],
)
def test_value_slope_by_hand(value, target, slope):
    one = torch.ones(1, 1, dtype=torch.bool)
    _, fraction, gradient = _gradient(
        clipped_value_loss, torch.tensor([[value]]), torch.zeros(1, 1), torch.tensor([[target]]), one, 0.2
    )
    assert_close(gradient, [[slope]])
    assert fraction.item() == (slope == 0.0)


@given(ragged_batches(), epsilons)
@lawful
def test_policy_loss_equals_the_oracle(batch, cliprange):
    inputs = batch.normal(0.4), batch.normal(0.4), batch.normal(), batch.mask
    loss, fraction = clipped_policy_loss(*inputs, cliprange)
    expected_loss, expected_fraction = oracles.policy_loss(*_lists(*inputs), cliprange)
    assert_close(loss, expected_loss)
    assert_close(fraction, expected_fraction)


@given(ragged_batches(), epsilons)
@lawful
def test_value_loss_equals_the_oracle(batch, cliprange_value):
    inputs = batch.normal(), batch.normal(), batch.normal(), batch.mask
    loss, fraction = clipped_value_loss(*inputs, cliprange_value)
    expected_loss, expected_fraction = oracles.value_loss(*_lists(*inputs), cliprange_value)
    assert_close(loss, expected_loss)
    assert_close(fraction, expected_fraction)


@given(ragged_batches(), epsilons)
@lawful
def test_policy_gradient_is_zero_exactly_where_the_clip_says_so(batch, eps):
    logprobs, old_logprobs, advantages, mask = batch.normal(0.4), batch.normal(0.4), batch.normal(), batch.mask
    _, fraction, gradient = _gradient(clipped_policy_loss, logprobs, old_logprobs, advantages, mask, eps)
    ratio = (logprobs - old_logprobs).exp()
    clipped = ((advantages > 0) & (ratio > 1 + eps)) | ((advantages < 0) & (ratio < 1 - eps))
    assert torch.equal(gradient == 0, clipped | ~mask)
    assert_close(gradient, torch.where(clipped | ~mask, 0.0, -advantages * ratio) / mask.sum())
    assert_close(fraction, (clipped & mask).sum() / mask.sum())


@given(ragged_batches(), epsilons)
@lawful
def test_value_gradient_is_zero_exactly_where_the_clip_says_so(batch, eps):
    values, old_values, returns, mask = batch.normal(), batch.normal(), batch.normal(), batch.mask
    _, fraction, gradient = _gradient(clipped_value_loss, values, old_values, returns, mask, eps)
    edge = old_values + eps * (values - old_values).sign()
    outside = (values - old_values).abs() > eps
    clipped = outside & ((edge - returns).abs() > (values - returns).abs())
    assert torch.equal(gradient == 0, clipped | ~mask)
    assert_close(gradient, torch.where(clipped | ~mask, 0.0, values - returns) / mask.sum())
    assert_close(fraction, (clipped & mask).sum() / mask.sum())


@given(ragged_batches(), epsilons)
@lawful
def test_the_first_step_is_plain_policy_gradient(batch, eps):
    logprobs, advantages, mask = batch.normal(), batch.normal(), batch.mask
    loss, fraction, gradient = _gradient(clipped_policy_loss, logprobs, logprobs, advantages, mask, eps)
    assert_close(loss, -oracles.masked_mean(advantages.tolist(), mask.tolist()))
    assert fraction == 0
    assert_close(gradient, torch.where(mask, -advantages, 0.0) / mask.sum())


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("spoil", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("loss_function", LOSSES)
def test_padding_never_matters(loss_function, spoil, rubbish):
    batch = ragged(seed=5)
    inputs = [batch.normal(0.4), batch.normal(0.4), batch.normal()]
    dirty_inputs = [spoiled(x, batch.mask, rubbish) if i in spoil else x for i, x in enumerate(inputs)]
    clean = _gradient(loss_function, *inputs, batch.mask, 0.2)
    dirty = _gradient(loss_function, *dirty_inputs, batch.mask, 0.2)
    for expected, actual in zip(clean, dirty, strict=True):
        assert torch.equal(expected, actual)
    assert not dirty[2][~batch.mask].any()
    assert dirty[2][batch.mask].any()


@pytest.mark.parametrize("loss_function", LOSSES)
def test_losses_are_token_means_so_pieces_weigh_their_tokens(loss_function):
    batch = ragged(seed=6, rows=6)
    inputs = batch.normal(0.4), batch.normal(0.4), batch.normal(), batch.mask
    whole = torch.stack(loss_function(*inputs, 0.2))
    pieces = [[x[rows] for x in inputs] for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    weighted = sum(torch.stack(loss_function(*piece, 0.2)) * piece[3].sum() for piece in pieces)
    assert_close(weighted / batch.mask.sum(), whole)


@pytest.mark.parametrize("loss_function", LOSSES)
def test_only_the_trained_tensor_is_in_the_graph(loss_function):
    batch = ragged(seed=7)
    loss, fraction, gradient = _gradient(
        loss_function, batch.normal(), batch.normal(), batch.normal(), batch.mask, 0.2
    )
    assert loss.shape == fraction.shape == ()
    assert not fraction.requires_grad
    assert gradient.isfinite().all()


def test_entropy_bonus_by_hand():
    entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
    assert_close(entropy_bonus(entropy, MASK, 0.1), -0.25)


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_entropy_bonus_ignores_padding(rubbish):
    batch = ragged(seed=8)
    entropy = spoiled(batch.normal().abs(), batch.mask, rubbish).requires_grad_()
    entropy_bonus(entropy, batch.mask, 0.5).backward()
    assert_close(entropy.grad, torch.where(batch.mask, -0.5, 0.0) / batch.mask.sum())


def test_policy_statistics_by_hand():
    logprobs = torch.tensor([[0.0, math.log(2.0), math.log(0.5)], [0.0, 9.0, 9.0]])
    statistics = policy_statistics(logprobs, torch.zeros(2, 3), MASK)
    assert_close(statistics["approxkl"], 0.25 * math.log(2.0) ** 2)
    assert_close(statistics["ratio"], (1 + 2 + 0.5 + 1) / 4)
    assert_close(statistics["ratio_var"], (2 * 0.125**2 + 0.875**2 + 0.625**2) / 3)


@given(ragged_batches())
@lawful
def test_policy_statistics_equal_the_oracles(batch):
    logprobs, old_logprobs, mask = batch.normal(0.4), batch.normal(0.4), batch.mask.tolist()
    statistics = policy_statistics(logprobs.requires_grad_(), old_logprobs, batch.mask)
    log_ratios = (logprobs - old_logprobs).tolist()
    ratios = [[math.exp(x) for x in row] for row in log_ratios]
    squares = [[x**2 / 2 for x in row] for row in log_ratios]
    assert_close(statistics["approxkl"], oracles.masked_mean(squares, mask))
    assert_close(statistics["ratio"], oracles.masked_mean(ratios, mask))
    assert_close(statistics["ratio_var"], oracles.masked_var(ratios, mask))
    assert not any(number.requires_grad for number in statistics.values())


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_policy_statistics_ignore_padding(rubbish):
    batch = ragged(seed=9)
    logprobs, old_logprobs = batch.normal(0.4), batch.normal(0.4)
    clean = policy_statistics(logprobs, old_logprobs, batch.mask)
    dirty = policy_statistics(spoiled(logprobs, batch.mask, rubbish), old_logprobs, batch.mask)
    assert clean == dirty


# Two clip ranges, dual clip


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.25, 1.0, -1.25, -1.25),  # over the lower range, under the higher
        (1.35, 1.0, -1.3, 0.0),
        (0.75, -1.0, 0.8, 0.0),
        (2.9, -1.0, 2.9, 2.9),
        (3.1, -1.0, 3.0, 0.0),  # dual clip
        (3.1, 1.0, -1.3, 0.0),  # which leaves good advantages alone
    ],
)
def test_clips_by_hand(ratio, advantage, loss, slope):
    one = torch.ones(1, 1, dtype=torch.bool)
    leaf = torch.tensor([[ratio]]).log().requires_grad_()
    found, fraction = clipped_policy_loss(
        leaf, torch.zeros(1, 1), torch.tensor([[advantage]]), one, 0.2, cliprange_high=0.3, dual_clip=3.0
    )
    found.backward()
    assert_close(found.detach(), loss)
    assert_close(leaf.grad.squeeze(), slope)
    assert_close(fraction, float(slope == 0.0))


@given(ragged_batches(), epsilons)
@lawful
def test_the_same_clip_range_twice_is_the_plain_loss(batch, eps):
    arguments = (*(batch.normal() for _ in range(3)), batch.mask, eps)
    plain = clipped_policy_loss(*arguments)
    assert all(map(torch.equal, clipped_policy_loss(*arguments, cliprange_high=eps, dual_clip=1e6), plain))


# Aggregation

COUNTS = (torch.tensor(4), torch.tensor(2))


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ("token_mean", [[1 / 4, 1 / 4, 1 / 4], [1 / 4, 0, 0]]),
        ("sequence_mean", [[1 / 6, 1 / 6, 1 / 6], [1 / 2, 0, 0]]),
        ("sequence_sum_constant", [[1 / 20, 1 / 20, 1 / 20], [1 / 20, 0, 0]]),
    ],
)
def test_weights_by_hand(how, rows):
    assert_close(aggregation_weights(MASK, how, *COUNTS, 10), torch.tensor(rows))


def test_token_mean_is_the_default_of_the_losses():
    batch = ragged(3)
    weights = aggregation_weights(batch.mask, "token_mean", batch.mask.sum(), torch.tensor(5), 7)
    columns = [batch.normal() for _ in range(3)]
    for loss_function in LOSSES:
        arguments = (*columns, batch.mask, 0.2)
        assert_close(loss_function(*arguments, weights=weights)[0], loss_function(*arguments)[0])
    assert_close(
        entropy_bonus(columns[0], batch.mask, 0.1, weights=weights), entropy_bonus(columns[0], batch.mask, 0.1)
    )


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="loss_aggregation is 'mean'; expected one of"):
        aggregation_weights(MASK, "mean", *COUNTS, 10)


# KL in the loss


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("moved", [False, True])
def test_the_kl_loss_has_the_gradient_of_the_kl(estimator, moved):
    """Every token of a vocabulary of five is sampled once, and weighed as often as the old policy samples it."""
    torch.manual_seed(0)
    logits, old, ref = torch.randn(3, 5, dtype=torch.float64)
    logits = logits if moved else old.clone()
    old, ref = old.log_softmax(0), ref.log_softmax(0)
    leaf, again = (logits.clone().requires_grad_() for _ in range(2))
    mask = torch.ones(5, 1, dtype=torch.bool)
    columns = (leaf.log_softmax(0)[:, None], old[:, None], ref[:, None])
    kl_loss(*columns, mask, estimator, weights=old.exp()[:, None]).backward()
    policy = again.log_softmax(0)
    (policy.exp() * (policy - ref)).sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad)
    assert leaf.grad.norm() > 0.1


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_kl_loss_ignores_padding(rubbish):
    batch = ragged(1)
    columns = [batch.normal() for _ in range(3)]
    clean, dirty = (
        kl_loss(*(spoiled(each, batch.mask, value) for each in columns), batch.mask, "k3") for value in (0.0, rubbish)
    )
    assert torch.equal(clean, dirty) and clean.isfinite()


# Explained variance


def test_explained_variance_by_hand():
    returns = torch.tensor([[1.0, 2.0, 3.0], [6.0, 99.0, 99.0]])
    values = torch.tensor([[2.0, 2.0, 3.0], [5.0, 0.0, 0.0]])
    # returns: mean 3, squares 4 + 1 + 0 + 9; errors -1, 0, 0, 1: mean 0, squares 2.
    assert_close(explained_variance(values, returns, MASK), 1 - 2 / 14)
    assert_close(explained_variance(returns, returns, MASK), 1.0)
    assert_close(explained_variance(torch.full((2, 3), 7.0), returns, MASK), 0.0)
    assert explained_variance(values, torch.ones(2, 3), MASK).isnan()
