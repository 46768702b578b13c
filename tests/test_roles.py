"""Roles: what is trainable, what is active, what stays put, where value and reference start."""

from __future__ import annotations

import re
from contextlib import suppress
from copy import deepcopy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import BaseTunerLayer

from bases import ALL_KINDS, KINDS, assert_close, full_base, lora_config, make_base, policy_adapter, reward_adapter
from builders import ARCHITECTURES, padded_batch, randomize
from ppo_lora import Role, SharedBase, read_adapter
from ppo_lora.rows import compact_rows

T = 6


class _Failure(Exception):
    pass


def _layers(base) -> list[BaseTunerLayer]:
    return [module for module in base.modules() if isinstance(module, BaseTunerLayer)]


def _assert_trainable_set(base: SharedBase) -> None:
    """Adapters of policy and value and the value head, told by their names alone."""
    trains = re.compile(r"^value_head\.|\.lora_[AB]\.(policy|value)\.weight$")
    expected = {name for name, _ in base.named_parameters() if trains.search(name)}
    assert {name for name, parameter in base.named_parameters() if parameter.requires_grad} == expected
    listed = {id(p) for parameters in base.trainable_parameters().values() for p in parameters}
    assert listed == {id(p) for p in base.parameters() if p.requires_grad}
    assert all(any(part in name for name in expected) for part in (".policy.", "value_head."))


def _assert_active(base: SharedBase, role: str) -> None:
    assert base.active_role == role
    for layer in _layers(base):
        assert (layer.active_adapters, layer.disable_adapters) == ([Role(role).value], False)


def _state(base: SharedBase) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in base.state_dict().items() if isinstance(tensor, torch.Tensor)}


# Invariant 1: what is trainable


@cache
def _base_for_walks(kind: str) -> SharedBase:
    return full_base(kind=kind)


_ROLES = st.sampled_from([*Role, *(role.value for role in Role)])
_WALKS = st.recursive(
    st.just(()),
    lambda inner: st.lists(st.tuples(_ROLES, st.booleans(), inner), max_size=3).map(tuple),
    max_leaves=10,
)


def _walk(base: SharedBase, steps) -> None:
    for role, fails, inner in steps:
        before = base.active_role
        with suppress(_Failure), base.role(role) as entered:
            assert entered is base
            _assert_active(base, role)
            _walk(base, inner)
            _assert_active(base, role)
            if fails:
                raise _Failure
        _assert_active(base, before)
        _assert_trainable_set(base)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(steps=_WALKS)
def test_any_walk_through_roles_restores_role_and_trainable_set(kind, steps):
    base = _base_for_walks(kind)
    _walk(base, steps)
    _assert_active(base, "policy")
    _assert_trainable_set(base)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_leave_role_and_trainable_set(kind, checkpointing):
    base = full_base(kind=kind)
    _assert_trainable_set(base)
    if checkpointing:
        base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    prompts, prompt_mask = ids[:, :5], mask[:, :5]
    for outer in Role:
        with base.role(outer):
            base.generate(prompts, prompt_mask, max_new_tokens=2)
            base.generate(prompts, prompt_mask, role="reference", max_new_tokens=2, do_sample=True)
            base.logprobs("policy", ids, mask, T).sum().backward()
            base.logprobs("reference", ids, mask, T)
            base.values(ids, mask, T).sum().backward()
            base.scores(ids, mask)
            base.train()
            _assert_active(base, outer)
            _assert_trainable_set(base)
    _assert_active(base, "policy")


