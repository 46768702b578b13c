"""Demonstrations: prompts with good completions, whose mean score shifts all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .config import PPOConfig
from .data import PromptDataset
from .responses import Responses, read_responses
from .rollout import assemble

_NAME = "demonstration_dataset"


class Demonstrations:
    """A data set of prompts and completions.

    Args:
        dataset: TRL's prompt-completion format: columns ``prompt`` and ``completion``, both text or both messages.
        tokenizer: the policy's.
        config: the longest prompt and completion, in tokens.

    Raises:
        ValueError: it is empty, lacks a column, or a completion is something else than text or one assistant message.
        TypeError: it is not a ``datasets.Dataset``.
    """

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: PPOConfig):
        self._prompts = PromptDataset(dataset, tokenizer, config.max_prompt_length, "truncate", _NAME)
        if "completion" not in dataset.column_names:
            raise ValueError(
                f"{_NAME} has the columns {dataset.column_names}; expected 'prompt' and 'completion' (TRL's "
                "prompt-completion format)."
            )
        self._texts = [_text(completion) for completion in dataset.with_format(None)["completion"]]
        self._tokenizer, self._longest = tokenizer, config.max_completion_length

    def __len__(self) -> int:
        return len(self._texts)

    def responses(self, rows: Sequence[int], stop_token_ids: Sequence[int], device: torch.device) -> Responses:
        """The demonstrations of these rows as if they had been sampled, each ended by EOS and cut at the limit."""
        prompts = self._prompts.batch(rows)
        ids = [self._completion_ids(self._texts[row]) for row in rows]
        rollout = assemble(prompts, _right_padded(ids, self._prompts.pad_token_id).to(device), stop_token_ids)
        return read_responses(prompts, rollout, self._tokenizer)

    def _completion_ids(self, text: str) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return [*ids, int(self._tokenizer.eos_token_id)][: self._longest]


def demonstrations(dataset: Any, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> Demonstrations | None:
    """The demonstrations that ``score_normalization='dataset'`` needs; None where it is not used.

    Raises:
        ValueError: one of the two is given without the other.
    """
    wanted = config.score_normalization == "dataset"
    if wanted != (dataset is not None):
        raise ValueError(
            f"score_normalization is {config.score_normalization!r} and {_NAME} is "
            f"{'given' if dataset is not None else 'None'}; 'dataset' and a {_NAME} (prompts and completions whose "
            "mean score becomes 0) need each other."
        )
    return Demonstrations(dataset, tokenizer, config) if wanted else None


def _text(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and len(completion) == 1 and completion[0].get("role") == "assistant":
        content = completion[0].get("content")
        if isinstance(content, str):
            return content
    raise ValueError(f"{_NAME} has the completion {completion!r}; expected text, or one message of the assistant.")


def _right_padded(ids: Sequence[Sequence[int]], pad_token_id: int) -> Tensor:
    width = max(map(len, ids))
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in ids])
