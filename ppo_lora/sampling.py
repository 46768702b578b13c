"""The decode loop: a token a step for every row that is not finished, drawn with random numbers of the row's own.

``generate`` prepares the cache and calls this in place of its own loop, which would carry finished rows to the end,
draw from numbers that depend on the batch, and keep the logits of more than the last position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .draws import inverse_transform
from .kv_cache import give_room
from .masking import position_ids

_LEAVE = 8
"""Finished rows leave once they are one in so many: moving the others' cache costs about a step."""


class DecodeLoop:
    """What ``generate`` calls as ``custom_generate``; see :meth:`__call__`.

    Args:
        backbone: the model without its head.
        head: from hidden states [B, H] to logits [B, V].
        attention_mask: [B, P] bool or 0/1, True at the prompts' real tokens.
        draws: [B, T] float64, uniform random numbers; T is the most tokens of a response.
        temperature: divides the logits.
        stop_token_ids: ids that end a response.
        pad_token_id: stands after the end.
        takes_positions: whether the backbone has ``position_ids``.

    Attributes:
        logprobs: [B, T] float32 after the call, of the tokens as they were drawn, in nats; 0 after the end.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        head: Callable[[Tensor], Tensor],
        attention_mask: Tensor,
        draws: Tensor,
        temperature: float,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        takes_positions: bool,
    ):
        self._backbone, self._head, self._draws = backbone, head, draws
        self._temperature, self._takes_positions = temperature, takes_positions
        self._attention_mask = attention_mask.long()  # generate leaves it out where it is all ones
        self._stops = torch.tensor(list(stop_token_ids), dtype=torch.long, device=draws.device)
        self._responses = torch.full(draws.shape, pad_token_id, dtype=torch.long, device=draws.device)
        self.logprobs = torch.zeros(draws.shape, dtype=torch.float32, device=draws.device)

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Tensor:
        """Sample the responses.

        Args:
            model: not used, the backbone is its part.
            input_ids: [B, P] int64, left-padded.
            prepared: what ``generate`` prepares for its own loop; an empty cache, ``past_key_values``, is used.

        Returns:
            [B, T'] int64, T' the longest response; ``pad_token_id`` after each end.

        Raises:
            FloatingPointError: the logits are not finite.
            ValueError: the model's cache is of a kind of its own.
        """
        attention_mask, cache = self._attention_mask, prepared.get("past_key_values")
        if cache is None and "past_key_values" in signature(self._backbone.forward).parameters:
            cache = DynamicCache(config=model.config.get_text_config())  # older versions leave it to the model
        if cache is None:
            raise ValueError(
                f"{type(model).__name__} does not keep keys and values as transformers' caches do; ppo_lora cannot "
                "sample from it."
            )
        give_room(cache)
        steps, width = self._draws.shape[1], input_ids.shape[1]
        mask = torch.nn.functional.pad(attention_mask, (0, steps), value=1)
        padded = not bool(attention_mask.all())
        rows = torch.arange(len(input_ids), device=input_ids.device)
        running = torch.ones_like(rows, dtype=torch.bool)
        tokens, positions = input_ids, position_ids(attention_mask)
        for step in range(steps):
            seen = mask[:, : width + step] if padded else None
            drawn = self.next_tokens(tokens, seen, positions, cache, rows, running, step)
            running = running & ~torch.isin(drawn, self._stops)
            left, broken = torch.stack([running.sum(), self.logprobs[rows, step].isnan().sum()]).tolist()
            if broken:
                raise FloatingPointError("logits that are not finite")
            if not left:
                return self._responses[:, : step + 1]
            tokens, positions = drawn[:, None], positions[:, -1:] + 1
            if (len(rows) - left) * _LEAVE >= len(rows) and isinstance(cache, DynamicCache):
                kept = running.nonzero().squeeze(1)
                cache.batch_select_indices(kept)
                rows, running, mask, tokens, positions = (
                    each[kept] for each in (rows, running, mask, tokens, positions)
                )
        return self._responses

    def next_tokens(
        self,
        tokens: Tensor,
        seen: Tensor | None,
        positions: Tensor,
        cache: Any,
        rows: Tensor,
        running: Tensor,
        step: int,
    ) -> Tensor:
        """Draw [b] tokens, and note those of the rows that are still running."""
        places = {"position_ids": positions} if self._takes_positions else {}
        output = self._backbone(tokens, attention_mask=seen, past_key_values=cache, use_cache=True, **places)
        logits = self._head(output.last_hidden_state[:, -1]).float()
        probabilities = torch.softmax(logits.div_(self._temperature), dim=-1)
        drawn = inverse_transform(probabilities, self._draws[rows, step])
        chosen = probabilities.gather(1, drawn[:, None]).squeeze(1).log()
        self._responses[rows, step] = torch.where(running, drawn, self._responses[rows, step])
        self.logprobs[rows, step] = torch.where(running, chosen, self.logprobs[rows, step])
        return drawn
