"""LoRA layers that add their part to the base's output where it lies.

PEFT makes the part, a scaled copy of it and the sum, each as large as the layer's output, in forward and again in
backward. Here the second product scales and adds to the output in place. What is saved for backward is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora import Linear, Linear4bit

# PEFT calls the methods of its variants likely to change. This module is all that knows them.
# tests: test_peft_still_asks_variants tells when they move.
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

_PLAIN = (nn.Linear, Conv1D)


def make_lean(layers: Iterable[Any], adapter: str) -> None:
    """Let an adapter's plain LoRA layers add in place.

    Args:
        layers: PEFT's. Those of a variant such as DoRA stay as they are, and so do those whose base layer is not a
            plain or 4-bit one: the output of int8 layers is a view that autograd lets nobody change.
        adapter: its name in PEFT.
    """
    for layer in layers:
        of_base = type(layer) is Linear4bit or (type(layer) is Linear and type(layer.base_layer) in _PLAIN)
        if of_base and adapter in layer.lora_A and adapter not in layer.lora_variant:
            if layer.lora_A[adapter].bias is None and layer.lora_B[adapter].bias is None:
                layer.lora_variant[adapter] = LeanLora()


class LeanLora(LoraVariant):
    """What a LoRA layer computes, in PEFT's terms a variant of it."""

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """Add ``scaling * x A^T B^T`` to the base layer's ``result`` [..., O], in place; x is [..., I]."""
        down, up = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        x, scaling = module.lora_dropout[active_adapter](x), module.scaling[active_adapter]
        if not torch.is_grad_enabled():
            _add(result, x, down, up, scaling)
            return result
        added: Tensor = _AddLora.apply(result, x, down, up, scaling)
        return added

    @staticmethod
    def merge_safe(module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The weight with the adapter in it, a new one."""
        merged: Tensor = orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)
        return merged

    @staticmethod
    def merge_unsafe(module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> None:
        """Put the adapter into the weight."""
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The weight without the adapter, a new one."""
        weight: Tensor = orig_weight - module.get_delta_weight(active_adapter).to(orig_weight.dtype)
        return weight


def _add(result: Tensor, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Add in place; x as [N, I] and what lies between the products, [N, r], in the result's dtype."""
    flat, dtype = x.flatten(0, -2).to(result.dtype), result.dtype
    inner = torch.mm(flat, down.to(dtype).t()).to(dtype)  # autocast may have made it narrower
    result.flatten(0, -2).addmm_(inner, up.to(dtype).t(), alpha=scaling)
    return flat, inner


class _AddLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        flat, inner = _add(result, x, down, up, scaling)
        ctx.save_for_backward(flat, inner, down, up)
        ctx.scaling, ctx.shape, ctx.x_dtype = scaling, x.shape, x.dtype
        ctx.mark_dirty(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat, inner, down, up = ctx.saved_tensors
        outer = gradient.flatten(0, -2)
        _, wants_x, wants_down, wants_up, _ = ctx.needs_input_grad
        through = torch.mm(outer, up.to(outer.dtype)).mul_(ctx.scaling)
        x_gradient = torch.mm(through, down.to(outer.dtype)).view(ctx.shape).to(ctx.x_dtype) if wants_x else None
        down_gradient = torch.mm(through.t(), flat).to(down.dtype) if wants_down else None
        up_gradient = torch.mm(inner.t(), outer).mul_(ctx.scaling).t().to(up.dtype) if wants_up else None
        return gradient, x_gradient, down_gradient, up_gradient, None
