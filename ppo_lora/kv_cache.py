"""Keys and values with room for the tokens to come, so that a step of decoding does not copy those that were there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 32
"""Tokens that a layer makes room for at a time."""


def give_room(cache: Any, most: int) -> None:
    """Let the layers of an empty cache make room ahead.

    Args:
        cache: of ``generate``. Only plain layers of a ``DynamicCache`` that stays on the device are changed; others,
            such as those of sliding windows, know best themselves.
        most: tokens of a row that will ever be in it.
    """
    if isinstance(cache, DynamicCache) and not cache.offloading:
        cache.layers[:] = [RoomyLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers]


def held(layer: Any) -> tuple[Tensor, Tensor]:
    """The tensors, [B, H, L, D] each, that a layer holds keys and values in; they may have room for more."""
    return getattr(layer, "stores", None) or (layer.keys, layer.values)


class RoomyLayer(DynamicLayer):
    """Says what ``DynamicLayer`` says, whose every step makes new tensors of all keys and values.

    Args:
        most: tokens of a row that will ever be in it; no room is made for more.

    Attributes:
        stores: what keys and values are the beginnings of; None where they have no room.
    """

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Before the first states come."""
        super().lazy_initialization(key_states, value_states)
        self.stores: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, N, D] keys and values.

        Returns:
            All of them, [B, H, L, D] each: views of what may hold more.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self.get_seq_length()
        total = seen + key_states.shape[-2]
        if self.stores is None or total > self.stores[0].shape[-2]:
            length = max(total, min(total + ROOM, self._most))
            room = _store(key_states, length), _store(value_states, length)
            if seen:
                room[0][:, :, :seen], room[1][:, :, :seen] = self.keys, self.values
            self.stores = room
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store[:, :, seen:total] = states
        self.keys: Tensor = self.stores[0][:, :, :total]
        self.values: Tensor = self.stores[1][:, :, :total]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, [b] int64."""
        super().batch_select_indices(indices)
        self.stores = None


def _store(states: Tensor, length: int) -> Tensor:
    rows, heads, _, size = states.shape
    return torch.empty(rows, heads, length, size, dtype=states.dtype, device=states.device)
