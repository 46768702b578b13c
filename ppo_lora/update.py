"""One optimizer step of PPO: the gradients of policy and value from micro-batches, and whether they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from .config import PPOConfig
from .losses import (
    aggregation_weights,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_bonus,
    kl_loss,
    policy_statistics,
)
from .masking import Reduce
from .metrics import RunningMeans
from .pretraining import PretrainingMix
from .roles import Role
from .rows import Rows, compact_rows
from .shared_base import SharedBase
from .splitting import RowLimit
from .types import Experience

EARLY_STOP_FACTOR = 1.5
"""An iteration stops where the policy's KL is over so many times ``target_kl``, as in Spinning Up and TRL before."""


_Pass = Callable[[nn.Module, "MicroBatch"], Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """A piece of an optimizer step.

    Attributes:
        experience: b of the step's rows.
        packed: whether the base reads them as one row.
        weights: [b, T] float32, what each token's loss counts in the step.
        portion: scalar, the share of the step's rows, over all processes, that are in it.
    """

    experience: Experience
    weights: Tensor
    portion: Tensor
    packed: bool = False

    def __len__(self) -> int:
        return len(self.experience)

    @cached_property
    def rows(self) -> Rows:
        """What the base reads of it."""
        experience = self.experience
        return compact_rows(experience.sequences, experience.host_mask, experience.response_length, self.packed)

    def select(self, rows: Tensor) -> MicroBatch:
        """Some of its rows, [N] int64 on the CPU."""
        if len(rows) == len(self):
            return self
        experience = self.experience.select(rows)
        weights = self.weights[rows.to(self.weights.device)][:, : experience.response_length]
        return MicroBatch(experience, weights, self.portion * len(rows) / len(self), self.packed)


def micro_batches_of_step(
    slots: Sequence[Sequence[Experience]], config: PPOConfig, reduce: Reduce, packed: bool = False
) -> list[list[MicroBatch]]:
    """An optimizer step's pieces with their weights in it, so that its gradient does not depend on how it is cut.

    Args:
        slots: of this process, the pieces of each of Trainer's micro-batches.
        config: how losses are aggregated.
        reduce: sums a tensor over all processes.
        packed: whether the base reads a piece as one row.
    """
    pieces = [piece for slot in slots for piece in slot]
    tokens = torch.stack([piece.response_mask.sum() for piece in pieces]).sum()
    tokens, rows = reduce(torch.stack([tokens, torch.full_like(tokens, sum(map(len, pieces)))])).unbind()
    length = config.max_completion_length
    return [
        [
            MicroBatch(
                experience=piece,
                weights=aggregation_weights(piece.response_mask, config.loss_aggregation, tokens, rows, length),
                portion=len(piece) / rows,
                packed=packed,
            )
            for piece in slot
        ]
        for slot in slots
    ]


class PolicyValueUpdate:
    """Adds up the gradients of a step, and drops them where the step should not be taken.

    Args:
        base: whose policy and value are trained.
        config: losses and their options.
        accelerator: the trainer's; runs the backward passes, and sums over processes.
        means: where what is watched goes.
        enter: is told where time goes, ``"policy_update"`` or ``"value_update"``.
        pretraining: what is mixed in; None for nothing.

    Attributes:
        limit: how many rows fit.
    """

    def __init__(
        self,
        base: SharedBase,
        config: PPOConfig,
        accelerator: Any,
        means: RunningMeans,
        enter: Callable[[str], None] = lambda phase: None,
        pretraining: PretrainingMix | None = None,
    ):
        self.base, self.config, self.accelerator, self.means = base, config, accelerator, means
        self._pretraining, self._enter = pretraining, enter
        self._parameters = base.trainable_parameters()
        self.limit = RowLimit("updating")
        self._seen: list[tuple[Experience, Tensor, Tensor]] = []
        self._moved: list[Tensor] = []
        self.begin_iteration(0)

    def begin_iteration(self, iteration: int) -> None:
        """A new rollout batch was made.

        Args:
            iteration: 0-based; the first ``value_warmup_iterations`` train the value role alone.
        """
        self._stopped = False
        self._policy_waits = iteration < self.config.value_warmup_iterations
        self._seen, self._moved = [], []

    def gradients(self, model: nn.Module, pieces: Sequence[MicroBatch]) -> Tensor:
        """Add the gradients of one of Trainer's micro-batches: of each piece, the policy's and then the value's.

        Args:
            model: the base as the trainer wrapped it.
            pieces: of the step.

        Returns:
            The pieces' part of the loss, a scalar without a gradient, times the number of processes (Trainer logs the
            mean over them); 0 where the iteration was stopped.

        Raises:
            OutOfMemory: a single row does not fit.
        """
        total = torch.zeros((), device=self.accelerator.device)
        for number, piece in enumerate([] if self._stopped else pieces, start=1):
            # Processes add up their gradients in the last backward pass of each role.
            with nullcontext() if number == len(pieces) else self.accelerator.no_sync(model):
                for phase, make_gradients in self._passes().items():
                    self._enter(phase)
                    total = total + self._fitting(model, piece, make_gradients)
        return total * self.accelerator.num_processes

    def _passes(self) -> dict[str, _Pass]:
        """A forward and a backward each. Where value and policy share an adapter, they share these."""
        if self._policy_waits:
            return {"value_update": self._value_gradients}
        if self.base.shares_value_adapter:
            return {"policy_update": self._policy_gradients}
        return {"policy_update": self._policy_gradients, "value_update": self._value_gradients}

    def _fitting(self, model: nn.Module, piece: MicroBatch, make_gradients: _Pass) -> Tensor:
        """A pass over a piece, in halves where memory does not suffice."""
        if self.accelerator.distributed_type != DistributedType.NO:
            return make_gradients(model, piece)  # the others would wait for the halves

        def work(rows: Tensor) -> Tensor:
            with self._all_or_nothing():
                return make_gradients(model, piece.select(rows))

        return torch.stack([loss for _, loss in self.limit.run(torch.arange(len(piece)), work)]).sum()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Gradients made inside are added to those that there were, unless there is an exception."""
        parameters = [parameter for role in self._parameters.values() for parameter in role]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def finish_step(self, model: nn.Module, step: int) -> Tensor:
        """Look at the whole step before the optimizer takes it, and add the pretraining mix's gradient if it is taken.

        Args:
            model: the base as the trainer wrapped it.
            step: optimizer steps before this one.

        Returns:
            The mix's part of the loss, as :meth:`gradients` returns the others.

        Raises:
            FloatingPointError: a gradient is not finite; the weights are as before the step.
        """
        total = torch.zeros((), device=self.accelerator.device)
        if self._should_skip():
            self._drop_gradients(*self._parameters)
        elif self._policy_waits:
            self._drop_gradients(Role.POLICY)
        elif self._pretraining is not None:
            total = self._pretraining_gradients(model, self._pretraining, step)
        seen, self._seen, self._moved = self._seen, [], []
        self._stop_if_not_finite(seen, step + 1)
        return total * self.accelerator.num_processes

    def _pretraining_gradients(self, model: nn.Module, mix: PretrainingMix, step: int) -> Tensor:
        total = torch.zeros((), device=self.accelerator.device)
        for batch in mix.batches_of_step(step, self.accelerator):
            loss = mix.loss(model, batch)
            self._backward(self.config.ptx_coef * loss)
            self.means.add({"loss/ptx_avg": loss / batch.portion}, weight=batch.portion)
            total = total + self.config.ptx_coef * loss.detach()
        return total

    def _policy_gradients(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        config, rows, weights = self.config, batch.experience, batch.weights
        mask, shared = rows.response_mask, self.base.shares_value_adapter
        logprobs, entropy, *values = model(
            Role.POLICY,
            batch.rows,
            temperature=config.temperature,
            entropy_gradient=config.entropy_coef > 0,
            with_values=shared,
        )
        loss, clip_fraction = clipped_policy_loss(
            logprobs,
            rows.logprobs,
            rows.advantages,
            mask,
            config.cliprange,
            cliprange_high=config.cliprange_high,
            dual_clip=config.dual_clip,
            weights=weights,
        )
        losses, total = {"loss/policy_avg": loss}, loss
        if config.entropy_coef:
            total = total + entropy_bonus(entropy, mask, config.entropy_coef, weights=weights)
        if config.kl_in == "loss":
            kl_weights = weights * rows.kl_weights[:, None]
            kl = kl_loss(logprobs, rows.logprobs, rows.ref_logprobs, mask, config.kl_estimator, weights=kl_weights)
            losses["loss/kl_avg"], total = kl, total + kl
        if shared:
            value_loss, value_clip_fraction = self._value_loss(values[0], batch)
            total = total + config.vf_coef * value_loss
        self._backward(total)
        self._watch_losses(losses, batch)
        self._watch_policy(logprobs.detach(), clip_fraction, rows)
        if shared:
            self._watch_value(values[0].detach(), value_loss, value_clip_fraction, batch)
        self._seen.append((rows, logprobs.detach(), values[0].detach() if shared else rows.values))
        return total.detach()

    def _value_gradients(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        values = model(Role.VALUE, batch.rows)
        loss, clip_fraction = self._value_loss(values, batch)
        total = self.config.vf_coef * loss
        self._backward(total)
        self._watch_value(values.detach(), loss, clip_fraction, batch)
        self._seen.append((batch.experience, batch.experience.logprobs, values.detach()))
        return total.detach()

    def _value_loss(self, values: Tensor, batch: MicroBatch, cliprange: float | None = None) -> tuple[Tensor, Tensor]:
        rows = batch.experience
        cliprange = self.config.cliprange_value if cliprange is None else cliprange
        return clipped_value_loss(
            values, rows.values, rows.returns, rows.response_mask, cliprange, weights=batch.weights
        )

    def _watch_value(self, values: Tensor, loss: Tensor, clip_fraction: Tensor, batch: MicroBatch) -> None:
        unclipped, _ = self._value_loss(values, batch, math.inf)
        self._watch_losses({"loss/value_avg": loss, "loss/value_unclipped_avg": unclipped}, batch)
        self.means.add({"val/clipfrac_avg": clip_fraction}, weight=batch.experience.response_mask.sum())

    def _backward(self, loss: Tensor) -> None:
        # DDP averages the gradients of the processes; their sum is wanted.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def _watch_losses(self, losses: dict[str, Tensor], batch: MicroBatch) -> None:
        """Losses of pieces add up to the step's; what is logged is the mean over steps."""
        self.means.add({name: loss.detach() / batch.portion for name, loss in losses.items()}, weight=batch.portion)

    def _watch_policy(self, logprobs: Tensor, clip_fraction: Tensor, rows: Experience) -> None:
        moved, tokens = policy_statistics(logprobs, rows.logprobs, rows.response_mask), rows.response_mask.sum()
        self._moved.append(torch.stack([moved["approxkl"] * tokens, moved["ratio"] * tokens, tokens.float()]))
        watched = {
            "policy/clipfrac_avg": clip_fraction,
            "policy/approxkl_avg": moved["approxkl"],
            "val/ratio": moved["ratio"],
            "val/ratio_var": moved["ratio_var"],
        }
        self.means.add(watched, weight=tokens)

    def _should_skip(self) -> bool:
        """Whether the step's ratio spikes, or the policy has moved far enough for this iteration."""
        config, spike = self.config, False
        if config.target_kl is None and config.ratio_threshold is None:
            return False
        if self._moved:
            moved = self.accelerator.reduce(torch.stack(self._moved).sum(dim=0), reduction="sum")
            kl, ratio, tokens = moved.tolist()
            tokens = max(tokens, 1.0)  # there may be none, where no response was scored
            spike = config.ratio_threshold is not None and ratio / tokens > config.ratio_threshold
            self._stopped = config.target_kl is not None and kl / tokens > EARLY_STOP_FACTOR * config.target_kl
        self.means.add({"policy/skipped_steps": float(spike), "policy/stopped_steps": float(self._stopped)})
        return spike or self._stopped

    def _drop_gradients(self, *roles: Role) -> None:
        """Optimizers leave a parameter without a gradient as it is, its moments and weight decay included."""
        for role in roles:
            for parameter in self._parameters[role]:
                parameter.grad = None

    def _stop_if_not_finite(self, seen: list[tuple[Experience, Tensor, Tensor]], step: int) -> None:
        named = [(name, p.grad) for name, p in self.base.named_parameters() if p.grad is not None]
        if bool(torch.nn.utils.get_total_norm([gradient for _, gradient in named]).isfinite()):
            return
        broken = [name for name, gradient in named if not bool(gradient.isfinite().all())]
        rows = [_first_broken_row(*each) for each in seen]
        where = next((row for row in rows if row), "every row's log-probabilities and values are finite")
        raise FloatingPointError(
            f"The gradient is not finite at step {step}, in {len(broken)} tensors (the first: "
            f"{broken[0] if broken else 'their norm overflows'}); {where}. The weights were not changed by this step. "
            "Lower the learning rates, set max_grad_norm, or compute in float32."
        )


def _first_broken_row(batch: Experience, logprobs: Tensor, values: Tensor) -> str | None:
    for name, tensor in (("log-probabilities", logprobs), ("values", values)):
        finite = tensor.isfinite().all(dim=1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            ids = batch.sequences[row][batch.attention_mask[row]].tolist()
            return f"the {name} of row {row} of its micro-batch are not finite (tokens {ids[:20]}...)"
    return None
