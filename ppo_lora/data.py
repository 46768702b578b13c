"""Prompts: from text or chat messages to left-padded tokens, and the order in which iterations take them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from .types import Prompts

_IDS = "ppo_lora_prompt_ids"


class PromptDataset:
    """A data set of prompts, tokenized once.

    Args:
        dataset: TRL's prompt-only format: a ``prompt`` column with text or with chat messages. Other columns go to
            the reward functions.
        tokenizer: with an EOS token; a chat template for messages.
        max_length: longest prompt in tokens, or None.
        overlong: ``"truncate"`` keeps the end of longer prompts, ``"drop"`` leaves them out.
        name: what to call it in messages.

    Attributes:
        overlong_count: prompts that were over ``max_length``.
        longest: tokens of the longest prompt that :meth:`batch` gives.

    Raises:
        ValueError: it is empty, has no ``prompt`` column, messages without a chat template, or nothing is left.
        TypeError: it is not a ``datasets.Dataset``, or prompts are neither text nor messages.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        overlong: str = "truncate",
        name: str = "train_dataset",
    ):
        _check_dataset(dataset, tokenizer, name)
        self.pad_token_id = tokenizer.pad_token_id
        tokenized = dataset.with_format(None).map(
            lambda row: {_IDS: tokenize_prompt(row, tokenizer)},
            desc=f"Tokenizing {name}",
            keep_in_memory=True,
        )
        lengths = [len(ids) for ids in tokenized[_IDS]]
        self.max_length = max_length
        fitting = [i for i, length in enumerate(lengths) if max_length is None or length <= max_length]
        self.overlong_count = len(lengths) - len(fitting)
        if self.overlong_count and overlong == "drop":
            tokenized = tokenized.select(fitting)
        self._rows = tokenized
        self._report(name, overlong, len(lengths))
        self.longest = min(max(map(len, tokenized[_IDS])), max_length or max(lengths))

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Sequence[int]) -> Prompts:
        """The prompts of the given rows, left-padded to the longest of them."""
        table = self._rows[list(rows)]
        ids = table.pop(_IDS)
        if self.max_length is not None:
            ids = [row[-self.max_length :] for row in ids]
        return Prompts(*left_pad(ids, self.pad_token_id), columns=table)

    def _report(self, name: str, overlong: str, total: int) -> None:
        if not self.overlong_count:
            return
        if len(self) == 0:
            raise ValueError(f"All {total} prompts of {name} are over max_prompt_length={self.max_length} tokens.")
        action = "dropped" if overlong == "drop" else "truncated on the left"
        warnings.warn(
            f"{self.overlong_count} of {total} prompts in {name} are over max_prompt_length={self.max_length} tokens "
            f"and were {action} (overlong_prompts={overlong!r}).",
            stacklevel=3,
        )


def left_pad(ids: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token lists as one left-padded batch.

    Args:
        ids: B lists of token ids.
        pad_token_id: fills the left.

    Returns:
        ``(input_ids, attention_mask)``: [B, P] int64 and [B, P] bool.
    """
    width = max(len(row) for row in ids)
    padded = [[pad_token_id] * (width - len(row)) + list(row) for row in ids]
    lengths = torch.tensor([len(row) for row in ids])
    return torch.tensor(padded), torch.arange(width) >= width - lengths[:, None]


def iteration_rows(iteration: int, rows: int, total: int, seed: int) -> list[int]:
    """Which of ``total`` prompts an iteration takes: the next ``rows`` of an endless chain of shuffles.

    It is a function of its arguments alone, so a resumed run takes the prompts that an unbroken one would; and each
    shuffle is used to its end, so no prompt is left out.

    Args:
        iteration: 0-based.
        rows: prompts an iteration.
        total: prompts in the data set.
        seed: of the shuffles.
    """
    places = range(iteration * rows, (iteration + 1) * rows)
    shuffles = {epoch: _shuffle(total, seed, epoch) for epoch in {place // total for place in places}}
    return [shuffles[place // total][place % total] for place in places]


def _shuffle(total: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(total, generator=generator).tolist()


def is_chat(dataset: Dataset) -> bool:
    """Whether the prompts are chat messages."""
    return bool(is_conversational({"prompt": dataset[0]["prompt"]}))


def check_rows(rows: int, columns: Sequence[str], name: str) -> None:
    """Refuse what has no rows or no ``prompt`` column.

    Raises:
        ValueError: it calls the data set ``name``.
    """
    if rows == 0:
        raise ValueError(f"{name} is empty; expected rows with a 'prompt' column.")
    if "prompt" not in columns:
        raise ValueError(
            f"{name} has the columns {list(columns)}; expected 'prompt', text or chat messages "
            "(TRL's prompt-only format). Rename yours: dataset.rename_column('...', 'prompt')."
        )


def check_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse prompts that are neither text nor messages, and messages without a chat template.

    Raises:
        ValueError, TypeError: it calls the data set ``name``.
    """
    if is_conversational({"prompt": prompt}):
        check_chat_template(tokenizer, name)
    elif not isinstance(prompt, str):
        kind = type(prompt).__name__
        raise TypeError(f"The prompts of {name} are of type {kind}; expected text or a list of chat messages.")


def check_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse messages where the tokenizer cannot write them out.

    Raises:
        ValueError: it calls the data set ``name``.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{name} has chat messages, but the tokenizer has no chat template. Use the tokenizer of a chat "
            "model, set tokenizer.chat_template, or give prompts as text."
        )


def _check_dataset(dataset: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}; expected a datasets.Dataset with a 'prompt' column "
            "(pick a split of a DatasetDict, as in dataset['train'])."
        )
    check_rows(len(dataset), dataset.column_names, name)
    check_prompt(dataset[0]["prompt"], tokenizer, name)


def tokenize_prompt(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a row's prompt, text or messages, as the policy is to go on from.

    Raises:
        ValueError: the prompt has no tokens.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        ids = _text_ids(prompt, tokenizer)
    else:
        ids = _chat_ids(row, tokenizer) if prompt else []
    if not ids:
        raise ValueError(f"The prompt {prompt!r} has no tokens; every prompt needs at least one (a BOS token, say).")
    return ids


def _text_ids(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = list(tokenizer(prompt)["input_ids"])
    ends_itself = prompt.endswith(str(tokenizer.eos_token))
    # Some tokenizers append EOS; a prompt that has ended cannot be continued.
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id and not ends_itself else ids


def _chat_ids(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Messages through the chat template, with TRL's columns ``tools`` and ``chat_template_kwargs`` where given."""
    messages = row["prompt"]
    unfinished = messages[-1]["role"] == "assistant"
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=row.get("tools"),
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        return_dict=True,
        **(row.get("chat_template_kwargs") or {}),
    )
    return list(encoded["input_ids"])
