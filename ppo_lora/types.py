"""Frozen records that flow between the stages of PPO.

Sizes: B rows (prompt and response pairs), P prompt positions (left-padded), T response positions (right-padded).
One mask convention everywhere: True is a real token, the stop token included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts, left-padded.

    Attributes:
        input_ids: [B, P] int64.
        attention_mask: [B, P] bool, True at real tokens.
        columns: the data set's columns (``prompt`` included), each a list of B values, for reward functions.
    """

    input_ids: Tensor
    attention_mask: Tensor
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def first(self, count: int) -> Prompts:
        """At most so many of them."""
        columns = {name: column[:count] for name, column in self.columns.items()}
        return Prompts(self.input_ids[:count], self.attention_mask[:count], columns)

    def repeat(self, times: int) -> Prompts:
        """Each prompt ``times`` times, the copies of one side by side."""
        return Prompts(
            input_ids=self.input_ids.repeat_interleave(times, dim=0),
            attention_mask=self.attention_mask.repeat_interleave(times, dim=0),
            columns={name: [value for value in column for _ in range(times)] for name, column in self.columns.items()},
        )


@dataclass(frozen=True)
class Rollout:
    """Prompts with the responses that the policy sampled.

    Attributes:
        sequences: [B, P + T] int64, prompt and response tokens.
        attention_mask: [B, P + T] bool, True at real tokens of both.
        response_mask: [B, T] bool, the response part of ``attention_mask``.
        stopped: [B] bool, True where the response ended with a stop token (False: cut at the length limit).
        sampling_logprobs: [B, T] float32, log-probabilities (nats) with which the tokens were sampled; None where
            nobody asked for them.
    """

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    stopped: Tensor
    sampling_logprobs: Tensor | None = None

    @property
    def response_length(self) -> int:
        """T, the padded length of the responses in tokens."""
        return self.response_mask.shape[1]

    @property
    def responses(self) -> Tensor:
        """[B, T] int64, the response part of ``sequences``."""
        return self.sequences[:, -self.response_length :]

    def completion_ids(self) -> list[list[int]]:
        """The real response tokens of each row, the stop token included."""
        rows = zip(self.responses.tolist(), self.response_mask.tolist(), strict=True)
        return [[token for token, real in zip(tokens, mask, strict=True) if real] for tokens, mask in rows]


@dataclass(frozen=True)
class Experience:
    """Everything that the updates need of one rollout batch. All of it is constant: nothing here has a gradient.

    Attributes:
        sequences: [B, P + T] int64.
        attention_mask: [B, P + T] bool.
        response_mask: [B, T] bool, True at what is learned from: the response part of ``attention_mask``, but for rows
            that nobody scored.
        logprobs: [B, T] float32, log-probabilities (nats) of the sampled tokens under the policy that sampled them.
        ref_logprobs: [B, T] float32, the same under the reference.
        values: [B, T] float32, V(s_t), the value before token t.
        rewards: [B, T] float32, per-token rewards, the KL penalty in them.
        advantages: [B, T] float32.
        returns: [B, T] float32, what the values are fitted to.
        scores: [B] float32, the score of the whole response, rewards of its tokens and steps included; NaN for none.
        kl_weights: [B] float32, weight of the KL in the loss, in units of the advantages; 0 where it is in the reward.
    """

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    scores: Tensor
    kl_weights: Tensor

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @property
    def response_length(self) -> int:
        """T, the padded length of the responses in tokens."""
        return self.response_mask.shape[1]

    @cached_property
    def host_mask(self) -> Tensor:
        """``attention_mask`` on the CPU. It is fetched once; what :meth:`select` gives has its own without waiting."""
        return self.attention_mask.cpu()

    @property
    def lengths(self) -> Tensor:
        """[B] int64 on the CPU, real tokens of each row, prompt and response."""
        return self.host_mask.sum(dim=1)

    def select(self, rows: Tensor | Sequence[int]) -> Experience:
        """The given rows as an Experience of their own, without the columns that are padding in all of them.

        Args:
            rows: indices into the batch, [N] int64 on the CPU or a sequence of ints.
        """
        index = torch.as_tensor(rows, dtype=torch.long)
        mask, width = self.host_mask[index], self.response_length
        prompt, response = mask[:, : mask.shape[1] - width].any(dim=0), mask[:, mask.shape[1] - width :].any(dim=0)
        first = int(prompt.int().argmax()) if bool(prompt.any()) else len(prompt)
        length = int(response.nonzero().max()) + 1 if bool(response.any()) else 1
        index = index.to(self.sequences.device, non_blocking=True)
        kept = {"sequences": slice(first, len(prompt) + length), "scores": None, "kl_weights": None}
        kept["attention_mask"] = kept["sequences"]
        chosen = {}
        for item in fields(self):
            tensor, columns = getattr(self, item.name)[index], kept.get(item.name, slice(length))
            chosen[item.name] = tensor if columns is None else tensor[:, columns]
        selected = Experience(**chosen)
        vars(selected)["host_mask"] = mask[:, kept["sequences"]]
        return selected

    def split(self, size: int) -> list[Experience]:
        """Pieces of ``size`` consecutive rows (the last may be smaller), each trimmed as in :meth:`select`."""
        return [self.select(range(start, min(start + size, len(self)))) for start in range(0, len(self), size)]
