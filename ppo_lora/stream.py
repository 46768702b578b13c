"""The stream of experience that PPOTrainer's dataloader yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from .config import PPOConfig
from .rollout import seeded
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
    """

    def __init__(
        self,
        collect: Callable[[int], Experience],
        first_iteration: Callable[[], int],
        iterations: int,
        config: PPOConfig,
        seed: int,
    ):
        self._collect, self._first_iteration, self._iterations = collect, first_iteration, iterations
        self._config, self._seed = config, seed

    def __len__(self) -> int:
        per_step = self._config.gradient_accumulation_steps
        return self._iterations * self._config.steps_per_iteration * per_step

    def __iter__(self) -> Iterator[Experience | None]:
        first = self._first_iteration()
        start = first - first % self._iterations
        for iteration in range(start, start + self._iterations):
            if iteration < first:
                yield from [None] * (len(self) // self._iterations)  # Trainer skips these when it resumes
                continue
            experience = self._collect(iteration)
            for epoch in range(self._config.num_ppo_epochs):
                with seeded(self._seed, _SHUFFLES, iteration, epoch):
                    order = torch.randperm(len(experience))
                yield from micro_batches(experience, order, self._config)


def micro_batches(experience: Experience, order: Tensor, config: PPOConfig) -> Iterator[Experience]:
    """One epoch: mini-batches in the given order, the rows of each sorted by length so that little is padding."""
    lengths = experience.attention_mask.sum(dim=1).cpu()
    for rows in order.split(config.mini_batch_size):
        by_length = rows[lengths[rows].argsort(stable=True)]
        for micro in by_length.split(config.per_device_train_batch_size):
            yield experience.select(micro)
