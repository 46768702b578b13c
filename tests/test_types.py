"""The records: selecting and splitting rows keeps every real token and its numbers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import lawful
from ppo_lora import Experience, Prompts, Rollout

BY_TOKEN = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")


def _experience(prompt_lengths, response_lengths, prompt_width=None, response_width=None) -> Experience:
    """Every real token has an id of its own; the numbers of a token are its id plus a tenth for each field."""
    rows = len(prompt_lengths)
    prompt_width = prompt_width or max(prompt_lengths)
    response_width = response_width or max(response_lengths)
    prompts = torch.arange(prompt_width) >= prompt_width - torch.tensor(prompt_lengths)[:, None]
    responses = torch.arange(response_width) < torch.tensor(response_lengths)[:, None]
    mask = torch.cat([prompts, responses], dim=1)
    sequences = torch.where(mask, torch.arange(1, mask.numel() + 1).reshape(mask.shape), 0)
    numbers = sequences[:, prompt_width:].float()
    by_token = {name: torch.where(responses, numbers + i / 10, 0.0) for i, name in enumerate(BY_TOKEN)}
    return Experience(
        sequences, mask, responses, scores=torch.arange(rows).float(), kl_weights=torch.arange(rows) / 2, **by_token
    )


def _row(experience: Experience, i: int) -> list:
    """All that one row knows, without its padding."""
    real, response = experience.attention_mask[i], experience.response_mask[i]
    tokens = [getattr(experience, name)[i][response].tolist() for name in BY_TOKEN]
    return [experience.sequences[i][real].tolist(), experience.scores[i].item(), *tokens]


def _assert_consistent(experience: Experience) -> None:
    width = experience.response_length
    assert torch.equal(experience.attention_mask[:, -width:], experience.response_mask)
    assert experience.sequences.shape == experience.attention_mask.shape
    assert {getattr(experience, name).shape for name in BY_TOKEN} == {experience.response_mask.shape}
    assert experience.scores.shape == (len(experience),)


@st.composite
def _experiences(draw) -> Experience:
    lengths = st.integers(1, 5)
    rows = draw(st.integers(1, 6))
    prompts = draw(st.lists(lengths, min_size=rows, max_size=rows))
    responses = draw(st.lists(lengths, min_size=rows, max_size=rows))
    return _experience(prompts, responses, 5, 5)


@given(_experiences(), st.data())
@lawful
def test_select_keeps_rows_whole_and_drops_only_padding(experience, data):
    rows = data.draw(st.lists(st.integers(0, len(experience) - 1), min_size=1, max_size=8))
    selected = experience.select(rows)
    _assert_consistent(selected)
    assert [_row(selected, k) for k in range(len(rows))] == [_row(experience, i) for i in rows]
    prompt_width = selected.sequences.shape[1] - selected.response_length
    prompts, responses = experience.attention_mask[rows][:, :5], experience.response_mask[rows]
    assert prompt_width == prompts.sum(dim=1).max()
    assert selected.response_length == responses.sum(dim=1).max()


@given(_experiences(), st.integers(1, 7))
@lawful
def test_split_is_every_row_once_in_order(experience, size):
    pieces = experience.split(size)
    assert [len(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert 1 <= len(pieces[-1]) <= size
    rows = [_row(piece, k) for piece in pieces for k in range(len(piece))]
    assert rows == [_row(experience, i) for i in range(len(experience))]
    for piece in pieces:
        _assert_consistent(piece)


def test_select_by_hand():
    selected = _experience([2, 1], [1, 3]).select([1])
    assert selected.sequences.tolist() == [[7, 8, 9, 10]]
    assert selected.attention_mask.tolist() == [[True] * 4]
    assert selected.response_mask.tolist() == [[True] * 3]
    assert selected.logprobs.tolist() == [[8.0, 9.0, 10.0]]
    assert selected.scores.tolist() == [1.0]
    assert _experience([2, 1], [1, 3]).select([0]).sequences.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), [2, 0], (2, 0), range(2, -1, -2)], ids=str)
def test_rows_come_as_tensors_and_sequences(rows):
    experience = _experience([1, 2, 3], [3, 2, 1])
    assert experience.select(rows).scores.tolist() == [2.0, 0.0]


def test_scores_survive_when_the_batch_is_as_large_as_the_response_is_long():
    experience = _experience([1, 1, 1], [1, 2, 1], response_width=3)
    selected = experience.select([0, 1, 2])
    assert selected.scores.tolist() == [0.0, 1.0, 2.0]
    assert selected.response_length == 2


def test_prompts_as_wide_as_responses_are_not_mistaken_for_them():
    experience = _experience([2, 3], [1, 2], prompt_width=4, response_width=4)
    selected = experience.select([0, 1])
    assert selected.sequences.shape == (2, 5)
    assert selected.attention_mask.tolist() == [[False, True, True, True, False], [True] * 5]
    assert [_row(selected, i) for i in range(2)] == [_row(experience, i) for i in range(2)]


def test_an_inner_column_of_padding_ids_is_kept():
    experience = _experience([2], [3])
    experience.sequences[0, 1] = experience.sequences[0, 3] = 0
    assert experience.select([0]).sequences.tolist() == experience.sequences.tolist()


def test_select_copies():
    experience = _experience([1, 2], [2, 1])
    before = [getattr(experience, item.name).clone() for item in fields(experience)]
    selected = experience.select([0, 1])
    for item in fields(selected):
        getattr(selected, item.name).zero_()
    assert all(torch.equal(getattr(experience, f.name), b) for f, b in zip(fields(experience), before, strict=True))


def test_prompts_know_their_number():
    assert len(Prompts(torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.bool))) == 3


def test_rollout_splits_off_the_response():
    sequences = torch.tensor([[9, 8, 1, 2, 0], [0, 7, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    rollout = Rollout(sequences, mask, mask[:, 2:], torch.tensor([True, False]))
    assert rollout.response_length == 3
    assert rollout.responses.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert rollout.completion_ids() == [[1, 2], [3, 4, 5]]


def test_records_are_frozen():
    for record, name in ((_experience([1], [1]), "scores"), (Prompts(torch.zeros(1, 1), torch.ones(1, 1)), "columns")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, None)


def test_repeated_prompts_lie_side_by_side():
    ids, mask = torch.tensor([[0, 5], [6, 7]]), torch.tensor([[False, True], [True, True]])
    twice = Prompts(ids, mask, {"prompt": ["a", "b"], "n": [1, 2]}).repeat(2)
    assert twice.input_ids.tolist() == [[0, 5], [0, 5], [6, 7], [6, 7]]
    assert twice.attention_mask.tolist() == [[False, True]] * 2 + [[True, True]] * 2
    assert twice.columns == {"prompt": ["a", "a", "b", "b"], "n": [1, 1, 2, 2]}
