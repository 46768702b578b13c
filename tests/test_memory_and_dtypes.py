"""What the roles may cost and in which numbers they compute: tensors made, output head run, dropout, dtypes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from bases import (
    ALL_KINDS,
    KINDS,
    full_base,
    lora_config,
    make_base,
    model_folder,
    plain_model,
    policy_adapter,
    quantization,
    reward_adapter,
)
from builders import ARCHITECTURES, padded_batch, tiny_model
from ppo_lora import SharedBase, read_adapter
from ppo_lora.heads import OutputHead
from ppo_lora.identity import BaseIdentity
from ppo_lora.rows import compact_rows

P, T = 5, 6


# Memory (invariant 6)

B_WIDE, P_WIDE, T_WIDE, V_WIDE = 8, 4, 16, 400


class _LargestTensor(TorchDispatchMode):
    """The element count of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.elements:
                self.elements, self.operation = tensor.numel(), str(operation)
        return output


def _wide_base(kind: str) -> SharedBase:
    model = AutoModelForCausalLM.from_pretrained(
        model_folder(vocab_size=V_WIDE), quantization_config=quantization(kind)
    )
    reward = replace(read_adapter(reward_adapter()), trained_on=BaseIdentity())  # of a base with few tokens
    return SharedBase(model, reward=reward, peft_config=lora_config())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("full_rows", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_tensor_of_all_logits_is_ever_made(kind, full_rows, checkpointing):
    base = _wide_base(kind)
    if checkpointing:
        base.activation_checkpointing_enable()
    ids, mask = padded_batch(B_WIDE, P_WIDE, T_WIDE, vocab_size=V_WIDE)
    mask = mask | full_rows
    forbidden = B_WIDE * T_WIDE * V_WIDE
    with _LargestTensor() as largest:
        base.model(ids)
    assert largest.elements >= forbidden, "the plain forward is what the measurement must catch"
    with _LargestTensor() as largest:
        base.logprobs("reference", ids, mask, T_WIDE)
        base.scores(ids, mask)
        with torch.no_grad():
            base.logprobs("policy", ids, mask, T_WIDE)
            base.values(ids, mask, T_WIDE)
        logprobs, entropy = base("policy", compact_rows(ids, mask, T_WIDE), entropy_gradient=True)
        (logprobs.sum() + entropy.sum()).backward()
        base.logprobs("policy", ids, mask, T_WIDE).sum().backward()
        base.values(ids, mask, T_WIDE).sum().backward()
    assert 0 < largest.elements < forbidden, largest.operation


def test_value_and_reward_never_touch_the_output_head(monkeypatch):
    base = full_base()
    base.activation_checkpointing_enable()
    ids, mask = padded_batch()
    calls, product = [], OutputHead.__call__
    monkeypatch.setattr(OutputHead, "__call__", lambda self, hidden: calls.append(hidden) or product(self, hidden))
    base.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(base.active_role))
    base.values(ids, mask, T).sum().backward()
    with torch.no_grad():
        base.values(ids, mask, T)
    base.scores(ids, mask)
    assert not calls
    base.logprobs("policy", ids, mask, T)
    assert calls


# Dropout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dropout_is_off_with_gradients_and_in_training(architecture, kind):
    base = full_base(architecture, kind, policy=None, peft_config=lora_config(architecture, lora_dropout=0.5))
    ids, mask = padded_batch()
    with torch.no_grad():
        expected = base.logprobs("policy", ids, mask, T), base.values(ids, mask, T), base.scores(ids, mask)
    assert base.train() is base
    for checkpointing in (False, True):
        if checkpointing:
            base.activation_checkpointing_enable()
        for _ in range(2):
            base.train()
            given = base.logprobs("policy", ids, mask, T), base.values(ids, mask, T), base.scores(ids, mask)
            assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))
            given[0].sum().backward()


def test_the_tiny_gpt2_would_drop_out_if_it_were_let():
    model = tiny_model("gpt2", initializer_range=0.1).train()
    ids = torch.randint(3, 50, (1, 8))
    assert not torch.equal(model(ids).logits, model(ids).logits)


# Dtypes


def _bfloat16_base(**options) -> SharedBase:
    return make_base(dtype=torch.bfloat16, policy=policy_adapter(), reward=reward_adapter(), **options)


@pytest.mark.parametrize("kind", ["bfloat16", "nf4 of bfloat16", "float32 computing in bfloat16"])
def test_half_precision_gives_float32_results_and_finite_gradients(kind):
    if kind == "float32 computing in bfloat16":
        base = make_base(policy=policy_adapter(), reward=reward_adapter())
        base.compute_dtype = torch.bfloat16
    else:
        base = _bfloat16_base(kind="nf4" if kind.startswith("nf4") else "float32")
        assert base.model.get_output_embeddings().weight.dtype == torch.bfloat16
    assert base.compute_dtype == torch.bfloat16
    base.activation_checkpointing_enable()
    assert {head.weight.dtype for head in (base.value_head, base.reward_head)} == {torch.float32}
    assert {p.dtype for group in base.trainable_parameters().values() for p in group} == {torch.float32}
    ids, mask = padded_batch()
    exact = make_base(
        kind="nf4" if kind.startswith("nf4") else "float32", policy=policy_adapter(), reward=reward_adapter()
    )
    logprobs, entropy = base("policy", compact_rows(ids, mask, T))
    values, scores = base.values(ids, mask, T), base.scores(ids, mask)
    expected = *exact("policy", compact_rows(ids, mask, T)), exact.values(ids, mask, T), exact.scores(ids, mask)
    for given, right in zip((logprobs, entropy, values, scores), expected, strict=True):
        assert given.dtype == torch.float32
        assert 0 < (given - right).abs().mean() < 0.15
    assert torch.equal(base.logprobs("reference", ids, mask, T), logprobs)
    (logprobs.sum() + values.sum()).backward()
    for p in (p for group in base.trainable_parameters().values() for p in group):
        assert p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.any()
    assert base.generate(ids[:, :P], mask[:, :P], max_new_tokens=2, do_sample=True).shape == (4, P + 2)


def test_a_float32_base_computes_in_float32():
    base = full_base()
    seen = set()
    for layer in base.backbone.layers:
        layer.register_forward_hook(lambda _module, _given, output: seen.add(output.dtype))
    ids, mask = padded_batch()
    base.values(ids, mask, T)
    assert base.compute_dtype == torch.float32 and seen == {torch.float32}
    base.compute_dtype = torch.bfloat16
    computed = []
    layer = base.backbone.layers[0].mlp.up_proj.base_layer
    layer.register_forward_hook(lambda _module, _given, output: computed.append(output.dtype))
    base.values(ids, mask, T)
    assert computed == [torch.bfloat16]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_base_keeps_its_own_dtypes(kind):
    """Nothing is upcast, as prepare_model_for_kbit_training would do."""
    plain = plain_model(kind=kind, dtype=torch.bfloat16)
    before = {name: p.dtype for name, p in plain.named_parameters()}
    base = SharedBase(plain, peft_config=lora_config())
    after = {
        name.replace(".base_layer", ""): p.dtype for name, p in base.model.named_parameters() if "lora_" not in name
    }
    assert after == before


def test_a_base_whose_logits_are_not_finite_is_named():
    model = plain_model()
    model.get_output_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="LlamaForCausalLM gives logits that are not finite"):
        SharedBase(model)