@pytest.mark.parametrize("layout", [{}, {"value": "shared"}, {"reference": policy_adapter}, {"value": reward_adapter}])
def test_trainable_set_of_other_role_layouts(layout):
    _assert_trainable_set(make_base(**{role: made() if callable(made) else made for role, made in layout.items()}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trainable_set_of_every_architecture(architecture):
    base = full_base(architecture)
    _assert_trainable_set(base)
    parameters = base.trainable_parameters()
    assert len(parameters[Role.POLICY]) == len(parameters[Role.VALUE]) - 1 > 0


@pytest.mark.parametrize("call", [Exception, KeyboardInterrupt])
def test_the_role_is_restored_after_an_exception_in_the_model(monkeypatch, call):
    base = full_base()
    ids, mask = padded_batch()

    def fail(*_):
        raise call("in the middle")

    hook = base.backbone.layers[1].register_forward_pre_hook(fail)
    for run in (
        lambda: base.values(ids, mask, T),
        lambda: base.scores(ids, mask),
        lambda: base.logprobs("reference", ids, mask, T),
        lambda: base.generate(ids, mask, role="reference", max_new_tokens=1),
    ):
        with pytest.raises(call, match="in the middle"):
            run()
        _assert_active(base, "policy")
        _assert_trainable_set(base)
    hook.remove()


@pytest.mark.parametrize("kind", ["float32", "nf4", "int8"])
@pytest.mark.parametrize("value", [None, "shared"])
def test_training_changes_policy_and_value_and_nothing_else(kind, value):
    base = make_base(kind=kind, policy=policy_adapter(), reward=reward_adapter(), value=value)
    base.activation_checkpointing_enable()
    before = _state(base)
    optimizer = torch.optim.AdamW([p for group in base.trainable_parameters().values() for p in group], lr=1e-2)
    ids, mask = padded_batch()
    for _ in range(3):
        optimizer.zero_grad()
        advantages = base.scores(ids, mask)[:, None] - base.logprobs("reference", ids, mask, T).detach()
        (base.logprobs("policy", ids, mask, T) * advantages.detach()).mean().backward()
        (base.values(ids, mask, T) - 1).square().mean().backward()
        optimizer.step()
    after = _state(base)
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {name for name, parameter in base.named_parameters() if parameter.requires_grad}
    assert trained and changed == trained


def test_reference_and_reward_have_no_graph_even_with_gradients_on():
    base = full_base()
    ids, mask = padded_batch()
    for checkpointing in (False, True):
        if checkpointing:
            base.activation_checkpointing_enable()
        assert not base.logprobs("reference", ids, mask, T).requires_grad
        assert not base.scores(ids, mask).requires_grad


# Switching


def test_switching_touches_no_parameter():
    base = full_base()
    ids, mask = padded_batch()
    (base.logprobs("policy", ids, mask, T).sum() + base.values(ids, mask, T).sum()).backward()

    def marks():
        return [(id(p), p.requires_grad, id(p.grad), p._version, p.data_ptr()) for p in base.parameters()]

    before = marks()
    assert any(p.grad is not None for p in base.parameters())
    for outer in Role:
        with base.role(outer):
            assert marks() == before
            for inner in Role:
                with base.role(inner):
                    assert marks() == before
    assert marks() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", [*Role, None], ids=str)
def test_peft_layers_still_read_the_flags_that_roles_write(kind, role):
    """SharedBase writes `_active_adapter` and `_disable_adapters`; PEFT's public switches must be equivalent."""
    base = make_base(kind=kind) if role is None else full_base(kind=kind)
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.1)
    name = None if role is None else role.value
    layers = _layers(base)
    assert len(layers) == 2 * 7
    with base.role(role or "reference"):
        for layer in layers:
            assert layer.disable_adapters is (name is None)
            assert layer.active_adapters == ([] if name is None else [name])
            states = torch.randn(3, layer.in_features)
            twin = deepcopy(layer)
            twin.set_adapter("policy")
            if name is None:
                twin.enable_adapters(False)
            else:
                twin.enable_adapters(True)
                twin.set_adapter(name)
            assert torch.equal(layer(states), twin(states))
            alike = torch.equal(layer(states), layer.base_layer(states))
            assert alike is (name is None)


def test_roles_and_their_sources():
    base = make_base(policy=policy_adapter(), reward=reward_adapter())
    assert set(base.roles) == set(Role)
    assert base.active_role is Role.POLICY
    assert set(make_base().roles) == {Role.POLICY, Role.REFERENCE, Role.VALUE}


@pytest.mark.parametrize("name", ["critic", "", "POLICY", None])
def test_an_unknown_role_is_named(name):
    base = make_base()
    ids, mask = padded_batch()
    for use in (
        lambda: base.role(name).__enter__(),
        lambda: base.logprobs(name, ids, mask, T),
        lambda: base(name, compact_rows(ids, mask, T)),
        lambda: base.adapter(name),
        lambda: base.generate(ids, mask, role=name, max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match=rf"Unknown role {name!r}; expected one of \['policy', 'reference'"):
            use()
    _assert_trainable_set(base)
    assert base.active_role is Role.POLICY


def test_a_missing_reward_role_is_named():
    base = make_base()
    ids, mask = padded_batch()
    for use in (
        lambda: base.scores(ids, mask),
        lambda: base.role("reward").__enter__(),
        lambda: base.adapter("reward"),
        lambda: base.generate(ids, mask, role="reward", max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match="no reward role. Give SharedBase a reward adapter, or take scores from"):
            use()
    assert base.active_role is Role.POLICY


# Invariant 2: where the reference starts, and that it stays


def _starts(kind: str):
    yield "fresh", make_base(kind=kind)
    yield "sft", make_base(kind=kind, policy=policy_adapter())
    yield "sft in memory", make_base(kind=kind, policy=read_adapter(policy_adapter()))
    if kind != "int8":  # plain PEFT too fails there, at the second forward
        yield "dora", make_base(kind=kind, peft_config=lora_config(use_dora=True))
    yield "rslora", make_base(kind=kind, peft_config=lora_config(use_rslora=True, init_lora_weights="gaussian"))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_kl_to_the_reference_starts_at_exactly_zero(kind):
    ids, mask = padded_batch()
    for start, base in _starts(kind):
        for checkpointing in (False, True):
            if checkpointing:
                base.activation_checkpointing_enable()
            policy = base.logprobs("policy", ids, mask, T)
            reference = base.logprobs("reference", ids, mask, T)
            assert policy.requires_grad and not reference.requires_grad, start
            with torch.no_grad():
                assert torch.equal(base.logprobs("policy", ids, mask, T), reference), start
            assert torch.equal(policy, reference), start


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_stays_when_the_policy_moves(kind):
    ids, mask = padded_batch()
    for start, base in _starts(kind):
        reference = base.logprobs("reference", ids, mask, T)
        randomize(base.trainable_parameters()[Role.POLICY], seed=5, scale=0.2)
        randomize(base.trainable_parameters()[Role.VALUE], seed=6, scale=0.2)
        assert torch.equal(base.logprobs("reference", ids, mask, T), reference), start
        moved = (base.logprobs("policy", ids, mask, T) - reference)[mask[:, -T:]].abs()
        assert moved.min() > 0 and moved.max() > 0.1, start


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sft_start_is_not_the_plain_base(architecture):
    ids, mask = padded_batch()
    fresh, started = make_base(architecture), make_base(architecture, policy=policy_adapter(architecture))
    assert torch.equal(started.logprobs("policy", ids, mask, T), started.logprobs("reference", ids, mask, T))
    assert (fresh.logprobs("reference", ids, mask, T) - started.logprobs("reference", ids, mask, T)).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_reference(kind):
    ids, mask = padded_batch()
    base = make_base(kind=kind, reference=policy_adapter())
    expected = make_base(kind=kind, policy=policy_adapter()).logprobs("policy", ids, mask, T).detach()
    assert_close(base.logprobs("reference", ids, mask, T), expected)
    assert (base.logprobs("policy", ids, mask, T) - expected).abs().max() > 0.1
    _assert_trainable_set(base)


# Where the value starts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, "separate"])
def test_the_value_starts_as_the_score_of_each_state(kind, value):
    """V(s_t) is the score of the tokens before t, as long as the value is still the reward adapter and its head."""
    ids, mask = padded_batch()
    base = make_base(kind=kind, policy=policy_adapter(), reward=reward_adapter(), value=value)
    values = base.values(ids, mask, T)
    for t in range(T):
        scores = base.scores(ids[:, : 5 + t], mask[:, : 5 + t])
        real = mask[:, 5 + t]
        assert_close(values[real, t], scores[real])
    assert values.std() > 0.01


def test_the_value_is_a_copy_of_the_reward():
    ids, mask = padded_batch()
    base = make_base(reward=reward_adapter())
    scores = base.scores(ids, mask)
    randomize(base.trainable_parameters()[Role.VALUE], scale=0.5)
    assert torch.equal(base.scores(ids, mask), scores)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"value": "separate"}, {"value": "shared"}])
