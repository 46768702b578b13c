"""What falls due inside an iteration happens at its end; the bar names the phase."""

from __future__ import annotations

import pytest
from transformers import TrainerControl, TrainerState

from ppo_lora.callbacks import IterationEndCallback, PhaseProgressCallback

FLAGS = ("should_log", "should_evaluate", "should_save")


class Steps:
    """Takes optimizer steps, four to an iteration, as the Trainer would report them."""

    def __init__(self):
        self.callback, self.state = IterationEndCallback(4), TrainerState()

    def step(self, *due, stop=False):
        """One more step at which ``due`` falls due; returns what is let through."""
        self.state.global_step += 1
        control = TrainerControl(should_training_stop=stop, **dict.fromkeys(due, True))
        control = self.callback.on_step_end(None, self.state, control)
        assert control.should_training_stop is stop
        return {flag for flag in FLAGS if getattr(control, flag)}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_what_is_due_inside_happens_at_the_end(flag, at):
    steps = Steps()
    seen = [steps.step(*([flag] if i == at else [])) for i in range(1, 9)]
    assert seen == [set()] * 3 + [{flag}] + [set()] * 4


def test_several_things_wait_together_and_happen_once():
    steps = Steps()
    due = [("should_log",), ("should_log", "should_save"), ("should_evaluate",), ()]
    assert [steps.step(*now) for now in due] == [set(), set(), set(), set(FLAGS)]
    assert [steps.step() for _ in range(4)] == [set()] * 4


def test_nothing_due_is_nothing_done():
    steps = Steps()
    assert [steps.step() for _ in range(8)] == [set()] * 8


def test_a_stop_lets_everything_through_at_once():
    steps = Steps()
    steps.step("should_save")
    assert steps.step("should_log", stop=True) == {"should_save", "should_log"}


def test_one_step_an_iteration_delays_nothing():
    callback, state = IterationEndCallback(1), TrainerState(global_step=3)
    control = callback.on_step_end(None, state, TrainerControl(should_log=True))
    assert control.should_log and not control.should_save


class Bar:
    """Stands in for tqdm's bar."""

    def set_description(self, text):
        self.description = text

    def set_postfix(self, numbers):
        self.postfix = numbers

    def clear(self):
        self.cleared = True


@pytest.fixture
def progress():
    callback = PhaseProgressCallback()
    callback.training_bar = Bar()
    return callback


def test_the_bar_names_the_phase(progress):
    progress.show_phase("scoring")
    assert progress.training_bar.description == "scoring"


def test_the_bar_shows_three_numbers(progress):
    logs = {"objective/scores": 1.23456, "objective/kl": 0.5, "objective/entropy": 12345.6, "loss": 1.0}
    progress.on_log(None, TrainerState(), TrainerControl(), logs=logs)
    assert progress.training_bar.postfix == {"scores": "1.23", "kl": "0.5", "entropy": "1.23e+04"}


@pytest.mark.parametrize("logs", [None, {}, {"loss": 1.0}])
def test_other_logs_leave_the_bar_alone(progress, logs):
    progress.on_log(None, TrainerState(), TrainerControl(), logs=logs)
    assert not hasattr(progress.training_bar, "postfix")


def test_the_bar_makes_room_for_a_table(progress):
    progress.clear()
    assert progress.training_bar.cleared


def test_without_a_bar_nothing_happens(capsys):
    callback = PhaseProgressCallback()
    callback.show_phase("sampling")
    callback.clear()
    callback.on_log(None, TrainerState(), TrainerControl(), logs={"objective/kl": 1.0})
    assert capsys.readouterr() == ("", "")
