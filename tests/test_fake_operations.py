"""Operations on fake tensors that are remembered, against torch's own answers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ppo_lora.fake_operations import FakeOperations

ATEN = torch.ops.aten


class Counted:
    """An operation that counts how often torch works it out."""

    def __init__(self, operation):
        self.operation, self.calls = operation, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.operation(*args, **kwargs)


CASES = [
    (ATEN.add.Tensor, lambda x: (x, x), {}, 1),
    (ATEN.mm.default, lambda x: (x, x.t()), {}, 1),
    (ATEN.t.default, lambda x: (x,), {}, 1),
    (ATEN.slice.Tensor, lambda x: (x, 0, 1, 3), {}, 1),
    (ATEN._to_copy.default, lambda x: (x,), {"dtype": torch.bfloat16}, 1),
    (ATEN.add_.Tensor, lambda x: (x, 1.0), {}, 1),
    (ATEN.max.dim, lambda x: (x, 1), {}, 1),
    (ATEN.cat.default, lambda x: ([x, x], 1), {}, 1),
    (ATEN.split.Tensor, lambda x: (x, 2), {}, 3),  # a list of views of one storage
    (ATEN.is_same_size.default, lambda x: (x, x), {}, 3),  # not a tensor
]


@pytest.mark.parametrize(("operation", "arguments", "options", "calls"), CASES, ids=lambda each: str(each)[:20])
def test_what_is_remembered_is_what_torch_says(operation, arguments, options, calls):
    counted, operations, mode = Counted(operation), FakeOperations(), FakeTensorMode()
    with mode:
        for _ in range(3):
            given = arguments(torch.empty(4, 6))
            made, expected = operations(counted, given, options), operation(*arguments(torch.empty(4, 6)), **options)
            for one, other in zip(*map(torch.utils._pytree.tree_leaves, (made, expected)), strict=True):
                assert _looks(one) == _looks(other)
    assert counted.calls == calls


def _looks(value):
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, size


def test_views_and_operations_in_place_have_the_storages_of_their_arguments():
    operations = FakeOperations()
    with FakeTensorMode():
        for _ in range(2):
            given = torch.empty(4, 6)
            view = operations(ATEN.select.int, (given, 0, 1), {})
            assert view.untyped_storage()._cdata == given.untyped_storage()._cdata
            assert operations(ATEN.mul_.Tensor, (given, 2.0), {}) is given
            other = operations(ATEN.mul.Tensor, (given, 2.0), {})
            assert other.untyped_storage()._cdata != given.untyped_storage()._cdata


def test_other_arguments_are_another_operation():
    operations, full = FakeOperations(), Counted(ATEN.new_full.default)
    with FakeTensorMode():
        given = torch.empty(4)
        kinds = [operations(full, (given, [2], value), {"dtype": kind}).dtype for value, kind in _VALUES]
        shapes = [operations(full, (given, [size], 1), {}).shape[0] for size in (2, 3, 2)]
    assert kinds == [kind for _, kind in _VALUES] and shapes == [2, 3, 2]
    assert full.calls == len(_VALUES) + 2


_VALUES = [(1, torch.float32), (1.0, torch.float32), (True, torch.float32), (1, torch.int64)]
