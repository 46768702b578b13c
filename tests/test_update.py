"""Which steps are taken, what they train, and how tokens are weighed in them."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

import ppo_lora.update
from builders import tiny_model
from ppo_lora import Role, SharedBase
from runs import logged, trainer


class After(TrainerCallback):
    """Does something after an optimizer step."""

    def __init__(self, step, action):
        self._step, self._action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._action()


def characters(completions, **kwargs):
    return [float(len(text)) for text in completions]


def parameters(base: SharedBase) -> dict[Role, list[torch.Tensor]]:
    return {role: [each.detach().clone() for each in own] for role, own in base.trainable_parameters().items()}


def changed(base: SharedBase, before: dict[Role, list[torch.Tensor]]) -> set[Role]:
    now = base.trainable_parameters()
    return {
        role for role, own in before.items() if any(not torch.equal(a, b) for a, b in zip(own, now[role], strict=True))
    }


def flat(base: SharedBase) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for own in base.trainable_parameters().values() for each in own])


# Stopping and skipping


def test_an_iteration_ends_where_the_policy_has_moved_too_far(tmp_path):
    """A step taken from ratio 1 cannot be over the target; the first after it is, and every later one is left out."""
    made = trainer(tmp_path / "a", target_kl=1e-12, max_steps=4)
    made.train()
    assert logged(made)[-1]["policy/stopped_steps"] == 0.75
    one = trainer(tmp_path / "b", num_ppo_epochs=1, max_steps=2, lr_scheduler_type="constant")
    stopped = trainer(tmp_path / "c", target_kl=1e-12, max_steps=4, lr_scheduler_type="constant")
    seen = {}
    one.add_callback(After(1, lambda: seen.setdefault("one", flat(one.base))))
    one.train()
    stopped.train()
    assert torch.equal(flat(stopped.base), seen["one"])


@pytest.mark.parametrize(("factor", "stopped"), [(1.2, 0.0), (1.8, 0.5)])
def test_the_iteration_ends_at_one_and_a_half_times_the_target(tmp_path, factor, stopped):
    steps = {"num_ppo_epochs": 2, "num_mini_batches": 1, "max_steps": 2, "reward_funcs": characters}
    plain = trainer(tmp_path / "a", **steps)
    plain.train()
    moved = 2 * logged(plain)[-1]["policy/approxkl_avg"]  # the mean of the first step's, which is 0, and the second's
    made = trainer(tmp_path / "b", **steps, target_kl=moved / factor)
    made.train()
    assert logged(made)[-1]["policy/stopped_steps"] == stopped


def test_a_far_target_changes_nothing(tmp_path):
    plain, watched = trainer(tmp_path / "a"), trainer(tmp_path / "b", target_kl=100.0, ratio_threshold=100.0)
    plain.train()
    watched.train()
    assert torch.equal(flat(plain.base), flat(watched.base))
    assert logged(watched)[-1]["policy/stopped_steps"] == logged(watched)[-1]["policy/skipped_steps"] == 0.0


def test_the_next_iteration_starts_anew_after_a_stop(tmp_path):
    made = trainer(tmp_path, target_kl=1e-12, max_steps=8)
    seen = [flat(made.base)]
    for step in range(1, 9):
        made.add_callback(After(step, lambda: seen.append(flat(made.base))))
    made.train()
    moved = [not torch.equal(before, after) for before, after in zip(seen, seen[1:], strict=False)]
    assert moved == [True, False, False, False, True, False, False, False]


def test_a_mini_batch_whose_ratio_spikes_is_skipped_and_counted(tmp_path, monkeypatch):
    """The ratio is made to spike in the second step: everything is as if that step were not there."""
    original, calls = ppo_lora.update.policy_statistics, []

    def spiking(*arguments):
        calls.append(1)
        found = original(*arguments)
        return found | {"ratio": found["ratio"] * 50.0} if len(calls) in (3, 4) else found

    monkeypatch.setattr(ppo_lora.update, "policy_statistics", spiking)
    made = trainer(tmp_path, ratio_threshold=10.0, max_steps=4, per_device_train_batch_size=4)
    seen = [flat(made.base)]
    for step in range(1, 5):
        made.add_callback(After(step, lambda: seen.append(flat(made.base))))
    made.train()
    assert [not torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False)] == [True, False, True, True]
    assert logged(made)[-1]["policy/skipped_steps"] == 0.25


# Warm-up of the value


@pytest.mark.parametrize("value", [None, "shared"])
def test_the_warm_up_trains_the_value_alone(tmp_path, value):
    base = SharedBase(tiny_model(), value=value)
    made = trainer(tmp_path, base, value_warmup_iterations=1, max_steps=8, learning_rate=1e-2)
    before, seen = parameters(base), {}
    for step in (4, 5):
        made.add_callback(After(step, lambda step=step: seen.setdefault(step, changed(base, before))))
    made.train()
    assert seen == {4: {Role.VALUE}, 5: {Role.POLICY, Role.VALUE}}
    first, last = logged(made)[0], logged(made)[-1]
    assert "loss/policy_avg" not in first and "loss/value_avg" in first
    assert "loss/policy_avg" in last
    assert made.state.log_history[0]["objective/kl"] == 0.0


# How losses are aggregated


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "sequence_sum_constant"])
def test_the_micro_batch_size_changes_no_weight(tmp_path, how):
    runs = [
        trainer(
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            loss_aggregation=how,
            entropy_coef=0.01,
            kl_in="loss",
        )
        for size in (8, 2)
    ]
    for made in runs:
        made.train()
    torch.testing.assert_close(flat(runs[0].base), flat(runs[1].base), rtol=1e-4, atol=1e-5)
    losses = [logged(made)[-1] for made in runs]
    for name in ("loss/policy_avg", "loss/value_avg", "loss/kl_avg", "loss"):
        assert losses[0][name] == pytest.approx(losses[1][name], rel=1e-3, abs=1e-5)


def test_aggregations_train_differently(tmp_path):
    ends = []
    for how in ("token_mean", "sequence_mean", "sequence_sum_constant"):
        made = trainer(tmp_path / how, loss_aggregation=how, optim="sgd", max_grad_norm=0.0)
        made.train()
        ends.append(flat(made.base))
    assert all(not torch.equal(a, b) for a, b in zip(ends, [*ends[1:], ends[0]], strict=True))


# The value's losses


def test_the_value_loss_is_logged_before_and_after_clipping(tmp_path):
    made = trainer(tmp_path, cliprange_value=1e-9, value_learning_rate=1e-2, max_steps=8)
    made.train()
    entry = logged(made)[-1]
    assert entry["loss/value_avg"] > entry["loss/value_unclipped_avg"] > 0.0
    loose = trainer(tmp_path / "loose", cliprange_value=1e9, value_learning_rate=1e-2, max_steps=8)
    loose.train()
    entry = logged(loose)[-1]
    assert entry["loss/value_avg"] == pytest.approx(entry["loss/value_unclipped_avg"])


# How a step is cut


def passes_of(made) -> list[torch.Size]:
    """Shapes of what the backbone reads with gradients, as training goes on."""
    shapes = []
    made.base.backbone.register_forward_pre_hook(
        lambda _, given: shapes.append(given[0].shape) if torch.is_grad_enabled() else None
    )
    return shapes


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_micro_batches_in_tokens_change_no_training(tmp_path, tokens):
    plain = trainer(tmp_path / "plain")
    cut = trainer(tmp_path / "cut", max_tokens_per_micro_batch=tokens)
    shapes = passes_of(cut)
    for made in (plain, cut):
        made.train()
    torch.testing.assert_close(flat(cut.base), flat(plain.base), rtol=1e-3, atol=2e-5)
    assert all(shape[0] == 1 or shape.numel() <= tokens for shape in shapes)
    steps, rows = 4, 8  # a mini-batch
    assert {1: len(shapes) == 2 * steps * rows, 40: True, 10_000: len(shapes) < 2 * steps * rows / 2}[tokens]


class Apart:
    """A base whose update is not told that value and policy share an adapter."""

    shares_value_adapter = False

    def __init__(self, base: SharedBase):
        self._base = base

    def __getattr__(self, name):
        return getattr(self._base, name)


def test_a_shared_value_adapter_takes_one_pass_with_the_gradient_of_two(tmp_path):
    one = trainer(tmp_path / "one", trainer_options={"value_adapter": "shared"}, vf_coef=1.0)
    two = trainer(tmp_path / "two", trainer_options={"value_adapter": "shared"}, vf_coef=1.0)
    shapes = [passes_of(made) for made in (one, two)]
    one.train()
    new_update = two._new_update

    def apart():
        update = new_update()
        update.base = Apart(two.base)
        return update

    two._new_update = apart
    two.train()
    assert 2 * len(shapes[0]) == len(shapes[1]) > 0
    torch.testing.assert_close(flat(one.base), flat(two.base), rtol=1e-3, atol=2e-5)
    for entry, other in zip(logged(one), logged(two), strict=True):
        assert entry["loss/value_avg"] == pytest.approx(other["loss/value_avg"], rel=1e-3)
        assert entry["val/clipfrac_avg"] == pytest.approx(other["val/clipfrac_avg"], abs=1e-6)
