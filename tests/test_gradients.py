"""Gradients: those of plain PEFT, whatever the checkpointing, the padding, the split, and the roles in between."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch.nn.functional import pad
from transformers import PreTrainedModel

from bases import (
    ALL_KINDS,
    KINDS,
    assert_same_gradient,
    full_base,
    lora_config,
    make_base,
    plain_model,
    policy_adapter,
    reward_adapter,
)
from builders import ARCHITECTURES, PAD, padded_batch, randomize
from ppo_lora import Role, SharedBase
from ppo_lora.rows import compact_rows

P, T = 5, 6
WEIGHTS = torch.linspace(-1, 2, 4 * T).view(4, T)


def _policy_loss(base: SharedBase, ids, mask, weights=WEIGHTS):
    return (base.logprobs("policy", ids, mask, weights.shape[1]) * weights).sum()


def _value_loss(base: SharedBase, ids, mask, weights=WEIGHTS):
    values = base.values(ids, mask, weights.shape[1])
    return ((values - 1).square() * weights.abs() * mask[:, -weights.shape[1] :]).sum()


def _gradients(base: SharedBase) -> dict[Role, list[torch.Tensor]]:
    """What backward left, taken away from the parameters."""
    found = {role: [p.grad for p in parameters] for role, parameters in base.trainable_parameters().items()}
    base.zero_grad(set_to_none=True)
    return found


def _separate_gradients(base: SharedBase, ids, mask, weights=WEIGHTS) -> dict[Role, list[torch.Tensor]]:
    _policy_loss(base, ids, mask, weights).backward()
    _value_loss(base, ids, mask, weights).backward()
    return _gradients(base)


def _assert_same(given, expected, tolerance: float = 1e-5) -> None:
    for role in (Role.POLICY, Role.VALUE):
        assert_same_gradient(given[role], expected[role], tolerance)


# Against plain PEFT


def _plain_policy(base: SharedBase, architecture: str, kind: str) -> PeftModel:
    exported = base.adapter("policy")
    model = PeftModel(plain_model(architecture, kind), lora_config(architecture), adapter_name="policy")
    model.load_state_dict({key.replace(".weight", ".policy.weight"): t for key, t in exported.tensors.items()}, False)
    given, loaded = exported.tensors, get_peft_model_state_dict(model, adapter_name="policy")
    assert all(torch.equal(given[key], loaded[key]) for key in given)
    return model.eval()


def _rows(ids, mask):
    """Each row without its padding, and how many of its tokens are the prompt's."""
    for row, real in zip(ids, mask, strict=True):
        yield row[real][None], int(real[:P].sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_policy_gradients_are_those_of_plain_peft(architecture, kind, checkpointing):
    base = full_base(architecture, kind)
    ids, mask = padded_batch()
    model = _plain_policy(base, architecture, kind)
    loss = 0
    for (row, start), weights in zip(_rows(ids, mask), WEIGHTS, strict=True):
        logprobs = torch.log_softmax(model(row).logits / 0.7, dim=-1)[0, start - 1 : -1]
        chosen = logprobs.gather(-1, row[0, start:, None]).squeeze(-1)
        loss = loss + (chosen * weights[: len(chosen)]).sum()
    loss.backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if checkpointing:
        base.activation_checkpointing_enable()
    (base.logprobs("policy", ids, mask, T, temperature=0.7) * WEIGHTS).sum().backward()
    ours = {name: p.grad for name, p in base.named_parameters() if p.grad is not None}
    names = sorted(ours)
    assert [f"base_model.{name}" for name in names] == sorted(plain)
    assert_same_gradient([ours[name] for name in names], [plain[f"base_model.{name}"] for name in names], 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_value_gradients_are_those_of_a_plain_hidden_state_and_head(kind):
    base = full_base(kind=kind)
    ids, mask = padded_batch()
    loss = 0
    with base.role("value"):
        for (row, start), weights in zip(_rows(ids, mask), WEIGHTS, strict=True):
            states = base.model(row, output_hidden_states=True, use_cache=False).hidden_states[-1][0, start - 1 : -1]
            values = states @ base.value_head.weight[0]
            loss = loss + ((values - 1).square() * weights[: len(values)].abs()).sum()
        expected = torch.autograd.grad(loss, base.trainable_parameters()[Role.VALUE])
    _value_loss(base, ids, mask).backward()
    assert_same_gradient(_gradients(base)[Role.VALUE], expected, 1e-4)


def test_entropy_has_a_gradient_only_when_asked():
    base = full_base()
    ids, mask = padded_batch()
    _, entropy = base("policy", compact_rows(ids, mask, T))
    assert not entropy.requires_grad
    base("policy", compact_rows(ids, mask, T), entropy_gradient=True)[1].sum().backward()
    given = _gradients(base)[Role.POLICY]
    loss = 0
    for row, start in _rows(ids, mask):
        logprobs = torch.log_softmax(base.model(row, use_cache=False).logits[0, start - 1 : -1], dim=-1)
        loss = loss - (logprobs.exp() * logprobs).sum()
    assert_same_gradient(given, torch.autograd.grad(loss, base.trainable_parameters()[Role.POLICY]), 1e-4)


# Checkpointing, padding, splitting


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}], ids=["every layer", "every second"])
def test_checkpointing_changes_no_gradient(kind, options):
    if options and not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers checkpoints all layers or none")
    base = full_base(kind=kind)
    ids, mask = padded_batch()
    expected = _separate_gradients(base, ids, mask)
    base.activation_checkpointing_enable(**options)
    _assert_same(_separate_gradients(base, ids, mask), expected, 1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpointing_changes_no_gradient_of_any_architecture(architecture):
    base = full_base(architecture)
    ids, mask = padded_batch()
    expected = _separate_gradients(base, ids, mask)
    base.activation_checkpointing_enable()
    _assert_same(_separate_gradients(base, ids, mask), expected, 1e-6)


def test_checkpointing_recomputes_every_layer_in_backward_and_none_without_gradients():
    base = full_base()
    base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    runs = []
    for layer in base.backbone.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(base.active_role))
    loss = _policy_loss(base, ids, mask)
    assert runs == ["policy"] * 2
    with base.role("value"):
        loss.backward()
    assert runs == ["policy"] * 4
    runs.clear()
    with torch.no_grad():
        base.values(ids, mask, T)
    assert runs == ["value"] * 2


