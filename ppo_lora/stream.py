"""The stream of experience that PPOTrainer's dataloader yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from .config import PPOConfig
from .draws import stream_seed
from .rows import batches_by_length
from .types import Experience

_SHUFFLES = 2


class ExperienceStream(IterableDataset):
    """Micro-batches of ever new experience: collect, then shuffle and split it for each PPO epoch.

    Args:
        collect: makes the experience of an iteration.
        first_iteration: tells which iteration comes next when the stream is opened. Those of the same pass before it
            were done before a resumption, and are only counted.
        iterations: how many a pass over the stream makes.
        config: the sizes.
        seed: of the shuffles.
        packed: whether micro-batches in tokens have no padding.
    """

    def __init__(
        self,
        collect: Callable[[int], Experience],
        first_iteration: Callable[[], int],
        iterations: int,
        config: PPOConfig,
        seed: int,
        packed: bool = False,
    ):
        self._collect, self._first_iteration, self._iterations = collect, first_iteration, iterations
        self._config, self._seed, self._packed = config, seed, packed

    def __len__(self) -> int:
        per_step = self._config.gradient_accumulation_steps
        return self._iterations * self._config.steps_per_iteration * per_step

    def __iter__(self) -> Iterator[list[Experience] | None]:
        first = self._first_iteration()
        start = first - first % self._iterations
        for iteration in range(start, start + self._iterations):
            if iteration < first:
                yield from [None] * (len(self) // self._iterations)  # Trainer skips these when it resumes
                continue
            experience = self._collect(iteration)
            for epoch in range(self._config.num_ppo_epochs):
                seed = stream_seed(self._seed, _SHUFFLES, iteration, epoch)
                order = torch.randperm(len(experience), generator=torch.Generator().manual_seed(seed))
                yield from micro_batches(experience, order, self._config, self._packed)


def micro_batches(
    experience: Experience, order: Tensor, config: PPOConfig, packed: bool = False
) -> Iterator[list[Experience]]:
    """One epoch: mini-batches in the given order, the rows of each put together by length so that little is padding.

    Trainer counts micro-batches of a fixed number of rows. Where their size is given in tokens, each of Trainer's
    holds some of the pieces, and the last at least one.
    """
    slots = config.gradient_accumulation_steps
    for rows in order.split(config.mini_batch_size):
        lengths = experience.lengths[rows]
        if config.max_tokens_per_micro_batch is None:
            pieces = list(rows[lengths.argsort(stable=True)].split(config.per_device_train_batch_size))
        else:
            batches = batches_by_length(lengths, len(rows), config.max_tokens_per_micro_batch, packed)
            pieces = [rows[batch] for batch in batches]
        starts = [len(pieces) * slot // slots for slot in range(slots + 1)]
        for start, stop in pairwise(starts):
            yield [experience.select(piece) for piece in pieces[start:stop]]