def test_a_fresh_value_is_exactly_zero(kind, options):
    base = make_base(kind=kind, policy=policy_adapter(), **options)
    ids, mask = padded_batch()
    assert torch.equal(base.values(ids, mask, T), torch.zeros(4, T))
    assert torch.equal(base.value_head.weight, torch.zeros(1, 64)) and base.value_head.bias is None


def test_a_named_value_adapter():
    ids, mask = padded_batch()
    base = make_base(value=reward_adapter(seed=7), reward=reward_adapter())
    expected = make_base(reward=reward_adapter(seed=7)).values(ids, mask, T)
    assert torch.equal(base.values(ids, mask, T), expected)
    other = make_base(reward=reward_adapter()).values(ids, mask, T)
    assert (expected - other).abs().max() > 0.01


@pytest.mark.parametrize("reward", [None, reward_adapter])
def test_a_shared_value_lives_on_the_policys_adapter(reward):
    ids, mask = padded_batch()
    base = make_base(policy=policy_adapter(), value="shared", reward=reward and reward())
    assert base.shares_value_adapter
    parameters = base.trainable_parameters()
    assert [id(p) for p in parameters[Role.VALUE]] == [id(base.value_head.weight)]
    head = read_adapter(reward()).head["weight"] if reward else torch.zeros(1, 64)
    assert torch.equal(base.value_head.weight, head)
    randomize([base.value_head.weight], scale=0.3)
    with base.role("policy"), torch.no_grad():
        hidden = base.backbone(ids[:1, :5][mask[:1, :5]][None]).last_hidden_state[0, -1]
    assert_close(base.values(ids, mask, T)[0, 0].detach(), hidden @ base.value_head.weight[0].detach())
    assert not make_base().shares_value_adapter


def test_a_shared_value_follows_the_policy():
    ids, mask = padded_batch()
    base = make_base(policy=policy_adapter(), value="shared", reward=reward_adapter())
    before = base.values(ids, mask, T)
    randomize(base.trainable_parameters()[Role.POLICY], seed=3, scale=0.2)
    assert (base.values(ids, mask, T) - before).abs().max() > 0.01
