"""What plain PEFT does when roles switch, and that SharedBase does not suffer from it.

A fact that no longer holds is good news: its test fails, and what was built around it can go.
"""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, prepare_model_for_kbit_training
from peft.tuners.tuners_utils import BaseTunerLayer

from bases import (
    KINDS,
    assert_close,
    assert_same_gradient,
    flat,
    lora_config,
    make_base,
    plain_model,
    policy_adapter,
    reward_adapter,
)
from builders import padded_batch, randomize
from ppo_lora import Role

P, T = 5, 6
IDS = torch.randint(3, 50, (4, P + T), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)


def _parameters(model: PeftModel, name: str) -> list[torch.nn.Parameter]:
    return [p for key, p in model.named_parameters() if f".{name}." in key]


def _two_adapters(kind: str = "float32") -> PeftModel:
    model = PeftModel(plain_model(kind=kind), lora_config(), adapter_name="policy")
    model.add_adapter("value", lora_config())
    for seed, name in enumerate(("policy", "value")):
        randomize(_parameters(model, name), seed, scale=0.1)
    model.set_adapter("policy")
    return model.eval()


def _base_like(model: PeftModel, kind: str = "float32"):
    """A SharedBase whose policy and value adapters have the model's numbers, and a head that is not zero."""
    base = make_base(kind=kind)
    for role in (Role.POLICY, Role.VALUE):
        for ours, theirs in zip(base.trainable_parameters()[role], _parameters(model, role.value), strict=False):
            ours.data.copy_(theirs.data)
    randomize([base.value_head.weight], 7, scale=0.3)
    return base


def _policy_loss(model: PeftModel):
    logprobs = torch.log_softmax(model(IDS, use_cache=False).logits[:, P - 1 : -1], dim=-1)
    return logprobs.gather(-1, IDS[:, P:, None]).sum()


def _right_policy_gradient(model: PeftModel) -> list[torch.Tensor]:
    """Forward and backward of the policy, and nothing in between."""
    model.set_adapter("policy")
    return torch.autograd.grad(_policy_loss(model), _parameters(model, "policy"))


@pytest.mark.parametrize("kind", KINDS)
def test_set_adapter_between_forward_and_backward_loses_gradients(kind):
    model = _two_adapters(kind)
    expected = _right_policy_gradient(model)
    loss = _policy_loss(model)
    model.set_adapter("value")
    (loss + model(IDS).logits.square().mean()).backward()
    assert all(p.grad is None for p in _parameters(model, "policy"))
    assert all(p.grad is not None for p in _parameters(model, "value"))

    base = _base_like(model, kind)
    (base.logprobs("policy", IDS, MASK, T).sum() + base.values(IDS, MASK, T).square().mean()).backward()
    assert_same_gradient([p.grad for p in base.trainable_parameters()[Role.POLICY]], expected)
    assert all(p.grad is not None for p in base.trainable_parameters()[Role.VALUE])


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_recomputes_under_whatever_adapter_is_active(kind):
    model = _two_adapters(kind)
    expected = _right_policy_gradient(model)
    plain = model.base_model.model
    enable = getattr(plain, "activation_checkpointing_enable", None) or plain.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in plain.model.layers:
        layer.training = True
    assert_same_gradient(_right_policy_gradient(model), expected, 1e-6)

    loss = _policy_loss(model)
    model.set_adapter("value")
    for p in _parameters(model, "policy"):
        p.requires_grad_(True)
    loss.backward()
    wrong = flat(p.grad for p in _parameters(model, "policy"))
    assert (wrong - flat(expected)).norm() > 0.1 * flat(expected).norm()

    base = _base_like(model, kind)
    base.activation_checkpointing_enable()
    loss = base.logprobs("policy", IDS, MASK, T).sum()
    with base.role("value"):
        loss.backward()
    assert_same_gradient([p.grad for p in base.trainable_parameters()[Role.POLICY]], expected)


def _trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_switches_flip_requires_grad():
    model = _two_adapters()
    for p in (*_parameters(model, "policy"), *_parameters(model, "value")):
        p.requires_grad_(True)
    both = _trainable(model)
    with model.disable_adapter():
        assert not _trainable(model)
    assert {name for name in both if ".policy." in name} == _trainable(model) < both
    model.set_adapter("value")
    assert {name for name in both if ".value." in name} == _trainable(model)

    base = _base_like(model)
    before = _trainable(base)
    for role in (Role.REFERENCE, Role.VALUE, Role.POLICY):
        with base.role(role):
            assert _trainable(base) == before


