"""LoRA added in place is PEFT's LoRA: values, gradients, merging; and what PEFT must go on doing for it."""

from __future__ import annotations

import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear, Linear4bit
from torch import nn

from bases import KINDS, lora_config, plain_model
from builders import randomize
from ppo_lora import Role, SharedBase
from ppo_lora.lean_lora import LeanLora, make_lean


class Host(nn.Module):
    """A linear layer that PEFT can wrap."""

    def __init__(self, bias: bool = True):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(6, 5, bias=bias)

    def forward(self, x):
        return self.linear(x)


def wrapped(lean: bool, bias: bool = True, **changes):
    model = get_peft_model(
        Host(bias), LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["linear"], **changes})
    )
    randomize([p for name, p in model.named_parameters() if "lora_" in name], scale=0.5)
    if lean:
        make_lean([module for module in model.modules() if isinstance(module, Linear)], "default")
    return model.eval()


def layer_of(model) -> Linear:
    return model.base_model.model.linear


def pass_through(lean: bool, bias: bool, shape, wants_x: bool, mixed: bool) -> list[torch.Tensor]:
    """The output, and the gradients of adapter and input."""
    torch.manual_seed(1)
    model, x = wrapped(lean, bias), torch.randn(shape).requires_grad_(wants_x)
    assert ("default" in layer_of(model).lora_variant) == lean
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        y = model(x * 1.5)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for name, p in model.named_parameters() if "lora_" in name), *([x.grad] * wants_x)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)])
@pytest.mark.parametrize("wants_x", [True, False])
def test_values_and_gradients_are_pefts(bias, shape, wants_x):
    ours, theirs = (pass_through(lean, bias, shape, wants_x, mixed=False) for lean in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(300, 6), (20, 15, 6)])
def test_mixed_precision_is_as_near_to_the_truth_as_pefts(bias, shape):
    truth = pass_through(False, bias, shape, True, mixed=False)
    ours, theirs = (pass_through(lean, bias, shape, True, mixed=True) for lean in (True, False))
    for true, our, their in zip(truth, ours, theirs, strict=True):
        assert our.dtype == their.dtype
        assert (our - true).norm() <= 1.5 * (their - true).norm()


def test_gradients_are_the_numerical_ones():
    model = wrapped(True).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    down, up = (p for name, p in model.named_parameters() if "lora_" in name)
    assert torch.autograd.gradcheck(lambda *_: model(x * 2), (x, down, up))


def test_the_part_is_added_where_the_output_lies():
    model, seen = wrapped(True), []
    layer_of(model).base_layer.register_forward_hook(lambda _, __, output: seen.append(output.data_ptr()))
    assert model(torch.randn(2, 6)).data_ptr() == seen[0]


@pytest.mark.parametrize("safe", [True, False])
def test_merged_and_unmerged_weights_are_pefts(safe):
    merged = []
    for lean in (True, False):
        model = wrapped(lean)
        layer, before = layer_of(model), layer_of(model).base_layer.weight.clone()
        layer.merge(safe_merge=safe)
        merged.append(layer.base_layer.weight.clone())
        assert not torch.allclose(merged[-1], before)
        layer.unmerge()
        torch.testing.assert_close(layer.base_layer.weight, before)
    torch.testing.assert_close(*merged)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_bias": True}])
def test_other_kinds_stay_pefts(changes):
    model = wrapped(True, **changes)
    assert not isinstance(layer_of(model).lora_variant.get("default"), LeanLora)


def test_base_layers_of_their_own_kind_stay_pefts():
    class Viewed(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:]

    model = wrapped(False)
    layer_of(model).base_layer.__class__ = Viewed
    make_lean([layer_of(model)], "default")
    assert not layer_of(model).lora_variant


@pytest.mark.parametrize("kind", KINDS)
def test_every_role_of_a_base_is_lean(kind):
    base = SharedBase(plain_model(kind=kind), peft_config=lora_config(), value="separate")
    layers = [module for module in base.modules() if isinstance(module, Linear | Linear4bit)]
    assert layers and all(isinstance(layer.lora_variant["policy"], LeanLora) for layer in layers)
    assert all(isinstance(layer.lora_variant["value"], LeanLora) for layer in layers)
    assert Role.VALUE in base.roles


def test_peft_still_asks_variants():
    for layer in (Linear, Linear4bit):
        assert "self.lora_variant[active_adapter].forward(" in inspect.getsource(layer.forward)
        assert "self.lora_variant[active_adapter].merge_safe(" in inspect.getsource(layer.merge)
