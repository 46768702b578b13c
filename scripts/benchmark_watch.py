"""Tells apart the phases of TRL 1.12's PPO from outside. Imports neither TRL nor ppo_lora."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from benchmark_measure import Phases, TokenCounter, lengths, wait
from benchmark_work import PAD


class Watch(TrainerCallback):
    """Phases, rollouts and tokens of each iteration, from wrapped functions and Trainer's callbacks.

    Sampling begins with the iteration and ends with ``batch_generation``; scoring ends where a forward first wants
    gradients; updating ends with the iteration. The value model's part of updating is the time of its forward, and of
    the joint backward from where the gradient of its last hidden states is there: autograd goes through the policy,
    which came later in the forward, before that. The optimizer's steps, over both, are a part of their own.

    Args:
        device: waited for where a part ends.
        now: the clock.
    """

    def __init__(self, device: str, now: Callable[[], float] = time.perf_counter):
        self.phases = Phases(device, now)
        self.counter = TokenCounter(lambda _: self.phases.phase or "")
        self.seen: list[dict[str, Any]] = []
        self.rollout: dict[str, list[int]] = {}
        self._device, self._now = device, now
        self._value_seconds = self._optimizer_seconds = 0.0
        self._value_since: float | None = None

    # Trainer's callbacks

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first iteration begins."""
        self.phases.enter("sampling")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An iteration ends, the next begins."""
        seconds = self.phases.pop()
        value, optimizer = self._value_seconds, self._optimizer_seconds
        parts = {"policy_update": seconds["updating"] - value - optimizer, "value_update": value}
        times = {**seconds, **parts, "optimizer": optimizer}
        self.seen.append({"seconds": sum(seconds.values()), **times, "rollout": self.rollout})
        self._value_seconds = self._optimizer_seconds = 0.0
        if len(self.seen) == 1:
            self.counter.reset()
        self.phases.enter("sampling")

    # What train() calls

    def generation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``batch_generation``."""

        def wrapped(model: Any, queries: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = function(model, queries, *args, **kwargs)
            self.rollout = lengths(queries != PAD, result[0][:, queries.shape[1] :] != PAD)
            self.phases.enter("scoring")
            return result

        return wrapped

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``forward``."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and self.phases.phase == "scoring":
                self.phases.enter("updating")
            return function(*args, **kwargs)

        return wrapped

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``accelerator.backward``."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._end_value()
            return result

        return wrapped

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``optimizer.step``."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = self._time()
            result = function(*args, **kwargs)
            self._optimizer_seconds += self._time() - start
            return result

        return wrapped

    def attach_value(self, backbone: torch.nn.Module) -> None:
        """Time the value model's part of updating."""
        backbone.register_forward_pre_hook(lambda *_: self._begin_value())
        backbone.register_forward_hook(self._value_forward)

    def _value_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._end_value()
            output.last_hidden_state.register_hook(lambda gradient: self._begin_value())

    def _begin_value(self) -> None:
        if self.phases.phase == "updating" or torch.is_grad_enabled():
            self._value_since = self._time()

    def _end_value(self) -> None:
        if self._value_since is not None:
            self._value_seconds += self._time() - self._value_since
            self._value_since = None

    def _time(self) -> float:
        wait(self._device)
        return self._now()
