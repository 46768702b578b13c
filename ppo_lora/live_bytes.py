"""How many bytes of tensors are alive, counted as operations make storages and Python frees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Kernels = Mapping[str, Callable[..., Any]]
"""What runs in place of an operation, by its name as ``bitsandbytes::gemm_4bit``."""

Operate = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_DEVICE, _NUMBER = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default


def _operated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class LiveBytes(TorchDispatchMode):
    """While it is entered, every storage that an operation returns is counted until it is freed.

    Storages are counted once, whatever views there are of them. What an operation allocates and frees inside of a
    kernel is not seen, but for bitsandbytes' kernels, which are operations themselves.

    Args:
        kernels: what runs in place of an operation, unless it returns NotImplemented; what it calls is counted.
        scalar: what a tensor without data says where its number is asked for.
        operate: runs operations that nothing stands in for, given the operation, its arguments and its options.

    Attributes:
        now: bytes alive.
        peaks: bytes alive at the most, by phase.
    """

    def __init__(
        self, kernels: Kernels | None = None, scalar: float | bool | None = None, operate: Operate = _operated
    ):
        super().__init__()
        self.now = 0
        self.peaks: dict[str, int] = {}
        self._phase = ""
        self._seen: set[int] = set()
        self._kernels, self._scalar, self._operate = dict(kernels or {}), scalar, operate

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; to say so at each operation takes longer than to count it."""
        return False

    @property
    def peak(self) -> int:
        """Bytes alive at the most, in all phases."""
        return max(self.peaks.values(), default=self.now)

    def count(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that were there before.

        Args:
            tensors: may be views of each other, and may be counted already.

        Returns:
            Bytes that they add.
        """
        before = self.now
        for tensor in tensors:
            self._add(tensor)
        return self.now - before

    def enter_phase(self, name: str) -> None:
        """From now on peaks are those of this phase; one that is entered again goes on."""
        self._phase = name
        self._note_peak()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase inside the ``with``, and the one before after it."""
        before = self._phase
        self.enter_phase(name)
        try:
            yield
        finally:
            self.enter_phase(before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count what it returned."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for very often
        if self._scalar is not None and func is _NUMBER:
            return self._scalar
        result = self._run(func, args, kwargs or {})
        for value in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(value, Tensor):
                self._add(value)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = self._kernels.get(func.name().partition(".")[0])
        if kernel is not None:
            with self:
                result = kernel(*args, **kwargs)
            return self._operate(func, args, kwargs) if result is NotImplemented else result
        if func.namespace == "bitsandbytes" and _on_cpu(args):
            with self:  # its kernels are written with torch's operations
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        return self._operate(func, args, kwargs)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or not size:
            return
        self._seen.add(key)
        self.now += size
        self._note_peak()
        finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def _note_peak(self) -> None:
        self.peaks[self._phase] = max(self.now, self.peaks.get(self._phase, 0))


def _on_cpu(args: Iterable[Any]) -> bool:
    given = [value for value in args if isinstance(value, Tensor)]
    return all(value.device.type == "cpu" and not isinstance(value, FakeTensor) for value in given)
