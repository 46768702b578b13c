"""Packed rows in the base's own attention: they say what each says by itself, and no pairs of tokens are made."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from bases import full_base, lora_config
from builders import padded_batch, tiny_model
from ppo_lora import Role, SharedBase
from ppo_lora.packing import ROWS, tell_rows_apart
from ppo_lora.rows import compact_rows

P, T = 6, 7


def base_of(architecture: str, **changes) -> SharedBase:
    model = tiny_model(architecture, initializer_range=0.2, **changes)
    base = SharedBase(model, value="separate", peft_config=lora_config(architecture))
    base.decide_packing()
    return base


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gpt2", "gemma", "phi", "gpt_neox"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_rows_by_themselves(architecture, checkpointing):
    base = base_of(architecture)
    assert base.packs_rows
    if checkpointing:
        base.gradient_checkpointing_enable()
    ids, mask = padded_batch(4, P, T)
    found = []
    for packed in (True, False):
        rows = compact_rows(ids, mask, T, packed)
        assert bool(rows.lengths) == packed
        logprobs, _ = base(Role.POLICY, rows)
        (logprobs.square().sum() + base(Role.VALUE, rows).sum()).backward()
        found.append([logprobs.detach(), *(p.grad.clone() for p in base.parameters() if p.grad is not None)])
        base.zero_grad()
    assert len(found[0]) > 10
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("window", [2, 5])
def test_rows_longer_than_a_window_see_only_the_window(window):
    ids, mask = padded_batch(4, P, T)
    base, whole = base_of("mistral", sliding_window=window), base_of("mistral", sliding_window=None)
    assert base.packs_rows
    apart, packed = (base(Role.REFERENCE, compact_rows(ids, mask, T, packed))[0] for packed in (False, True))
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole(Role.REFERENCE, compact_rows(ids, mask, T, True))[0], packed, atol=1e-3)


def test_no_mask_of_pairs_is_made(monkeypatch):
    base = base_of("llama")
    ids, mask = padded_batch(4, P, T)
    made = []
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, ROWS, lambda *_, **__: made.append(1))
    base(Role.POLICY, compact_rows(ids, mask, T, True))
    assert not made
    base(Role.POLICY, compact_rows(ids, mask, T, False))
    assert made, "nobody would have noticed"


def test_rows_of_one_length_need_no_packing():
    ids = torch.randint(3, 9, (3, 8))
    assert compact_rows(ids, torch.ones_like(ids), 4, packed=True).position_ids is None


def test_the_attention_of_a_base_is_taken_over():
    model = tiny_model("llama")
    assert model.config._attn_implementation == "sdpa" and ROWS in AttentionInterface()
    assert tell_rows_apart(model) and model.config._attn_implementation == ROWS
    assert tell_rows_apart(model), "also the second time"
    eager = tiny_model("llama")
    eager.set_attn_implementation("eager")
    assert not tell_rows_apart(eager) and eager.config._attn_implementation == "eager"


def test_attention_that_cannot_be_set_is_left_without_a_word(caplog):
    assert not base_of("falcon").packs_rows
    assert not caplog.records


def test_eager_attention_packs_only_when_asked():
    base = full_base()
    base.model.set_attn_implementation("eager")
    for wanted, packs in ((None, False), (True, True), (False, False)):
        base.decide_packing(wanted)
        assert base.packs_rows == packs


def test_scores_are_those_of_rows_by_themselves():
    base = full_base()
    ids, mask = padded_batch(4, P, T)
    apart = base.scores(ids, mask)
    base.decide_packing()
    widths = []
    base.backbone.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape))
    torch.testing.assert_close(base.scores(ids, mask), apart, rtol=1e-4, atol=1e-5)
    assert widths == [(1, int(mask.sum()))]
