"""Attention among packed rows: rows that stand one behind the other are told apart by their lengths.

transformers tells packed rows apart by their positions, with a mask of all pairs of tokens where attention is torch's
own (``sdpa``). Here each row is given to that attention by itself: no mask, no pairs of different rows, no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils import logging

ROWS = "ppo_lora_rows"
"""The name of this attention among transformers' implementations."""

_SDPA = "sdpa"
_sdpa = AttentionInterface()[_SDPA]


def tell_rows_apart(model: PreTrainedModel) -> bool:
    """Let the model's attention know packed rows, where it is torch's own.

    Returns:
        Whether it does, or is flash attention, which knows varying lengths.
    """
    if _implementation(model) == _SDPA:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # an architecture whose attention cannot be set says so, and is not packed
        model.set_attn_implementation(ROWS)
        logging.set_verbosity(verbosity)
    return _implementation(model) == ROWS or _implementation(model).startswith("flash_attention")


def packed_arguments(model: PreTrainedModel, lengths: Sequence[int], positions: Tensor) -> dict[str, Any]:
    """What tells the model which rows there are.

    Args:
        model: the base.
        lengths: of the rows.
        positions: [1, N] int64, in each row.
    """
    arguments: dict[str, Any] = {"position_ids": positions}
    if _implementation(model) == ROWS:
        # A mask of four dimensions goes to attention as it is; without any, one of all pairs of tokens would be made.
        made = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=positions.device)
        arguments |= {"attention_mask": made, "row_lengths": tuple(lengths)}
    return arguments


def _implementation(model: PreTrainedModel) -> str:
    # transformers has a public way to set it but none to ask for it.
    # tests: test_the_attention_of_a_base_is_taken_over tells when it moves.
    return str(model.config.get_text_config()._attn_implementation)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_lengths: Sequence[int] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """torch's attention, [B, heads, N, D] to [B, N, heads, D]; of packed rows, B = 1, for each row by itself."""
    if row_lengths is None:
        whole: tuple[Tensor, None] = _sdpa(module, query, key, value, attention_mask, **options)
        return whole
    rows = zip(*(states.split(list(row_lengths), dim=2) for states in (query, key, value)), strict=True)
    window = options.get("sliding_window")
    pieces = [_sdpa(module, q, k, v, _window_mask(q, window), **options)[0] for q, k, v in rows]
    return torch.cat(pieces, dim=1), None


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """[1, 1, N, N], who sees whom where not everyone sees all that was before; None where everyone does."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=query.device)
    distance = places[:, None] - places
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(ROWS, _attend)
AttentionMaskInterface.register(ROWS, AttentionMaskInterface()[_SDPA])
