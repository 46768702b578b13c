"""The pretraining mix (ptx): language-model gradients of a second data set beside PPO's.

Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155), equation 2: the objective gains gamma * E[log pi(x)] over
pretraining data, here ``ptx_coef`` times the mean over tokens, so that lengths and batch sizes do not change its size.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from .config import PPOConfig
from .data import check_chat_template, iteration_rows, left_pad
from .draws import stream_seed
from .roles import Role
from .rows import compact_rows
from .shared_base import SharedBase

_SHUFFLES = 5  # a stream of random numbers; the others are 1 to 4
_FORMATS = ({"prompt", "completion"}, {"messages"}, {"text"})

Row = tuple[list[int], list[int]]
"""The tokens that are only read, one at least, and those that the loss is of."""


@dataclass(frozen=True)
class PretrainingBatch:
    """A piece of a step's rows.

    Attributes:
        input_ids: [b, P + T] int64; the last T columns are what the loss is of, padding aside.
        attention_mask: [b, P + T] bool on the CPU, True at real tokens.
        length: T.
        tokens: scalar, tokens that the step's loss is a mean of, over all processes.
        portion: scalar, the share of these that are in this piece.
    """

    input_ids: Tensor
    attention_mask: Tensor
    length: int
    tokens: Tensor
    portion: Tensor


class PretrainingMix:
    """Rows of a second data set, an endless chain of shuffles of them, and the policy's loss on them.

    Args:
        dataset: rows with ``text``, with ``messages``, or with ``prompt`` and ``completion`` (text or messages; the
            loss is then of the completion alone), as TRL's SFTTrainer takes them.
        tokenizer: its EOS token ends text and completions, as there.
        config: sizes and the seed.

    Raises:
        ValueError: it is empty, in none of these formats, or no row has a token to learn.
        TypeError: it is not a ``datasets.Dataset``.
    """

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: PPOConfig):
        columns = _columns(dataset, tokenizer)
        rows = [
            _row(row, tokenizer, config.ptx_max_length) for row in dataset.with_format(None).select_columns(columns)
        ]
        self._rows = [row for row in rows if row[0] and row[1]]
        if not self._rows:
            raise ValueError(
                f"No row of ptx_dataset has a token to learn within ptx_max_length={config.ptx_max_length} tokens. "
                "Raise ptx_max_length, or give longer texts."
            )
        if len(self._rows) < len(rows):
            warnings.warn(
                f"{len(rows) - len(self._rows)} of {len(rows)} rows in ptx_dataset have no token to learn within "
                f"ptx_max_length={config.ptx_max_length} tokens and were left out.",
                stacklevel=3,
            )
        self._pad, self._config = tokenizer.pad_token_id, config

    @classmethod
    def of(
        cls, dataset: Dataset | None, tokenizer: PreTrainedTokenizerBase, base: SharedBase, config: PPOConfig
    ) -> PretrainingMix | None:
        """The mix that a trainer was asked for, or None.

        Raises:
            ValueError: there is a coefficient without a data set or the other way round, or a row is too long for the
                base.
        """
        if (dataset is None) != (config.ptx_coef == 0):
            given, missing = ("ptx_coef", "ptx_dataset") if dataset is None else ("ptx_dataset", "ptx_coef")
            raise ValueError(
                f"{given} is given, but not {missing}. Give both for a pretraining mix, neither for none "
                f"(ptx_coef is {config.ptx_coef})."
            )
        if dataset is None:
            return None
        mix = cls(dataset, tokenizer, config)
        limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and mix.longest > limit:
            raise ValueError(
                f"The longest row of ptx_dataset has {mix.longest} tokens, the base {limit} positions. Lower "
                "ptx_max_length."
            )
        return mix

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(read) + len(learned) for read, learned in self._rows)

    def batches_of_step(self, step: int, accelerator: Any) -> list[PretrainingBatch]:
        """This process's rows of an optimizer step, in pieces of ``per_device_train_batch_size``.

        Args:
            step: 0-based; with the seed it alone says which rows they are.
            accelerator: the trainer's, which sums over processes.
        """
        rows, size = self._rows_of_step(step), self._config.per_device_train_batch_size
        own = torch.tensor(sum(len(learned) for _, learned in rows), device=accelerator.device)
        tokens = accelerator.reduce(own, reduction="sum")
        rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))  # so that little is padding
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [self._batch(piece, tokens) for piece in pieces]

    def loss(self, model: nn.Module, batch: PretrainingBatch) -> Tensor:
        """A piece's part of the step's loss, nats a token: the pieces of all processes add up to the mean."""
        logprobs, _ = model(Role.POLICY, compact_rows(batch.input_ids, batch.attention_mask, batch.length))
        return -logprobs.sum() / batch.tokens

    def _rows_of_step(self, step: int) -> list[Row]:
        config = self._config
        size = config.per_device_train_batch_size if config.ptx_batch_size is None else config.ptx_batch_size
        seed = stream_seed(config.seed, _SHUFFLES) % 2**32
        places = iteration_rows(step, size * config.world_size, len(self._rows), seed)
        return [self._rows[place] for place in places[config.process_index * size :][:size]]

    def _batch(self, rows: Sequence[Row], tokens: Tensor) -> PretrainingBatch:
        read, read_mask = left_pad([read for read, _ in rows], self._pad)
        learned, learned_mask = left_pad([learned[::-1] for _, learned in rows], self._pad)
        return PretrainingBatch(
            input_ids=torch.cat([read, learned.flip(1)], dim=1).to(tokens.device),
            attention_mask=torch.cat([read_mask, learned_mask.flip(1)], dim=1),
            length=learned.shape[1],
            tokens=tokens,
            portion=learned_mask.sum().to(tokens.device) / tokens,
        )


def _columns(dataset: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The columns of the data set's format, checked."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"ptx_dataset is a {type(dataset).__name__}; expected a datasets.Dataset (pick a split of a DatasetDict, "
            "read a stream into memory)."
        )
    if len(dataset) == 0:
        raise ValueError("ptx_dataset is empty; expected rows with text, messages, or prompt and completion.")
    columns = next((names for names in _FORMATS if names <= set(dataset.column_names)), None)
    if columns is None:
        raise ValueError(
            f"ptx_dataset has the columns {dataset.column_names}; expected 'text', 'messages', or 'prompt' and "
            "'completion' (TRL's formats for SFT). Rename yours: dataset.rename_column('...', 'text')."
        )
    if is_conversational({name: dataset[0][name] for name in columns}):
        check_chat_template(tokenizer, "ptx_dataset")
    return sorted(columns)


def _row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Row:
    """A row's tokens as TRL's SFTTrainer makes them, cut off at ``max_length``."""
    whole, start = _tokens(row, tokenizer)
    start = max(start, 1)  # nothing predicts the first token
    return whole[:start][:max_length], whole[start:max_length]


def _tokens(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """All tokens of a row, and how many of them are only read."""
    _check_row(row)
    if "messages" in row:
        return _chat(row["messages"], tokenizer), 0
    if "text" in row:
        return _text(row["text"], tokenizer), 0
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        read, whole = list(tokenizer(prompt)["input_ids"]), _text(prompt + completion, tokenizer)
    else:
        read, whole = _chat(prompt, tokenizer, add_generation_prompt=True), _chat([*prompt, *completion], tokenizer)
    same = (one == other for one, other in zip(read, whole, strict=False))
    return whole, next((place for place, equal in enumerate(same) if not equal), min(len(read), len(whole)))


def _check_row(row: Mapping[str, Any]) -> None:
    allowed = {list} if "messages" in row else {str} if "text" in row else {str, list}
    kinds = {_kind(part) for part in row.values()}
    if len(kinds) > 1 or not kinds <= allowed:
        raise ValueError(
            f"ptx_dataset has the row {dict(row)!r:.200}; expected text in 'text', chat messages in 'messages', and "
            "text in both of 'prompt' and 'completion', or messages in both. Leave out rows that are empty."
        )


def _kind(part: Any) -> type | None:
    """Text, messages, or something else."""
    if isinstance(part, str):
        return str
    return list if isinstance(part, list) and all(isinstance(message, Mapping) for message in part) else None


def _text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    end = "" if text.endswith(str(tokenizer.eos_token)) else str(tokenizer.eos_token)
    return list(tokenizer(text + end)["input_ids"])


def _chat(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(list(messages), return_dict=True, **options)["input_ids"])
