"""Random ragged batches, for tests and for hypothesis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

lawful = settings(
    deadline=None, max_examples=40, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
"""Settings of the property tests: the same examples every time, no limit on a single one's time."""

RUBBISH = (math.nan, math.inf, -math.inf, 1e30)
"""What padding may hold."""


@dataclass(frozen=True)
class Ragged:
    """A right-padded batch and random numbers for it."""

    mask: Tensor
    generator: torch.Generator

    def normal(self, scale: float = 1.0) -> Tensor:
        """[B, T] float32, standard normal times ``scale``."""
        return torch.randn(self.mask.shape, generator=self.generator) * scale

    def rows(self) -> Tensor:
        """[B] float32, standard normal."""
        return torch.randn(self.mask.shape[0], generator=self.generator)


def ragged(seed: int = 0, rows: int = 5, width: int = 7, shortest: int = 1) -> Ragged:
    """Rows of random lengths from ``shortest`` to ``width``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, width + 1, (rows, 1), generator=generator)
    return Ragged(torch.arange(width) < lengths, generator)


@st.composite
def ragged_batches(draw: st.DrawFn, shortest: int = 1) -> Ragged:
    width = draw(st.integers(1, 9))
    return ragged(draw(st.integers(0, 2**20)), draw(st.integers(1, 5)), width, min(shortest, width))


def spoiled(values: Tensor, mask: Tensor, rubbish: float) -> Tensor:
    """The same at real tokens, ``rubbish`` at padding."""
    return torch.where(mask, values, torch.full_like(values, rubbish))


def assert_close(actual: Tensor, expected, tolerance: float = 1e-5) -> None:
    """Hold a tensor against numbers (a tensor, or nested lists), within a relative and absolute tolerance."""
    wanted = torch.as_tensor(expected, dtype=torch.float64).detach()
    torch.testing.assert_close(actual.detach().double(), wanted, rtol=tolerance, atol=tolerance)
