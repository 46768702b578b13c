"""Trainer callbacks: what falls due inside an iteration happens at its end, and a bar that names the phase."""

from __future__ import annotations

from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class IterationEndCallback(TrainerCallback):
    """Put off logging, evaluation and saving to the end of the iteration in which they fall due.

    Inside an iteration half of a rollout batch is used up: a checkpoint there could not be resumed exactly.

    Args:
        steps_per_iteration: optimizer steps.
    """

    FLAGS = ("should_log", "should_evaluate", "should_save")

    def __init__(self, steps_per_iteration: int):
        self._steps = steps_per_iteration
        self._due: set[str] = set()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Note what is due; let it through at an iteration's end, or when training stops here."""
        self._due |= {flag for flag in self.FLAGS if getattr(control, flag)}
        at_end = state.global_step % self._steps == 0 or control.should_training_stop
        for flag in self.FLAGS:
            setattr(control, flag, at_end and flag in self._due)
        if at_end:
            self._due.clear()
        return control


class PhaseProgressCallback(ProgressCallback):
    """transformers' progress bar, which says too whether the trainer is sampling, scoring or updating."""

    _SHOWN = ("objective/scores", "objective/kl", "objective/entropy")

    def show_phase(self, phase: str) -> None:
        """Name the phase in front of the bar."""
        if self.training_bar is not None:
            self.training_bar.set_description(phase)

    def clear(self) -> None:
        """Take the bar off the terminal's line, for something else to be printed; it comes back by itself."""
        if self.training_bar is not None:
            self.training_bar.clear()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the three numbers that matter beside the bar instead of printing a page of them."""
        shown = {name.split("/")[1]: f"{logs[name]:.3g}" for name in self._SHOWN if logs and name in logs}
        if self.training_bar is not None and shown:
            self.training_bar.set_postfix(shown)