def test_an_optimizer_of_what_requires_grad_sees_one_adapter():
    model = _two_adapters()
    filtered = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in filtered} == {id(p) for p in _parameters(model, "policy")}

    base = _base_like(model)
    filtered = [p for p in base.parameters() if p.requires_grad]
    listed = [p for group in base.trainable_parameters().values() for p in group]
    assert {id(p) for p in filtered} == {id(p) for p in listed}
    assert len(filtered) == len(listed) == 2 * len(_parameters(model, "policy")) + 1


def test_load_adapter_for_inference_leaves_evaluation_mode():
    model = _two_adapters().train()
    model.load_adapter(policy_adapter(), adapter_name="reference", is_trainable=False)
    assert not model.training

    base = make_base(reference=policy_adapter())
    trainable = _trainable(base)
    base.load_adapter("reference", base.adapter("reference"))
    assert not base.training and _trainable(base) == trainable


def test_load_adapter_on_a_causal_model_drops_the_head_without_a_word():
    model = _two_adapters()
    result = model.load_adapter(reward_adapter(), adapter_name="reward")
    assert result.unexpected_keys == ["base_model.model.score.weight"]
    assert not any("score" in name for name, _ in model.named_parameters())

    assert make_base(reward=reward_adapter()).reward_head.weight.any()
    with pytest.raises(ValueError, match="no head weights"):
        make_base(reward=policy_adapter())


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batches_are_the_separate_forwards(kind):
    model = _two_adapters(kind)
    names = ["policy", "__base__", "value", "__base__"]
    mixed = model(IDS, adapter_names=names).logits
    base = _base_like(model, kind)
    for i, name in enumerate(names):
        with base.role({"__base__": "reference"}.get(name, name)), torch.no_grad():
            assert_close(mixed[i].detach(), base.model(IDS).logits[i])
    with pytest.raises(ValueError, match="in training mode"):
        model.train()(IDS, adapter_names=names)


def _hooks(model: torch.nn.Module) -> int:
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return sum(len(layer._forward_pre_hooks) for layer in layers)


def test_a_mixed_forward_that_raises_leaks_hooks():
    model = _two_adapters()
    with pytest.raises(IndexError):
        model(IDS + 10**6, adapter_names=["policy"] * 4)
    assert _hooks(model) > 0

    base = make_base()
    with pytest.raises(IndexError):
        base.logprobs("reference", IDS + 10**6, MASK, T)
    assert _hooks(base) == 0 and base.active_role is Role.POLICY


def test_preparing_for_kbit_training_upcasts_embeddings_and_head():
    """Large for large vocabularies; SharedBase leaves them as they are (test_the_base_keeps_its_own_dtypes)."""
    model = plain_model(kind="nf4", dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == model.get_input_embeddings().weight.dtype == torch.bfloat16
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.lm_head.weight.dtype == model.get_input_embeddings().weight.dtype == torch.float32

    base = make_base(kind="nf4", dtype=torch.bfloat16)
    assert base.model.lm_head.weight.dtype == base.model.get_input_embeddings().weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear may get different generations")
def test_merging_into_a_4_bit_base_rounds_the_weights():
    """Hence scripts/merge.py merges into a 16-bit base."""
    error = {}
    for kind in KINDS:
        model = PeftModel.from_pretrained(plain_model(kind=kind), policy_adapter()).eval()
        with torch.no_grad():
            expected = model(IDS).logits
            error[kind] = (model.merge_and_unload()(IDS).logits - expected).abs().max().item()
    assert error["float32"] < 1e-4 < 1e-2 < error["nf4"]


def test_padded_rows_need_their_positions_counted():
    """transformers counts positions over padding unless told otherwise; SharedBase always tells."""
    model = plain_model("gpt2")
    ids, mask = padded_batch()
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask.long()).logits[mask]
        right = model(ids, attention_mask=mask.long(), position_ids=counted).logits[mask]
    assert (plain - right).abs().max() > 0.01
