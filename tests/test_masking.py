"""Statistics over real tokens, and the masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from batches import RUBBISH, assert_close, lawful, ragged, ragged_batches, spoiled
from ppo_lora import masked_mean, masked_var, masked_whiten
from ppo_lora.masking import first_stop_mask, last_true_index, position_ids

STATISTICS = (masked_mean, masked_var, masked_whiten)
VALUES = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_mean_by_hand():
    assert_close(masked_mean(VALUES, MASK), 3.0)


def test_var_by_hand_divides_by_n_minus_one():
    assert_close(masked_var(VALUES, MASK), ((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2)


def test_whiten_by_hand():
    root = 7**0.5
    assert_close(masked_whiten(VALUES, MASK), [[-2 / root, -1 / root, 0], [3 / root, 0, 0]])


def test_whiten_without_shift_puts_the_mean_back():
    root = 7**0.5
    expected = [[3 - 2 / root, 3 - 1 / root, 0], [3 + 3 / root, 0, 0]]
    assert_close(masked_whiten(VALUES, MASK, shift_mean=False), expected)


@given(ragged_batches(shortest=0))
@lawful
def test_statistics_equal_the_oracles(batch):
    values, mask = batch.normal(scale=3.0), batch.mask
    for function in STATISTICS:
        expected = getattr(oracles, function.__name__)(values.tolist(), mask.tolist())
        assert_close(function(values, mask), expected, 1e-4)
    expected = oracles.masked_whiten(values.tolist(), mask.tolist(), shift_mean=False)
    assert_close(masked_whiten(values, mask, shift_mean=False), expected, 1e-4)


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("function", STATISTICS)
def test_padding_never_matters(function, rubbish):
    batch = ragged(seed=1)
    values = batch.normal()
    assert torch.equal(function(spoiled(values, batch.mask, rubbish), batch.mask), function(values, batch.mask))


def test_nothing_real_gives_zero():
    nothing = torch.zeros_like(MASK)
    assert masked_mean(VALUES, nothing) == 0
    assert masked_var(VALUES, nothing) == 0
    assert torch.equal(masked_whiten(VALUES, nothing), torch.zeros_like(VALUES))


def test_one_real_value_has_no_variance():
    single = torch.tensor([[False, True, False], [False, False, False]])
    assert masked_var(VALUES, single) == 0
    assert_close(masked_whiten(VALUES, single), [[0, 0, 0], [0, 0, 0]])


def test_equal_values_whiten_to_zero():
    assert torch.equal(masked_whiten(torch.full((2, 3), 4.0), MASK), torch.zeros(2, 3))


@given(ragged_batches(shortest=1), st.floats(-50, 50), st.floats(0.1, 20))
@lawful
def test_whiten_forgets_shift_and_scale(batch, shift, scale):
    values = batch.normal()
    whitened = masked_whiten(values, batch.mask)
    if masked_var(values, batch.mask) > 0.01:
        assert_close(masked_whiten(values * scale + shift, batch.mask), whitened, 1e-2)
        assert_close(masked_mean(whitened, batch.mask), 0.0, 1e-4)
        assert_close(masked_var(whitened, batch.mask), 1.0, 1e-3)


@pytest.mark.parametrize("epsilon", [1.0, 100.0])
def test_epsilon_is_added_to_the_variance(epsilon):
    expected = oracles.masked_whiten(VALUES.tolist(), MASK.tolist(), epsilon=epsilon)
    assert_close(masked_whiten(VALUES, MASK, epsilon=epsilon), expected)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_takes_the_moments_of_all_processes(shift_mean):
    mine, others = ragged(seed=2), ragged(seed=3)
    values, other_values = mine.normal(), others.normal() + 5.0
    everything = torch.cat([values, other_values]).tolist(), torch.cat([mine.mask, others.mask]).tolist()
    real = other_values[others.mask]
    sums = torch.stack([real.sum(), others.mask.sum()])
    sent = iter([sums, (real - oracles.masked_mean(*everything)).square().sum()])
    whitened = masked_whiten(values, mine.mask, shift_mean, reduce=lambda total: total + next(sent))
    assert_close(whitened, oracles.masked_whiten(*everything, shift_mean)[: len(values)])


def test_statistics_leave_their_input_alone():
    values, mask = VALUES.clone(), MASK.clone()
    for function in STATISTICS:
        function(values, mask)
    assert torch.equal(values, VALUES) and torch.equal(mask, MASK)


PAD, STOP, OTHER_STOP = 0, 1, 2


@pytest.mark.parametrize(
    ("response", "real", "stopped"),
    [
        pytest.param([5, 6, STOP, PAD, PAD], 3, True, id="stop token included"),
        pytest.param([5, 6, 7, 8, 9], 5, False, id="no stop"),
        pytest.param([STOP, PAD, PAD, PAD, PAD], 1, True, id="stop at the first position"),
        pytest.param([5, 6, 7, 8, STOP], 5, True, id="stop at the last position"),
        pytest.param([5, PAD, 6, STOP, PAD], 4, True, id="pad id sampled before the stop"),
        pytest.param([PAD, PAD, PAD, PAD, PAD], 5, False, id="pad id only"),
        pytest.param([5, OTHER_STOP, 6, STOP, PAD], 2, True, id="the earlier of two stops"),
        pytest.param([5, STOP, STOP, STOP, STOP], 2, True, id="padded with the stop id"),
        pytest.param([5, STOP, 6, 7, 8], 2, True, id="tokens after the stop"),
    ],
)
def test_a_response_ends_with_its_first_stop_token(response, real, stopped):
    mask, found = first_stop_mask(torch.tensor([response]), [STOP, OTHER_STOP])
    assert mask.tolist() == [[True] * real + [False] * (5 - real)]
    assert mask.dtype == found.dtype == torch.bool
    assert found.tolist() == [stopped]


tokens = st.integers(0, 6)


@given(st.lists(st.lists(tokens, min_size=6, max_size=6), min_size=1, max_size=4), st.sets(tokens))
@lawful
def test_stop_mask_equals_a_loop(responses, stops):
    mask, stopped = first_stop_mask(torch.tensor(responses), sorted(stops))
    for i, response in enumerate(responses):
        ends = [t for t, token in enumerate(response) if token in stops]
        length = ends[0] + 1 if ends else 6
        assert mask[i].tolist() == [t < length for t in range(6)]
        assert stopped[i].item() == bool(ends)


def test_last_true_index_by_hand():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert last_true_index(mask).tolist() == [1, 3, 0, 0, 3]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_left_padding_does_not_move_a_token(dtype):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).to(dtype)
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]


def test_real_tokens_count_up_with_padding_on_both_sides():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]).bool()
    assert position_ids(mask)[mask].tolist() == [0, 1, 2, 0, 1]