def test_checkpointing_refuses_reentrant_and_takes_either_name():
    base = full_base()
    with pytest.raises(ValueError, match="use_reentrant=True; ppo_lora needs use_reentrant=False"):
        base.activation_checkpointing_enable({"use_reentrant": True})
    ids, mask = padded_batch()
    expected = _separate_gradients(base, ids, mask)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    _assert_same(_separate_gradients(base, ids, mask), expected, 1e-6)


def test_checkpointing_by_the_keyword_that_older_trainers_give():
    base = full_base()
    with pytest.raises(ValueError, match="use_reentrant=False"):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4), (2, 5)])
def test_more_padding_changes_no_gradient(kind, checkpointing, left, right):
    base = full_base(kind=kind)
    if checkpointing:
        base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    expected = _separate_gradients(base, ids, mask)
    wider = pad(ids, (left, right), value=PAD), pad(mask, (left, right), value=False)
    _assert_same(_separate_gradients(base, *wider, pad(WEIGHTS, (0, right), value=9.0)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_micro_batch_size_changes_no_gradient(kind, size):
    base = full_base(kind=kind)
    base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    expected = _separate_gradients(base, ids, mask)
    for rows in torch.arange(4).split(size):
        _policy_loss(base, ids[rows], mask[rows], WEIGHTS[rows]).backward()
        _value_loss(base, ids[rows], mask[rows], WEIGHTS[rows]).backward()
    _assert_same(_gradients(base), expected)


# Roles between a forward and its backward


def _disturb(base: SharedBase, ids, mask) -> None:
    """Every role's pass, with and without gradients."""
    base.scores(ids, mask)
    base.logprobs("reference", ids, mask, T)
    base.generate(ids[:, :P], mask[:, :P], max_new_tokens=2)
    base.generate(ids[:, :P], mask[:, :P], role="reference", max_new_tokens=2)
    with torch.no_grad(), base.role("reward"):
        base.values(ids, mask, T)
        base.logprobs("policy", ids, mask, T)
    base.logprobs("policy", ids.flip(0), mask.flip(0), T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("order", "around"),
    [(("policy", "value"), "reference"), (("value", "policy"), "reward"), (("sum",), "value"), (("sum",), "policy")],
)
def test_roles_between_forward_and_backward_change_no_gradient(kind, checkpointing, order, around):
    base = full_base(kind=kind)
    ids, mask = padded_batch()
    expected = _separate_gradients(base, ids, mask)
    if checkpointing:
        base.activation_checkpointing_enable()
    losses = {"policy": _policy_loss(base, ids, mask)}
    _disturb(base, ids, mask)
    losses["value"] = _value_loss(base, ids, mask)
    losses["sum"] = losses["policy"] + losses["value"]
    _disturb(base, ids, mask)
    for name in order:
        with base.role(around):
            losses[name].backward()
            assert base.active_role == around
        _disturb(base, ids, mask)
    _assert_same(_gradients(base), expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputation_inside_a_pass_of_the_same_role_changes_no_gradient(kind):
    """Two policy graphs alive at once, their backward passes in the other order."""
    base = full_base(kind=kind)
    base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    first, second = _policy_loss(base, ids, mask), _policy_loss(base, ids.flip(0), mask.flip(0))
    second.backward()
    others = _gradients(base)[Role.POLICY]
    first.backward()
    assert_same_gradient(_gradients(base)[Role.POLICY], _separate_gradients(base, ids, mask)[Role.POLICY], 1e-6)
    _policy_loss(base, ids.flip(0), mask.flip(0)).backward()
    assert_same_gradient(others, _gradients(base)[Role.POLICY], 1e-6)


# Who gets a gradient from what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_separate_adapters_a_loss_reaches_its_role_only(kind, checkpointing):
    base = full_base(kind=kind)
    if checkpointing:
        base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    _policy_loss(base, ids, mask).backward()
    found = _gradients(base)
    assert all(gradient is not None and gradient.any() for gradient in found[Role.POLICY])
    assert all(gradient is None for gradient in found[Role.VALUE])
    _value_loss(base, ids, mask).backward()
    found = _gradients(base)
    assert all(gradient is None for gradient in found[Role.POLICY])
    assert all(gradient is not None and gradient.any() for gradient in found[Role.VALUE])
    assert all(p.grad is None for p in base.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_a_shared_adapter_the_value_loss_reaches_the_policys_too(kind, checkpointing):
    base = make_base(kind=kind, policy=policy_adapter(), reward=reward_adapter(), value="shared")
    if checkpointing:
        base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    _value_loss(base, ids, mask).backward()
    from_value = _gradients(base)
    assert all(gradient.any() for role in from_value for gradient in from_value[role])
    _policy_loss(base, ids, mask).backward()
    from_policy = _gradients(base)
    assert all(gradient.any() for gradient in from_policy[Role.POLICY]) and from_policy[Role.VALUE] == [None]
    (_policy_loss(base, ids, mask) + _value_loss(base, ids, mask)).backward()
    both = _gradients(base)[Role.POLICY]
    added = [a + b for a, b in zip(from_value[Role.POLICY], from_policy[Role.POLICY], strict=True)]
    assert_same_gradient(both, added)


def test_no_gradient_is_kept_for_frozen_parameters():
    base = full_base()
    ids, mask = padded_batch()
    losses = [_policy_loss(base, ids, mask), _value_loss(base, ids, mask), base.scores(ids, mask).sum()]
    sum(losses).backward()
    assert all((p.grad is not None) == p.requires_grad for p in base.parameters())


@pytest.mark.parametrize("rows", [[0], [0, 1, 2, 3]])
def test_a_fresh_value_learns_from_its_head_first(rows):
    base = make_base()
    ids, mask = padded_batch()
    _value_loss(base, ids[rows], mask[rows], WEIGHTS[rows]).backward()
    *adapters, head = _gradients(base)[Role.VALUE]
    assert head.any() and not any(gradient.any() for gradient in adapters)
    randomize([base.value_head.weight])
    _value_loss(base, ids[rows], mask[rows], WEIGHTS[rows]).backward()
    assert any(gradient.any() for gradient in _gradients(base)[Role.VALUE][:-1])
