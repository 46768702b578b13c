"""Out of memory: batches are halved, gradients stay as they are, and a row that does not fit says what to change."""

from __future__ import annotations

import warnings

import pytest
import torch

from bases import reward_adapter
from ppo_lora import Role, SharedBase
from ppo_lora.splitting import OutOfMemory, RowLimit, is_out_of_memory
from runs import logged, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Out of memory while")
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."
HOST = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), RuntimeError(CUDA), RuntimeError(HOST)])
def test_errors_about_memory_are_known(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["shapes cannot be multiplied", "CUDA error: device-side assert triggered", ""])
def test_other_errors_are_not(text):
    assert not is_out_of_memory(RuntimeError(text))


def fits(most: int, seen: list[int]):
    """Work that has memory for so many rows."""

    def work(rows):
        seen.append(len(rows))
        if len(rows) > most:
            raise torch.OutOfMemoryError(CUDA)
        return rows * 10

    return work


@pytest.mark.parametrize("total", [1, 7, 8])
@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_what_does_not_fit_is_halved_until_it_does(total, most):
    limit, seen = RowLimit("sampling"), []
    rows = torch.arange(total)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pieces = limit.run(rows, fits(most, seen))
    warned = " ".join(str(warning.message) for warning in caught)
    assert torch.equal(torch.cat([piece for piece, _ in pieces]), rows)
    assert torch.equal(torch.cat([result for _, result in pieces]), rows * 10)
    assert (limit.rows is None) == (total <= most) == (warned == "")
    if limit.rows is not None:
        assert limit.rows <= most and f"local_rollout_forward_batch_size={limit.rows} saves the attempt" in warned
    tried = len(seen)
    limit.run(rows, fits(most, seen))
    assert max(seen[tried:]) <= most, "the smaller size is kept"


def test_a_row_that_does_not_fit_says_what_to_change():
    with pytest.raises(OutOfMemory, match="A single row does not fit into memory while updating. Set gradient_check"):
        RowLimit("updating").run(torch.arange(4), fits(0, []))


def test_errors_about_something_else_go_through():
    def work(rows):
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        RowLimit("scoring").run(torch.arange(4), work)


# The trainer

REWARD = {"reward_adapter": reward_adapter()}


def state(made) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.base.named_parameters() if p.requires_grad}


def assert_same_training(plain, split) -> None:
    for name, tensor in state(plain).items():
        torch.testing.assert_close(state(split)[name], tensor, rtol=1e-3, atol=2e-5)
    for one, other in zip(logged(plain), logged(split), strict=True):
        assert one["objective/scores"] == pytest.approx(other["objective/scores"], abs=1e-4)
        assert one["loss/policy_avg"] == pytest.approx(other["loss/policy_avg"], abs=1e-4)
        assert one["val/num_eos_tokens"] == other["val/num_eos_tokens"]


@pytest.fixture
def plain(tmp_path):
    made = trainer(tmp_path / "plain", trainer_options=REWARD)
    made.train()
    return made


def test_sampling_goes_on_with_fewer_rows(tmp_path, plain, monkeypatch):
    sample, sizes = SharedBase.sample, []

    def short(self, input_ids, *args, **kwargs):
        sizes.append(len(input_ids))
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError(CUDA)
        return sample(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(SharedBase, "sample", short)
    split = trainer(tmp_path / "split", trainer_options=REWARD)
    split.train()
    assert max(sizes) > 3 and [size for size in sizes if size > 3] == [16, 8, 4]
    assert_same_training(plain, split)
    assert logged(split)[-1]["memory/sampling_rows"] <= 3 and "memory/scoring_rows" not in logged(split)[-1]


@pytest.mark.parametrize("what", ["forward", "scores"])
def test_scoring_goes_on_with_fewer_rows(tmp_path, plain, monkeypatch, what):
    original = getattr(SharedBase, what)

    def short(self, *args, **kwargs):
        rows = len(args[0]) if what == "scores" else args[1].shape[0]
        if rows > 3 and not torch.is_grad_enabled():
            raise torch.OutOfMemoryError(CUDA)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SharedBase, what, short)
    split = trainer(tmp_path / "split", trainer_options=REWARD)
    split.train()
    assert_same_training(plain, split)
    assert logged(split)[-1]["memory/scoring_rows"] <= 3


@pytest.mark.parametrize("role", [Role.POLICY, Role.VALUE])
@pytest.mark.parametrize("where", ["forward", "first gradient", "last gradient"])
def test_updates_go_on_with_fewer_rows_and_the_same_gradient(tmp_path, plain, monkeypatch, role, where):
    """Also where memory ends in the middle of a backward pass, with some of the gradients made."""
    split = trainer(tmp_path / "split", trainer_options=REWARD)
    parameters = [p for p in split.base.adapters.parameters(role)]
    forward, rows_now = SharedBase.forward, []

    def noting(self, asked, rows, *args, **kwargs):
        rows_now[:] = [rows.shape[0] if asked == role and torch.is_grad_enabled() else 0]
        if where == "forward":
            run_out()
        return forward(self, asked, rows, *args, **kwargs)

    def run_out(*_):
        if rows_now[0] > 1:
            raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(SharedBase, "forward", noting)
    if where != "forward":  # backward makes the last layer's gradients first
        parameters[-1 if where == "first gradient" else 0].register_hook(run_out)
    split.train()
    assert_same_training(plain, split)
    assert logged(split)[-1]["memory/updating_rows"] == 1


def test_a_row_too_many_stops_the_run(tmp_path, monkeypatch):
    forward = SharedBase.forward

    def never(self, role, *args, **kwargs):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError(CUDA)
        return forward(self, role, *args, **kwargs)

    made = trainer(tmp_path, startup_checks="off")
    monkeypatch.setattr(SharedBase, "forward", never)
    before = state(made)
    with pytest.raises(OutOfMemory, match="A single row does not fit into memory while updating"):
        made.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(made).items())
