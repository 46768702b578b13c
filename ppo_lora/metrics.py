"""Means that are kept on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class RunningMeans:
    """Weighted means of named scalars. Adding never waits for the device; reading does, once for all names."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Any], weight: Any = 1.0) -> None:
        """Add one observation of each of ``values`` with a common ``weight`` (a token count, say)."""
        for name, value in values.items():
            number = torch.as_tensor(value).detach().float()
            amount = torch.as_tensor(weight, device=number.device).detach().float()
            self._sums[name] = self._sums.get(name, 0.0) + number * amount
            self._weights[name] = self._weights.get(name, 0.0) + amount

    def pop(self, reduce: Callable[[Tensor], Tensor] = lambda totals: totals) -> dict[str, float]:
        """The means so far, and start anew.

        Args:
            reduce: sums a tensor over all processes.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        device = self._sums[names[0]].device
        pairs = [torch.stack([self._sums[n].to(device), self._weights[n].to(device)]) for n in names]
        totals = reduce(torch.stack(pairs)).tolist()
        self._sums.clear()
        self._weights.clear()
        return {name: total / weight for name, (total, weight) in zip(names, totals, strict=True)}
