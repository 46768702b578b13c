"""Rows without padding before them, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaModel

from bases import full_base
from batches import lawful
from builders import padded_batch
from ppo_lora.rows import BATCH_COST, batches_by_length, compact_rows
from runs import trainer


def by_hand(ids, mask, response):
    """For each real response token: its row, the tokens up to it, and its place in the response."""
    found = []
    for row, (tokens, real) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        start = len(tokens) - response
        for place in range(start, len(tokens)):
            if real[place]:
                before = [token for token, is_real in zip(tokens[:place], real[:place], strict=True) if is_real]
                found.append((row, before, tokens[place], place - start))
    return found


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 5), st.randoms(use_true_random=False))
@lawful
def test_rows_hold_what_each_response_token_follows(rows, prompt, response, random):
    ids = torch.tensor([[random.randrange(50) for _ in range(prompt + response)] for _ in range(rows)])
    mask = torch.tensor([[random.random() < 0.6 for _ in range(prompt + response)] for _ in range(rows)])
    mask[range(rows), [random.randrange(prompt) for _ in range(rows)]] = True
    read = compact_rows(ids, mask, response)
    assert read.input_ids.shape[1] == mask.sum(dim=1).max() and read.shape == (rows, response)
    width, flat = read.input_ids.shape[1], read.input_ids.flatten().tolist()
    seen = [
        (predictor // width, flat[predictor // width * width : predictor + 1], token, place % max(response, 1))
        for predictor, token, place in zip(
            read.predictors.tolist(), read.tokens.tolist(), read.places.tolist(), strict=True
        )
    ]
    assert seen == by_hand(ids, mask, response)
    assert [place // max(response, 1) for place in read.places.tolist()] == [row for row, *_ in seen]
    for row in range(rows):
        whole = ids[row][mask[row]].tolist()
        assert flat[row * width : row * width + len(whole)] == whole
        assert read.last[row] == row * width + len(whole) - 1


@pytest.mark.parametrize("packed", [False, True])
def test_numbers_go_back_to_their_tokens(packed):
    ids, mask = padded_batch(4, 5, 6)
    read = compact_rows(ids, mask, 6, packed)
    assert (read.input_ids.numel() == mask.sum()) == packed == (read.position_ids is not None)
    hidden = read.input_ids[..., None].float()
    scattered = read.scattered(read.tokens.float())
    assert scattered.dtype == torch.float32
    assert torch.equal(scattered, torch.where(mask[:, 5:], ids[:, 5:], 0).float())
    assert torch.equal(
        read.last_states(hidden)[:, 0].long(), torch.stack([i[m][-1] for i, m in zip(ids, mask, strict=True)])
    )
    assert read.states(hidden).shape == (int(mask[:, 5:].sum()), 1)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_say_what_rows_by_themselves_say(architecture, attention):
    base = full_base(architecture)
    base.model.set_attn_implementation(attention)
    base.decide_packing(True)
    assert base.packs_rows
    ids, mask = padded_batch(4, 5, 6)
    for role in ("policy", "reference"):
        apart, packed = (base(role, compact_rows(ids, mask, 6, packed)) for packed in (False, True))
        torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(base("value", compact_rows(ids, mask, 6, True)), base.values(ids, mask, 6))


def test_packing_changes_no_training(tmp_path):
    plain, packed = (trainer(tmp_path / str(on), pack_sequences=on) for on in (False, True))
    passes = []
    packed.base.backbone.register_forward_pre_hook(
        lambda _, given, options: passes.append(given[0].shape[0]) if not options["use_cache"] else None,
        with_kwargs=True,
    )
    for made in (plain, packed):
        made.train()
    assert set(passes) == {1}
    for one, other in zip(plain.base.parameters(), packed.base.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_a_base_that_cannot_tell_packed_rows_apart_is_refused(tmp_path, monkeypatch):
    forward = LlamaModel.forward

    def deaf(self, *args, position_ids=None, row_lengths=None, **options):
        return forward(self, *args, **options)

    monkeypatch.setattr(LlamaModel, "forward", deaf)
    assert not trainer(tmp_path / "default").base.packs_rows
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot tell packed rows apart"):
        trainer(tmp_path, pack_sequences=True)


def test_a_response_needs_something_before_it():
    ids = torch.tensor([[5, 6, 7], [0, 6, 7]])
    mask = torch.tensor([[True, True, True], [False, True, True]])
    with pytest.raises(ValueError, match="Row 1 has no real token before its response; every row needs a prompt"):
        compact_rows(ids, mask, 2)
    with pytest.raises(ValueError, match="Row 0 has no real token"):
        compact_rows(ids, torch.tensor([[False] * 3, [True] * 3]), 0)


LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=40).map(torch.tensor)


@given(LENGTHS, st.integers(1, 12), st.one_of(st.none(), st.integers(1, 2000)), st.booleans())
@lawful
def test_every_row_is_in_one_batch_that_fits(lengths, rows, tokens, packed):
    batches = batches_by_length(lengths, rows, tokens, packed)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        computed = lengths[batch].sum() if packed else len(batch) * lengths[batch].max()
        assert len(batch) <= rows
        assert tokens is None or len(batch) == 1 or computed <= tokens
        assert lengths[batch].tolist() == sorted(lengths[batch].tolist(), reverse=True)


def cost(lengths, batches, packed: bool) -> int:
    computed = [lengths[batch].sum() if packed else len(batch) * lengths[batch].max() for batch in batches]
    return sum(int(tokens) + BATCH_COST for tokens in computed)


def fits(lengths, batch, rows: int, tokens: int | None, packed: bool) -> bool:
    computed = lengths[batch].sum() if packed else len(batch) * lengths[batch].max()
    return len(batch) <= rows and (tokens is None or len(batch) == 1 or int(computed) <= tokens)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=7).map(torch.tensor),
    st.integers(1, 7),
    st.one_of(st.none(), st.integers(1, 900)),
    st.booleans(),
)
@lawful
def test_no_other_cut_costs_less(lengths, rows, tokens, packed):
    ordered = lengths.argsort(descending=True)
    cuts = [
        [piece for piece in ordered.tensor_split([i + 1 for i in range(len(lengths) - 1) if cut >> i & 1])]
        for cut in range(2 ** (len(lengths) - 1))
    ]
    allowed = [cut for cut in cuts if all(fits(lengths, batch, rows, tokens, packed) for batch in cut)]
    least = min(cost(lengths, batches, packed) for batches in allowed)
    assert cost(lengths, batches_by_length(lengths, rows, tokens, packed), packed) == least


def test_rows_of_like_length_are_together_and_the_others_apart():
    longest, shortest = batches_by_length(torch.tensor([100, 8, 95, 9, 98, 99, 10]), 64)
    assert longest.tolist() == [0, 5, 4, 2] and sorted(shortest.tolist()) == [1, 3, 6]
    assert len(batches_by_length(torch.tensor([5, 1, 4, 2]), 64)) == 1, "too few tokens to be worth a batch"
    assert len(batches_by_length(torch.full((64,), 90), 64)) == 1
