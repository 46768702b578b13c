"""What both measured processes do the same way: rates, memory, tokens through the layers, phases. Imports neither."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmark_work import PAD, Work

_MIB = 2**20
_SQUARE = 1024
_BLOCKS, _BLOCK_SECONDS = 3, 0.05
_COPY_BYTES = 256 * _MIB


def wait(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds(action: Callable[[], Any], device: str, at_least: float) -> float:
    """Seconds of one call, the mean of a block of calls: of the best block, over ``at_least`` seconds."""
    block = max(1, math.ceil(_BLOCK_SECONDS / (_block_seconds(action, device, 4) / 4)))
    best, blocks, start = float("inf"), 0, time.perf_counter()
    while blocks < _BLOCKS or time.perf_counter() - start < at_least:
        blocks += 1
        best = min(best, _block_seconds(action, device, block) / block)
    return best


def _block_seconds(action: Callable[[], Any], device: str, calls: int) -> float:
    wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        action()
    wait(device)
    return time.perf_counter() - begin


@torch.no_grad()
def machine_rates(work: Work, at_least: float = 0.5, square: int = _SQUARE) -> dict[str, float]:
    """What this process can do at best, on this machine, at this moment.

    Args:
        work: its shape, dtype and device.
        at_least: seconds of each measurement.
        square: side of the square product.

    Returns:
        ``used_shape`` and ``square``: operations a second of [tokens of a micro-batch, hidden] x [hidden,
        intermediate] and of the square product, in the dtype of the work; ``rate``, the better of both; ``bandwidth``:
        bytes read and written a second in copying 256 MiB.
    """
    options: dict[str, Any] = {"device": work.device, "dtype": getattr(torch, work.dtype)}
    tokens = work.micro_rows * (work.prompt_length + work.response_length)
    rates = {}
    for name, sizes in {
        "used_shape": (tokens, work.hidden, work.intermediate),
        "square": (square,) * 3,
    }.items():
        rows, inner, columns = sizes
        left, right = torch.randn(rows, inner, **options), torch.randn(inner, columns, **options)
        out = torch.empty(rows, columns, **options)
        seconds = _seconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), work.device, at_least)
        rates[name] = 2 * rows * inner * columns / seconds
    source = torch.ones(_COPY_BYTES // 4, device=work.device)
    target = torch.empty_like(source)
    copying = _seconds(lambda: target.copy_(source), work.device, at_least)
    return {**rates, "rate": max(rates.values()), "bandwidth": 2 * _COPY_BYTES / copying}


def better(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """The better of two measurements, number by number: the stricter one to be compared with."""
    return {name: max(first[name], second[name]) for name in first}


class PeakMemory:
    """The most memory since it was made, above what the process had then, in MiB.

    On the CPU the resident set: the kernel's high-water mark where it can be set back, else looked at every 5 ms. On a
    GPU what the allocator had given out.
    """

    def __init__(self, device: str, seconds: float = 0.005):
        self._device = device
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        self._process = psutil.Process()
        self.before = self._seen = self._process.memory_info().rss
        self._exact = _reset_high_water_mark()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(seconds,), daemon=True)
        if not self._exact:
            self._thread.start()

    def _watch(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            self._seen = max(self._seen, self._process.memory_info().rss)

    def read(self) -> float:
        """The peak so far."""
        if self._device == "cuda":
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = _high_water_mark() if self._exact else max(self._seen, self._process.memory_info().rss)
        return (peak - self.before) / _MIB


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int:
    """VmHWM of this process; unlike ru_maxrss, it does not remember the process that started this one."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("No VmHWM in /proc/self/status; expected Linux.")


class TokenCounter:
    """Tokens that go through a model's first layer, and how many of them are real, by phase.

    Computed are rows times columns of what enters the first layer; real are the ids at the embedding that are not PAD.
    Both libraries feed PAD (0) at padding and at finished rows, and no sampled or given token is PAD.

    Args:
        phase: says the phase, given the keyword arguments of the first layer.
    """

    def __init__(self, phase: Callable[[dict[str, Any]], str]):
        self._phase = phase
        self._real: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.computed: dict[str, int] = defaultdict(int)
        self._reals: dict[str, list[Tensor]] = defaultdict(list)

    def attach(self, backbone: nn.Module) -> None:
        """Count in this model too (a Llama's, without its head)."""
        backbone.get_input_embeddings().register_forward_pre_hook(self._embedding)
        backbone.layers[0].register_forward_pre_hook(self._layer, with_kwargs=True)

    def _embedding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._real = (args[0] != PAD).sum()

    def _layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._real is None:  # a recomputation: its forward was counted
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        phase = self._phase(kwargs)
        self.computed[phase] += hidden.shape[0] * hidden.shape[1]
        self._reals[phase].append(self._real)
        self._real = None

    def counts(self) -> dict[str, dict[str, int]]:
        """``computed`` and ``real`` tokens by phase."""
        real = {phase: int(torch.stack(counts).sum()) for phase, counts in self._reals.items()}
        return {phase: {"computed": count, "real": real[phase]} for phase, count in self.computed.items()}


class Phases:
    """Seconds of an iteration's phases, which follow one another without a gap.

    Args:
        device: waited for where a phase ends.
        now: the clock.
    """

    def __init__(self, device: str = "cpu", now: Callable[[], float] = time.perf_counter):
        self._device, self._now = device, now
        self.phase: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str | None) -> None:
        """End the phase of the moment, begin this one."""
        wait(self._device)
        now = self._now()
        if self.phase is not None:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def pop(self) -> dict[str, float]:
        """The seconds so far; the phase of the moment ends."""
        self.enter(None)
        seconds, self._seconds = self._seconds, {}
        return seconds


def lengths(prompt_mask: Tensor, response_mask: Tensor) -> dict[str, list[int]]:
    """Real tokens of each row, from masks [B, P] and [B, T]."""
    return {"prompts": prompt_mask.sum(dim=1).tolist(), "responses": response_mask.sum(dim=1).tolist()}


def write_result(path: str | Path, work: Work, result: dict[str, Any], packages: tuple[str, ...]) -> None:
    """Write what a process measured, with what it was measured on."""
    machine = {
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if work.device == "cuda" else _processor(),
    }
    versions = {name: _version(name) for name in packages}
    told = {"workload": work.name, "value": work.value, **result, "machine": machine, "versions": versions}
    Path(path).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on PYTHONPATH, or a folder that was carried here
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
