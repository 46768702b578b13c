"""Keys and values with room for the tokens to come, so that a step of decoding does not copy those that were there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_ROOM = 32
"""Tokens that a layer makes room for at a time."""


def give_room(cache: Any) -> None:
    """Let the layers of an empty cache make room ahead.

    Args:
        cache: of ``generate``. Only plain layers of a ``DynamicCache`` that stays on the device are changed; others,
            such as those of sliding windows, know best themselves.
    """
    if isinstance(cache, DynamicCache) and not cache.offloading:
        cache.layers[:] = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]


class RoomyLayer(DynamicLayer):
    """Says what ``DynamicLayer`` says, whose every step makes new tensors of all keys and values."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Before the first states come."""
        super().lazy_initialization(key_states, value_states)
        self._stores: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, N, D] keys and values.

        Returns:
            All of them, [B, H, L, D] each: views of what may hold more.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen, new = self.get_seq_length(), (key_states, value_states)
        total = seen + key_states.shape[-2]
        if self._stores is None or total > self._stores[0].shape[-2]:
            self._stores = [_store(states, total + _ROOM) for states in new]
            if seen:
                self._stores[0][:, :, :seen], self._stores[1][:, :, :seen] = self.keys, self.values
        for store, states in zip(self._stores, new, strict=True):
            store[:, :, seen:total] = states
        self.keys: Tensor = self._stores[0][:, :, :total]
        self.values: Tensor = self._stores[1][:, :, :total]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, [b] int64."""
        super().batch_select_indices(indices)
        self._stores = None


def _store(states: Tensor, length: int) -> Tensor:
    rows, heads, _, size = states.shape
    return torch.empty(rows, heads, length, size, dtype=states.dtype, device=states.device)
