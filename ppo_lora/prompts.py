"""Where prompts come from: a data set in memory or a stream, and which of them an iteration takes."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from .config import PPOConfig
from .data import PromptDataset, check_prompt, check_rows, iteration_rows, left_pad, tokenize_prompt
from .types import Prompts


class PromptStream:
    """Prompts of a ``datasets.IterableDataset`` in its own order, tokenized as they come, again and again.

    A stream that was shuffled (``dataset.shuffle``) is shuffled anew for each pass over it.

    Args:
        dataset: TRL's prompt-only format, as for :class:`PromptDataset`.
        tokenizer: with an EOS token; a chat template for messages.
        max_length: longest prompt in tokens.
        overlong: ``"truncate"`` keeps the end of longer prompts, ``"drop"`` leaves them out.
        name: what to call it in messages.

    Attributes:
        overlong_count: prompts so far that were over ``max_length``.
        longest: the most tokens that a prompt can have.

    Raises:
        ValueError: it is empty, has no ``prompt`` column or messages without a chat template, or there is no
            ``max_length``.
        TypeError: prompts are neither text nor messages.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        overlong: str = "truncate",
        name: str = "train_dataset",
    ):
        if max_length is None:
            raise ValueError(
                f"max_prompt_length is None, but {name} is a stream, whose longest prompt is not known beforehand. "
                "Set max_prompt_length."
            )
        self._dataset, self._tokenizer, self._name = dataset.with_format(None), tokenizer, name
        first = next(iter(self._dataset), None)
        check_rows(0 if first is None else 1, list(first or {}), name)
        assert first is not None
        check_prompt(first["prompt"], tokenizer, name)
        self._drops = overlong == "drop"
        self.longest = self._max_length = max_length
        self.overlong_count = 0
        self._columns = list(first)
        self._place = 0
        self._chain = self._endless()

    def span(self, start: int, count: int, part: slice = slice(None)) -> Prompts:
        """Some of the ``count`` prompts after the first ``start`` ones of the endless stream.

        Args:
            start: prompts before; going back, as a resumed run may, reads the stream from its beginning.
            count: how many are taken from the stream.
            part: which of these are wanted.
        """
        if start < self._place:
            self._chain, self._place, self.overlong_count = self._endless(), 0, 0
        rows = list(itertools.islice(self._chain, start - self._place, start - self._place + count))[part]
        self._place = start + count
        ids = [self._ids(row) if own is None else own for row, own in rows]
        columns = {name: [row.get(name) for row, _ in rows] for name in self._columns}
        return Prompts(*left_pad(ids, self._tokenizer.pad_token_id), columns=columns)

    def _endless(self) -> Iterator[tuple[Mapping[str, Any], list[int] | None]]:
        """Rows with their tokens, where those had to be counted to know whether the row stays."""
        for epoch in itertools.count():
            self._dataset.set_epoch(epoch)
            seen = kept = 0
            for row in self._dataset:
                seen += 1
                ids = self._ids(row) if self._drops else None
                if ids == []:
                    continue
                kept += 1
                yield row, ids
            if not kept:
                check_rows(seen, self._columns, self._name)
                raise ValueError(
                    f"All {seen} prompts of {self._name} are over max_prompt_length={self._max_length} tokens."
                )

    def _ids(self, row: Mapping[str, Any]) -> list[int]:
        """A row's tokens, none where it is left out."""
        ids = tokenize_prompt(row, self._tokenizer)
        if len(ids) <= self._max_length:
            return ids
        self.overlong_count += 1
        if self.overlong_count == 1:
            action = "dropped" if self._drops else "truncated on the left"
            warnings.warn(
                f"{self._name} has prompts over max_prompt_length={self._max_length} tokens; they are {action}.",
                stacklevel=2,
            )
        return [] if self._drops else ids[-self._max_length :]


PromptSource: TypeAlias = PromptDataset | PromptStream


