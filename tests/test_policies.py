"""Further policies on one base: what they compute, and that they leave the four roles alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bases import assert_close, full_base, make_base, policy_adapter
from builders import padded_batch
from ppo_lora import Role, read_adapter

T = 6


def test_each_policy_is_what_it_is_as_the_only_one():
    base = full_base()
    ids, mask = padded_batch()
    roles = {role: base.logprobs(role, ids, mask, T).detach() for role in ("policy", "reference")}
    values, scores = base.values(ids, mask, T).detach(), base.scores(ids, mask)
    base.add_policy("base")
    base.add_policy("sft", policy_adapter(seed=5))
    base.add_policy("dora-2", policy_adapter(seed=6, use_dora=True, target_modules=("q_proj", "up_proj")))
    assert base.active_role is Role.POLICY
    assert_close(base.logprobs("base", ids, mask, T), make_base().logprobs("reference", ids, mask, T))
    for name, adapter in (
        ("sft", policy_adapter(seed=5)),
        ("dora-2", policy_adapter(seed=6, use_dora=True, target_modules=("q_proj", "up_proj"))),
    ):
        expected = make_base(policy=adapter).logprobs("policy", ids, mask, T).detach()
        assert torch.equal(base.logprobs(name, ids, mask, T), expected)
    for role, logprobs in roles.items():
        assert torch.equal(base.logprobs(role, ids, mask, T).detach(), logprobs)
    assert torch.equal(base.values(ids, mask, T).detach(), values) and torch.equal(base.scores(ids, mask), scores)


def test_they_are_never_trained():
    base = full_base()
    before = {id(p) for p in base.parameters() if p.requires_grad}
    with base.role("value"):
        base.add_policy("other", policy_adapter(seed=5))
        assert base.active_role is Role.VALUE
    assert {id(p) for p in base.parameters() if p.requires_grad} == before
    ids, mask = padded_batch()
    assert not base.logprobs("other", ids, mask, T).requires_grad


def test_they_write_texts_of_their_own():
    base = make_base()
    base.add_policy("other", policy_adapter(seed=5))
    base.add_policy("base")
    ids, mask = padded_batch(rows=2)
    texts = {name: base.generate(ids, mask, role=name, max_new_tokens=12) for name in ("policy", "other", "base")}
    assert torch.equal(texts["policy"], texts["base"])  # a fresh adapter changes nothing
    assert not torch.equal(texts["other"], texts["base"])


@pytest.mark.parametrize("name", ["policy", "reward", "", "a.b", "a/b", "../x", "sft"])
def test_names_that_cannot_be_are_refused(name):
    base = make_base()
    base.add_policy("sft", policy_adapter())
    with pytest.raises(ValueError, match=f"A policy cannot be called '{name}'; expected|cannot be called '{name}'"):
        base.add_policy(name, policy_adapter())


def test_an_unknown_policy_is_named_with_those_there_are():
    base = make_base()
    base.add_policy("sft", policy_adapter())
    ids, mask = padded_batch()
    with pytest.raises(ValueError, match=r"Unknown role 'nobody'; expected one of \['policy', .*'sft'\]"):
        base.logprobs("nobody", ids, mask, T)


@pytest.mark.filterwarnings("ignore:The other adapter .* was trained on the base")
def test_an_adapter_that_does_not_fit_leaves_no_policy_behind():
    base = make_base()
    trainable = {id(p) for p in base.parameters() if p.requires_grad}
    ids, mask = padded_batch()
    before = base.logprobs("policy", ids, mask, T)
    for misfit in (policy_adapter("gpt2"), policy_adapter(r=2, target_modules=("q_proj",))):
        adapter = read_adapter(misfit)
        adapter = replace(adapter, tensors=dict(list(adapter.tensors.items())[1:]))
        with pytest.raises(ValueError, match="The other adapter .* does not fit"):
            base.add_policy("other", adapter)
    assert {id(p) for p in base.parameters() if p.requires_grad} == trainable
    assert torch.equal(base.logprobs("policy", ids, mask, T), before)
    assert "other" not in [getattr(role, "value", role) for role in base.roles]
