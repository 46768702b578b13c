"""What stands in memory through a whole run: weights, adapters, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from .config import PPOConfig
from .live_bytes import LiveBytes
from .planned_base import PlannedBase, quantized_kind
from .roles import label
from .shared_base import SharedBase


def standing_bytes(live: LiveBytes, base: PlannedBase) -> dict[str, int]:
    """Bytes by part, counted."""
    heads = [head for head in (base.value_head, base.reward_head) if head is not None]
    adapters = {role: base.adapters.parameters(role) for role in base.roles}
    mine = {id(p) for parameters in adapters.values() for p in parameters}
    weights = [t for t in (*base.model.parameters(), *base.model.buffers()) if id(t) not in mine]
    parts = {
        "quantized weights": live.count(_scaled(base)),
        "unquantized weights": live.count(weights),
        **{f"{label(role)} adapter": live.count(parameters) for role, parameters in adapters.items()},
        "heads": live.count(p for head in heads for p in head.parameters()),
    }
    return {name: size for name, size in parts.items() if size}


def _scaled(base: PlannedBase) -> Iterator[Tensor]:
    """Quantized weights with the scales beside them."""
    for module in base.modules():
        if quantized_kind(module) == "Linear8bitLt":
            yield from (module.weight, module.state.SCB)  # type: ignore[misc, union-attr]
        elif quantized_kind(module) == "Linear4bit":
            yield module.weight  # type: ignore[misc]
            yield from _tensors(module.weight.quant_state)  # type: ignore[union-attr]


def _tensors(state: Any) -> Iterator[Tensor]:
    for value in vars(state).values():
        if isinstance(value, Tensor):
            yield value
        elif type(value) is type(state):
            yield from _tensors(value)


def trainable(base: SharedBase) -> list[Tensor]:
    """The parameters that are trained."""
    return [p for parameters in base.trainable_parameters().values() for p in parameters]


def tensor_size(tensor: Tensor) -> int:
    """Bytes of its numbers."""
    return tensor.numel() * tensor.element_size()


def optimizer_state(base: SharedBase, config: PPOConfig) -> int:
    """Bytes of the optimizer's state on a base."""
    return optimizer_bytes([p.numel() for p in trainable(base)], str(getattr(config.optim, "value", config.optim)))


def optimizer_bytes(sizes: Iterable[int], name: str) -> int:
    """Bytes of an optimizer's state after its first step.

    Args:
        sizes: numbers in each trained parameter.
        name: transformers' name for it. Those that are not known here count as AdamW.
    """
    if name.startswith(("sgd", "galore", "apollo")):
        return 0
    if "8bit" in name:
        moments = 1 if "lion" in name else 2
        return sum(_of_8bit(size) * moments for size in sizes)
    moments = 1 if name.startswith(("lion", "paged_lion", "rmsprop", "adagrad")) else 2
    return sum(4 * moments * size + 4 for size in sizes)


def _of_8bit(size: int) -> int:
    """One moment: bytes with a scale to each 256 numbers; bitsandbytes keeps those of small tensors in float32."""
    return 4 * size if size < 4096 else size + 4 * -(-size // 256)
