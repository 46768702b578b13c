"""Sampling with random numbers of each row's own, against plain Python."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import EOS, PAD, tiny_model, tiny_tokenizer
from ppo_lora import Prompts, SharedBase
from ppo_lora.draws import inverse_transform, uniform_draws
from ppo_lora.evaluation import EvaluationConfig
from ppo_lora.rollout import sample


def token(logits: list[float], number: float, temperature: float) -> int:
    """The first token at which the cumulative distribution exceeds the number."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    return next(i for i, total in enumerate(accumulate(weights)) if total > number * sum(weights))


def drawn(logits: torch.Tensor, number: float, temperature: float = 1.0) -> int:
    """The token of one row."""
    probabilities = torch.softmax(logits[None] / temperature, dim=-1)
    return int(inverse_transform(probabilities, torch.tensor([number], dtype=torch.float64)))


@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6),
    number=st.sampled_from([0.0, 0.1, 0.37, 0.51, 0.93]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_token_is_the_one_by_hand(logits, number, temperature):
    assert drawn(torch.tensor(logits), number, temperature) == token(logits, number, temperature)


@given(st.lists(st.booleans(), min_size=2, max_size=40).filter(any), st.sampled_from([0.0, 1 - 2**-53]))
def test_impossible_tokens_are_never_drawn(possible, number):
    logits = torch.where(torch.tensor(possible), 0.3, -torch.inf)
    assert possible[drawn(logits, number)]


@pytest.mark.parametrize("tokens", [255, 256, 257, 1000, 5120])
def test_a_large_vocabulary_is_searched_in_blocks_without_a_difference(tokens):
    generator = torch.Generator().manual_seed(tokens)
    probabilities = torch.rand(64, tokens, generator=generator) ** 4
    whole = probabilities.double().cumsum(dim=1)
    wanted = torch.randint(0, tokens, (64, 1), generator=generator)
    middle = (whole.gather(1, wanted) - probabilities.double().gather(1, wanted) / 2) / whole[:, -1:]
    likely = (probabilities.gather(1, wanted) > 1e-3).squeeze(1)
    drawn = inverse_transform(probabilities, middle.squeeze(1))
    assert torch.equal(drawn[likely], wanted[likely].squeeze(1)) and int(likely.sum()) > 40


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    count = 20_000
    numbers = uniform_draws(count, 1, 7)
    drawn = inverse_transform((logits / 0.8).softmax(0).repeat(count, 1), numbers[:, 0])
    shares = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(shares, (logits / 0.8).softmax(0), rtol=0, atol=0.015)


def test_streams_are_their_own_and_leave_the_global_numbers_alone():
    before = torch.random.get_rng_state()
    first, again, other = (uniform_draws(3, 5, 1, stream) for stream in (2, 2, 3))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.dtype == torch.float64 and first.min() >= 0 and first.max() < 1


def test_a_row_says_the_same_whatever_stands_beside_it():
    base = SharedBase(tiny_model(initializer_range=0.2))
    ids = torch.tensor([[5, 9], [7, 3], [4, 4]])
    prompts = Prompts(ids, torch.ones_like(ids).bool())
    config = EvaluationConfig(max_completion_length=8, temperature=1.0)
    draws = uniform_draws(3, 8, 0)
    together = sample(base, prompts, config, [EOS], PAD, draws=draws).completion_ids()
    for row in range(3):
        one = Prompts(ids[row : row + 1], prompts.attention_mask[row : row + 1])
        assert sample(base, one, config, [EOS], PAD, draws=draws[row : row + 1]).completion_ids() == [together[row]]
    assert len({tuple(row) for row in together}) == 3 and tiny_tokenizer().eos_token_id == EOS


def test_sampling_notes_what_the_training_pass_finds():
    base = SharedBase(tiny_model())
    ids = torch.tensor([[PAD, 5, 6], [7, 8, 9], [PAD, PAD, 4], [5, 5, 5], [6, 7, 8]])
    prompts = Prompts(ids, ids != PAD)
    config = EvaluationConfig(max_completion_length=7, temperature=0.6, local_rollout_forward_batch_size=2)
    draws = uniform_draws(5, 7, 3)
    rollout = sample(base, prompts, config, [EOS], PAD, draws, keep_logprobs=True)
    assert sample(base, prompts, config, [EOS], PAD, draws).sampling_logprobs is None
    found = base.logprobs("policy", rollout.sequences, rollout.attention_mask, rollout.response_length, 0.6)
    mask = rollout.response_mask
    torch.testing.assert_close(rollout.sampling_logprobs[mask], found[mask], rtol=1e-4, atol=1e-5)
