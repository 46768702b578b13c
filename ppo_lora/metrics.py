"""What a run measures: means that stay on the device until somebody reads them, and where time and memory go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from .masking import Reduce
from .splitting import RowLimit

Gather = Callable[[list[str]], list[str]]
"""Puts the lists of all processes together."""


def _of_one_process(whole: Any) -> Any:
    return whole


class RunningMeans:
    """Weighted means of named scalars. Adding never waits for the device; reading does, once for all names."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Any], weight: Any = 1.0) -> None:
        """Add one observation of each of ``values`` with a common ``weight`` (a token count, say).

        NaN says that there was nothing to observe, and counts as no observation.
        """
        for name, value in values.items():
            number = torch.as_tensor(value).detach().float()
            amount = torch.as_tensor(weight, device=number.device).detach().float()
            amount = torch.where(number.isnan(), torch.zeros_like(amount), amount)
            self._sums[name] = self._sums.get(name, 0.0) + number.nan_to_num(nan=0.0) * amount
            self._weights[name] = self._weights.get(name, 0.0) + amount

    def pop(self, reduce: Reduce = _of_one_process, gather: Gather = _of_one_process) -> dict[str, float]:
        """The means so far, and start anew. What was never observed is left out.

        Args:
            reduce: sums a tensor over all processes.
            gather: puts the lists of names of all processes together, since one may have seen what another has not.
        """
        totals = self._totals(reduce, gather)
        self._sums, self._weights = {}, {}
        return {name: total / weight for name, (total, weight) in totals.items() if weight}

    def spread(self, reduce: Reduce, gather: Gather, processes: int) -> None:
        """Give each of the processes an equal share of what all have seen: the state of one is then that of each.

        Args:
            reduce, gather: as for :meth:`pop`.
            processes: how many there are.
        """
        shares = {name: [part / processes for part in pair] for name, pair in self._totals(reduce, gather).items()}
        self.load_state_dict(shares)

    def state_dict(self) -> dict[str, list[float]]:
        """The sum and the weight of each name, as JSON values."""
        return {name: [total.item(), self._weights[name].item()] for name, total in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from there; a float32 is read back to the last bit."""
        self._sums = {name: torch.tensor(total) for name, (total, _) in state.items()}
        self._weights = {name: torch.tensor(weight) for name, (_, weight) in state.items()}

    def _totals(self, reduce: Reduce, gather: Gather) -> dict[str, list[float]]:
        """Each name's sum and weight over all processes."""
        names = sorted(set(gather(list(self._sums))))
        if not names:
            return {}
        device = next((total.device for total in self._sums.values()), torch.device("cpu"))
        nothing = torch.zeros((), device=device)
        pairs = [
            torch.stack([part.get(name, nothing).to(device) for part in (self._sums, self._weights)]) for name in names
        ]
        return dict(zip(names, reduce(torch.stack(pairs)).tolist(), strict=True))


class PhaseClock:
    """Seconds spent in the phases of an iteration, which follow one another.

    Args:
        wait: waits for the device, so that a phase ends when its work does.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self._phase: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """End the phase of the moment and begin this one."""
        self._wait()
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def stop(self) -> dict[str, float]:
        """End the phase of the moment; the seconds of each phase since the last stop."""
        if self._phase is not None:
            self.enter(self._phase)
        self._phase = None
        seconds, self._seconds = self._seconds, {}
        return seconds


def memory_metrics(limits: Iterable[RowLimit]) -> dict[str, float]:
    """Resident memory of this process and, on a GPU, the peak that was allocated, in GiB; where it was too little, the
    rows at a time that fit.

    Args:
        limits: of the phases.
    """
    memory = {"memory/rss_gib": psutil.Process().memory_info().rss / 2**30}
    if torch.cuda.is_available():
        memory["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for limit in limits:
        if limit.rows is not None:
            memory[f"memory/{limit.phase}_rows"] = float(limit.rows)
    return memory
