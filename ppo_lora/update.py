"""One optimizer step of PPO: the gradients of policy and value from micro-batches, and whether they are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from .shared_base import SharedBase
from .types import Experience

EARLY_STOP_FACTOR = 1.5
"""An iteration stops where the policy's KL is over so many times ``target_kl``, as in Spinning Up and TRL before."""


@dataclass(frozen=True)
class MicroBatch:
    """A piece of an optimizer step.

    Attributes:
        experience: b of the step's rows.
        weights: [b, T] float32, what each token's loss counts in the step.
        portion: scalar, the share of the step's rows, over all processes, that are in it.
    """

    experience: Experience
    weights: Tensor
    portion: Tensor


def micro_batches_of_step(pieces: Sequence[Experience], config: PPOConfig, reduce: Reduce) -> list[MicroBatch]:
    """An optimizer step's pieces with their weights in it, so that its gradient does not depend on how it is cut.

    Args:
        pieces: of this process.
        config: how losses are aggregated.
        reduce: sums a tensor over all processes.
    """
    tokens = torch.stack([piece.response_mask.sum() for piece in pieces]).sum()
    tokens, rows = reduce(torch.stack([tokens, torch.full_like(tokens, sum(map(len, pieces)))])).unbind()
    return [
        MicroBatch(
            experience=piece,
            weights=aggregation_weights(
                piece.response_mask, config.loss_aggregation, tokens, rows, config.max_completion_length
            ),
            portion=len(piece) / rows,
        )
        for piece in pieces
    ]


class PolicyValueUpdate:
    """Adds up the gradients of a step, and drops them where the step should not be taken.

    Args:
        base: whose policy and value are trained.
        config: losses and their options.
        accelerator: the trainer's; runs the backward passes, and sums over processes.
        means: where what is watched goes.
        pretraining: what is mixed in; None for nothing.
    """

    def __init__(
        self,
        base: SharedBase,
        config: PPOConfig,
        accelerator: Any,
        means: RunningMeans,
        pretraining: PretrainingMix | None = None,
    ):
        self.base, self.config, self.accelerator, self.means = base, config, accelerator, means
        self._pretraining = pretraining
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

    def gradients(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Add one micro-batch's gradients: the policy's forward and backward, then the value's.

        Args:
            model: the base as the trainer wrapped it.
            batch: a piece of the step.

        Returns:
            The piece's part of the loss, a scalar without a gradient, times the number of processes (Trainer logs the
            mean over them); 0 where the iteration was stopped.
        """
        total = torch.zeros((), device=self.accelerator.device)
        if self._stopped:
            return total
        if not self._policy_waits:
            total = total + self._policy_gradients(model, batch)
        total = total + self.config.vf_coef * self._value_gradients(model, batch)
        return total * self.accelerator.num_processes

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
            self._drop_gradients(*Role)
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
        mask = rows.response_mask
        logprobs, entropy = model(
            Role.POLICY,
            rows.sequences,
            rows.attention_mask,
            rows.response_length,
            temperature=config.temperature,
            entropy_gradient=config.entropy_coef > 0,
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
        total = loss
        if config.entropy_coef:
            total = total + entropy_bonus(entropy, mask, config.entropy_coef, weights=weights)
        if config.kl_in == "loss":
            kl_weights = weights * rows.kl_weights[:, None]
            kl = kl_loss(logprobs, rows.logprobs, rows.ref_logprobs, mask, config.kl_estimator, weights=kl_weights)
            total = total + kl
            self._watch_losses({"loss/kl_avg": kl}, batch)
        self._backward(total)
        self._watch_losses({"loss/policy_avg": loss}, batch)
        self._watch_policy(logprobs.detach(), clip_fraction, rows)
        self._seen.append((rows, logprobs.detach(), rows.values))
        return total.detach()

    def _value_gradients(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        config, rows, mask = self.config, batch.experience, batch.experience.response_mask
        values = model(Role.VALUE, rows.sequences, rows.attention_mask, rows.response_length)
        targets = (rows.values, rows.returns, mask)
        loss, clip_fraction = clipped_value_loss(values, *targets, config.cliprange_value, weights=batch.weights)
        self._backward(config.vf_coef * loss)
        unclipped, _ = clipped_value_loss(values.detach(), *targets, math.inf, weights=batch.weights)
        self._watch_losses({"loss/value_avg": loss, "loss/value_unclipped_avg": unclipped}, batch)
        self.means.add({"val/clipfrac_avg": clip_fraction}, weight=mask.sum())
        self._seen.append((rows, rows.logprobs, values.detach()))
        return loss.detach()

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
            spike = config.ratio_threshold is not None and ratio / tokens > config.ratio_threshold
            self._stopped = config.target_kl is not None and kl / tokens > EARLY_STOP_FACTOR * config.target_kl
        self.means.add({"policy/skipped_steps": float(spike), "policy/stopped_steps": float(self._stopped)})
        return spike or self._stopped

    def _drop_gradients(self, *roles: Role) -> None:
        """Optimizers leave a parameter without a gradient as it is, its moments and weight decay included."""
        for role, parameters in self.base.trainable_parameters().items():
            for parameter in parameters if role in roles else []:
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
