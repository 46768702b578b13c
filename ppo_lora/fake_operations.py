"""What operations on fake tensors return, remembered: to work it out each time takes torch most of a plan's time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._pytree import tree_iter

_NOT_REMEMBERED = object()


@dataclass(frozen=True)
class _Output:
    """A tensor that an operation returned.

    Attributes:
        given: which argument it is itself, of an operation in place; None for others.
        storage_of: which argument it is a view of; None for one with a storage of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0
    given: int | None = None
    storage_of: int | None = None

    def made(self, args: Sequence[Any], mode: Any) -> Tensor:
        """Such a tensor again, of other arguments of the same shapes."""
        if self.given is not None:
            given: Tensor = args[self.given]
            return given
        storage = None if self.storage_of is None else args[self.storage_of].untyped_storage()
        with in_kernel_invocation_manager(mode):
            if storage is None:
                empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                empty = torch.empty(0, dtype=self.dtype, device="meta")
                empty.set_(storage, self.offset, self.shape, self.stride)
        return FakeTensor(mode, empty, self.device)


class FakeOperations:
    """Runs operations on fake tensors of one mode, each with the same shapes once.

    Storages are as torch's own: a view has its argument's, an operation in place returns its argument, everything else
    has one of its own.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one."""
        mode, key = _mode(args), _key(func, args, kwargs)
        if mode is None or key is None:
            return func(*args, **kwargs)
        outputs = self._known.get(key)
        if outputs is None:
            result = func(*args, **kwargs)
            self._known[key] = _remembered(result, args, kwargs)
            return result
        if outputs is _NOT_REMEMBERED:
            return func(*args, **kwargs)
        if isinstance(outputs, _Output):
            return outputs.made(args, mode)
        return tuple(each.made(args, mode) for each in outputs)


def _mode(args: Sequence[Any]) -> Any:
    """The mode of the first fake tensor."""
    for value in args:
        given = value[0] if isinstance(value, (tuple, list)) and value else value
        if isinstance(given, FakeTensor):
            return given.fake_mode
    return None


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What decides the shapes of the results; None where that is not known."""
    try:
        key = (func, _described(args), _described(tuple(kwargs.items())))
        hash(key)
    except TypeError:
        return None
    return key


def _described(value: Any) -> Hashable:
    """An argument as far as results depend on it.

    Raises:
        TypeError: it is of a kind that is not known here.
    """
    if isinstance(value, FakeTensor):
        if value.dtype.is_complex:
            raise TypeError("its conjugation is not looked at")
        return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
    if isinstance(value, Tensor):
        raise TypeError("results may depend on its numbers")
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return (type(value), value)  # 1, 1.0 and True are equal


def _remembered(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """How to make the result again."""
    results = result if isinstance(result, tuple) else (result,)
    if not results or not all(isinstance(each, FakeTensor) for each in results):
        return _NOT_REMEMBERED
    nested = [each for each in args if isinstance(each, (tuple, list))]
    theirs = {each.untyped_storage()._cdata for each in tree_iter((nested, kwargs)) if isinstance(each, Tensor)}
    mine = {each.untyped_storage()._cdata for each in results}
    outputs = tuple(_output(each, args) for each in results)
    if mine & theirs or len(mine) < len(results) or not all(outputs):
        return _NOT_REMEMBERED
    return outputs if isinstance(result, tuple) else outputs[0]


def _output(tensor: FakeTensor, args: tuple[Any, ...]) -> _Output | None:
    """None where it is not simply an argument, a view of one, or a tensor with all of a storage of its own."""
    storage = tensor.untyped_storage()
    own = [number for number, each in enumerate(args) if isinstance(each, FakeTensor)]
    storage_of = next((number for number in own if args[number].untyped_storage()._cdata == storage._cdata), None)
    whole = storage.nbytes() == tensor.numel() * tensor.element_size() and tensor.storage_offset() == 0
    if tensor.dtype.is_complex or tensor.constant is not None or (storage_of is None and not whole):
        return None
    return _Output(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.fake_device,
        int(tensor.storage_offset()),
        next((number for number in own if args[number] is tensor), None),
        storage_of,
    )