def training_prompts(dataset: Any, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> PromptSource:
    """The prompts to train on.

    Raises:
        ValueError, TypeError: there are none, too few for an iteration, or a stream without a number of steps.
    """
    options = (tokenizer, config.max_prompt_length, config.overlong_prompts, "train_dataset")
    if not isinstance(dataset, IterableDataset):
        prompts = _prompt_dataset(dataset, *options)
        check_enough_prompts(len(prompts), config)
        _check_warmup(prompts, config)
        return prompts
    if config.max_steps <= 0:
        raise ValueError(
            "train_dataset is a stream, which has no length, so num_train_epochs cannot say how long to train. Set "
            "total_episodes or max_steps."
        )
    return PromptStream(dataset, *options)


def evaluation_prompts(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, config: PPOConfig
) -> dict[str, PromptDataset]:
    """The sets of prompts to evaluate on, by name; one without a name is called "". Streams are read to their end."""
    named = dataset if isinstance(dataset, dict) else {"": dataset}
    return {
        name: _prompt_dataset(_read(part, title), tokenizer, config.max_prompt_length, config.overlong_prompts, title)
        for name, part in named.items()
        if part is not None and (title := f"eval_dataset {name}".strip())
    }


def _read(dataset: Any, name: str) -> Any:
    if not isinstance(dataset, IterableDataset):
        return dataset
    rows = list(dataset.with_format(None))
    check_rows(len(rows), list(rows[0]) if rows else [], name)
    return Dataset.from_list(rows)


def _prompt_dataset(dataset: Any, tokenizer: Any, max_length: int | None, overlong: str, name: str) -> PromptDataset:
    if dataset is None:
        raise ValueError(f"{name} is None; expected a datasets.Dataset with a 'prompt' column.")
    return PromptDataset(dataset, tokenizer, max_length, overlong, name)


def iteration_prompts(source: PromptSource, iteration: int, config: PPOConfig) -> Prompts:
    """This process's rows of an iteration: its prompts, each as often as it is answered, its copies side by side."""
    count = config.prompts_per_iteration
    local = count // config.world_size
    part = slice(config.process_index * local, (config.process_index + 1) * local)
    if isinstance(source, PromptStream):
        prompts = source.span(iteration * count, count, part)
    else:
        prompts = source.batch(iteration_rows(iteration, count, len(source), config.seed)[part])
    return prompts.repeat(config.num_generations)


def iterations_of_epoch(source: PromptSource, config: PPOConfig) -> int:
    """Iterations that use every prompt of a data set; of a stream, all that there are."""
    if isinstance(source, PromptStream):
        return config.max_steps // config.steps_per_iteration
    return -(-len(source) // config.prompts_per_iteration)


def _check_warmup(source: PromptSource, config: PPOConfig) -> None:
    """As :func:`~ppo_lora.validation.check_steps`, where epochs say how long to train."""
    iterations = math.ceil(config.num_train_epochs * iterations_of_epoch(source, config))
    if config.max_steps <= 0 and 0 < iterations <= config.value_warmup_iterations:
        raise ValueError(
            f"value_warmup_iterations is {config.value_warmup_iterations}, but num_train_epochs="
            f"{config.num_train_epochs:g} are {iterations} iterations: the policy would never be trained. Lower it, "
            "or train for longer."
        )


def check_enough_prompts(prompts: int, config: PPOConfig) -> None:
    """Refuse data sets with fewer prompts than an iteration takes.

    Raises:
        ValueError: with all the numbers.
    """
    if prompts < config.prompts_per_iteration:
        samples = f" / num_generations {config.num_generations}" if config.num_generations > 1 else ""
        raise ValueError(
            f"train_dataset has {prompts} prompts, one iteration takes {config.prompts_per_iteration} "
            f"(per_device_train_batch_size {config.per_device_train_batch_size} * gradient_accumulation_steps "
            f"{config.gradient_accumulation_steps} * num_mini_batches {config.num_mini_batches} * "
            f"{config.world_size} processes{samples}). Lower one of them, or give more prompts."
        )
