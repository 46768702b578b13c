"""What a run will need of the memory, before anything is loaded; the largest sizes that fit, and what would save some.

The phases of an iteration are run on tensors without numbers (see ``simulation``) and what they allocate is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from peft import LoraConfig

from .adapters import SHARED, AdapterLike
from .config import PPOConfig
from .plan_setup import loaded_shape, named_shape
from .planned_base import BaseShape
from .roles import Role
from .shared_base import SharedBase
from .simulation import PHASES, SAMPLING, SCORING, UPDATE, Simulated, Simulator, changed

GPU_CONTEXT = 2**29
"""Bytes of a GPU that are kept for CUDA itself, in which no tensor can lie."""

FRAGMENTATION = 0.05
"""Share of a GPU that is kept for the gaps between tensors and for kernels' own workspaces."""

STANDING = ("quantized weights", "unquantized weights", "heads", "optimizer")
"""Parts, beside the adapters, that are there in all phases."""

_MOST_ROWS = 1024
_MOST_TOKENS = 32768

SIZES: Mapping[str, Sequence[str]] = {
    "per_device_train_batch_size": (UPDATE,),
    "local_rollout_forward_batch_size": (SAMPLING, SCORING),
    "max_completion_length": PHASES,
    "max_prompt_length": PHASES,
}
"""Options that a plan finds the largest value of, and the phases that depend on them."""


@dataclass(frozen=True)
class Lever:
    """Something that changes what is needed.

    Attributes:
        name: what it is.
        how: the option.
        saved: bytes less in the run's peak; negative where it needs more.
    """

    name: str
    how: str
    saved: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run needs, by part and by phase.

    Attributes:
        parts: quantized and unquantized weights, adapters, heads, gradients, optimizer, KV cache, the activations of
            each phase (what is alive at its peak besides the parts that last), and the chunk of logits in them.
        phases: alive at the most in each phase.
        gpu: bytes of the GPU; None where there is none to fit in.
        largest: the largest value of each option with which the run fits, the others being as they are; 0 for none.
        given: the options' values.
        levers: what would save how much.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    gpu: int | None = None
    largest: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    levers: tuple[Lever, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of tensors alive at the most."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Where that is."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def usable(self) -> int | None:
        """Bytes of the GPU that tensors can have."""
        return None if self.gpu is None else usable_bytes(self.gpu)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None where there is no GPU."""
        return None if self.usable is None else self.peak <= self.usable

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; memory in bytes."""
        return {
            "peak": self.peak,
            "peak_phase": self.peak_phase,
            "gpu": self.gpu,
            "usable": self.usable,
            "fits": self.fits,
            "parts": self.parts,
            "phases": self.phases,
            "given": self.given,
            "largest": self.largest,
            "levers": [vars(lever) for lever in self.levers],
        }


@dataclass(frozen=True)
class Setup:
    """A run as far as its memory depends on it.

    Attributes:
        shape: the base and its adapters.
        config: everything else.
        prompt_length: tokens of the longest prompt.
        simulator: runs the phases.
    """

    shape: BaseShape
    config: PPOConfig
    prompt_length: int
    simulator: Simulator

    def simulate(self, phases: Sequence[str] = PHASES) -> Simulated:
        """See :meth:`~ppo_lora.simulation.Simulator.simulate`."""
        return self.simulator.simulate(self.shape, self.config, self.prompt_length, phases)

    def peak(self, phases: Sequence[str] = PHASES) -> int:
        """Bytes alive at the most in the phases."""
        return max(self.simulate(phases).peaks.values())

    def with_size(self, option: str, value: int) -> Setup:
        """The same with another value of one of :data:`SIZES`; the rows of an iteration stay about as many."""
        if option == "max_prompt_length":
            return replace(self, prompt_length=value)
        changes = {option: value}
        if option == "per_device_train_batch_size":
            changes["gradient_accumulation_steps"] = max(1, -(-self.config.mini_batch_size // value))
        return replace(self, config=changed(self.config, **changes))

    def size(self, option: str) -> int:
        """The value of one of :data:`SIZES`."""
        return self.prompt_length if option == "max_prompt_length" else int(getattr(self.config, option))

    def limit(self, option: str) -> int:
        """The largest value that means something."""
        if option == "local_rollout_forward_batch_size":
            return self.config.local_batch_size
        if option == "per_device_train_batch_size":
            return _MOST_ROWS
        other = "max_prompt_length" if option == "max_completion_length" else "max_completion_length"
        positions = getattr(self.shape.config.get_text_config(), "max_position_embeddings", None) or _MOST_TOKENS
        return max(1, min(positions, _MOST_TOKENS) - self.size(other))


def usable_bytes(gpu: int) -> int:
    """What tensors can have of a GPU."""
    return int((gpu - GPU_CONTEXT) * (1 - FRAGMENTATION))


def plan_memory(
    model: str | SharedBase,
    args: PPOConfig,
    *,
    peft_config: LoraConfig | None = None,
    quantization_config: Any = None,
    policy_adapter: AdapterLike | None = None,
    reference_adapter: AdapterLike | None = None,
    value_adapter: AdapterLike | None = None,
    reward_adapter: AdapterLike | None = None,
    prompt_length: int | None = None,
    gpu_bytes: int | None = None,
    search: bool = True,
) -> MemoryPlan:
    """Plan the memory of a run from its options alone: no weights are read.

    Args:
        model: model id or folder with a ``config.json``, or a base that is loaded.
        args: as PPOTrainer takes them.
        peft_config, quantization_config, policy_adapter, reference_adapter, value_adapter, reward_adapter: as
            PPOTrainer takes them; of adapters the ``adapter_config.json`` is enough.
        prompt_length: tokens of the longest prompt; ``max_prompt_length`` if None.
        gpu_bytes: what has to be enough; that of the GPU that is there if None.
        search: find the largest sizes that fit, and what levers save, too.

    Raises:
        ValueError: there is no prompt length, the GPU is too small for anything, or no such base can be built.
        HubError: the Hub does not give a configuration.
    """
    prompt_length = args.max_prompt_length if prompt_length is None else prompt_length
    if prompt_length is None:
        raise ValueError("max_prompt_length is None, so the longest prompt is not known; set it for a plan.")
    if prompt_length < 1:
        raise ValueError(f"The longest prompt has {prompt_length} tokens; expected 1 or more. Set max_prompt_length.")
    if gpu_bytes is not None and gpu_bytes <= GPU_CONTEXT:
        raise ValueError(
            f"The GPU has {gpu_bytes / 2**30:g} GiB; expected more than the {GPU_CONTEXT / 2**30:g} GiB that CUDA "
            "itself takes. Name all of its memory."
        )
    adapters = {
        "policy": policy_adapter,
        "reference": reference_adapter,
        "value": value_adapter,
        "reward": reward_adapter,
    }
    if isinstance(model, SharedBase):
        shape = loaded_shape(model)
    else:
        shape = named_shape(str(model), args, adapters, peft_config, quantization_config)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
    if gpu_bytes is None and device.type == "cuda":
        gpu_bytes = torch.cuda.mem_get_info()[1]
    return _plan(Setup(shape, args, prompt_length, Simulator(device)), gpu_bytes, search)


def _plan(setup: Setup, gpu: int | None, search: bool) -> MemoryPlan:
    found = setup.simulate()
    plan = MemoryPlan(
        parts=_parts(found), phases=found.peaks, gpu=gpu, given={option: setup.size(option) for option in SIZES}
    )
    if not search:
        return plan
    usable = plan.usable
    largest = {} if usable is None else {option: largest_size(setup, option, usable, plan.phases) for option in SIZES}
    return replace(plan, largest=largest, levers=tuple(_levers(setup, plan)))


def _parts(found: Simulated) -> dict[str, int]:
    activations = {f"activations, {phase}": peak - found.lasting(phase) for phase, peak in found.peaks.items()}
    activations[f"activations, {SAMPLING}"] = max(0, activations[f"activations, {SAMPLING}"] - found.kv_cache)
    return {
        **found.standing,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "KV cache": found.kv_cache,
        **activations,
        "logits chunk": found.logits_chunk,
    }


# The largest sizes


def largest_size(setup: Setup, option: str, usable: int, phases: Mapping[str, int] | None = None) -> int:
    """The largest value of an option with which the run fits; 0 if it does not with 1.

    Args:
        setup: with the other options' values.
        option: one of :data:`SIZES`.
        usable: bytes.
        phases: peaks of the set-up as it is, where they are known: those that do not depend on the option have to fit.
    """
    known = dict(phases or {})
    if any(peak > usable for phase, peak in known.items() if phase not in SIZES[option]):
        return 0
    largest = limit = setup.limit(option)
    bare = setup.simulate(())
    for phase in sorted(SIZES[option], key=lambda phase: -known.get(phase, 0)):
        peak = _peak_of_phase(setup, option, phase, known)
        if largest == limit or peak(largest) > usable:  # what the largest phase allows fits in the others, mostly
            largest = largest_fitting(peak, usable, largest, setup.size(option), bare.lasting(phase))
        if not largest:
            break
    return largest


def _peak_of_phase(setup: Setup, option: str, phase: str, known: Mapping[str, int]) -> Callable[[int], int]:
    """A phase's peak with a value of the option."""

    @cache
    def peak(value: int) -> int:
        if phase in known and value == setup.size(option):
            return known[phase]
        return setup.with_size(option, value).peak((phase,))

    return peak


def largest_fitting(
    peak: Callable[[int], int], usable: int, limit: int, start: int = 1, nothing: int | None = None
) -> int:
    """The largest value, up to ``limit``, whose peak is not over ``usable``; 0 if there is none.

    Peaks grow about linearly, so the line through the two nearest values says where to look. That the answer fits was
    looked at; that one more does not was looked at too, or follows from that line.

    Args:
        peak: bytes with a value; grows with it.
        usable: bytes.
        limit: from 1 on.
        start: a value to begin with.
        nothing: about what a value of 0 would need, where that is known.
    """
    low, high = 0, limit + 1
    points: dict[int, int] = {}
    zero = {} if nothing is None else {0: nothing}
    guess = min(max(start, 1), limit)
    while high - low > 1:
        points[guess] = peak(guess)
        if points[guess] <= usable:
            low = guess
        else:
            high = guess
        wanted = _interpolated(points if len(points) > 1 else {**zero, **points}, usable, guess)
        if len(points) > 2 and wanted == low:
            return low
        if len(points) % 6 == 0:  # far from a line: halves end, too
            wanted = (low + high) // 2
        guess = min(max(wanted, low + 1), high - 1)
    return low


def _interpolated(points: Mapping[int, int], usable: int, guess: int) -> int:
    """Where the line through the two values whose peaks are nearest to ``usable`` reaches it."""
    if len(points) < 2:
        return guess * 2 if points[guess] <= usable else guess // 2
    one, other = sorted(points, key=lambda value: abs(points[value] - usable))[:2]
    slope = (points[other] - points[one]) / (other - one)
    return int(one + (usable - points[one]) // slope) if slope > 0 else guess * 2


# What saves memory


def _levers(setup: Setup, plan: MemoryPlan) -> list[Lever]:
    """What each option would change in the run's peak, the others being as they are."""
    config, shape = setup.config, setup.shape
    found: list[Lever] = []

    def lever(
        name: str, how: str, other: Setup, phases: Sequence[str], lasting: int = 0, only_less: bool = False
    ) -> None:
        """One that changes the phases, and what lasts by so many bytes in the others."""
        peak = max((size + lasting for phase, size in plan.phases.items() if phase not in phases), default=0)
        for phase in sorted(phases, key=lambda phase: -plan.phases[phase]):
            if plan.phases[phase] > peak or not only_less:  # others cannot be the peak
                peak = max(peak, other.peak((phase,)))
        found.append(Lever(name, how, plan.peak - peak))

    on = not config.gradient_checkpointing
    word = "on" if on else "off"
    flipped = replace(setup, config=changed(config, gradient_checkpointing=on))
    lever(f"gradient checkpointing {word}", f"gradient_checkpointing: {str(on).lower()}", flipped, (UPDATE,))
    if "8bit" not in str(config.optim):
        other = replace(setup, config=changed(config, optim="paged_adamw_8bit"))
        less = other.simulate(()).optimizer - plan.parts["optimizer"]
        lever("8-bit optimizer", "optim: paged_adamw_8bit", other, (), less)
    if shape.adapters.get(Role.VALUE) != SHARED:
        other = replace(setup, shape=replace(shape, adapters={**shape.adapters, Role.VALUE: SHARED}))
        bare = other.simulate(())
        less = sum(bare.standing.values()) + bare.optimizer - _lasting(plan)
        lever("shared value adapter", "value_adapter: shared", other, (UPDATE,), less)
    if chunk := config.logits_chunk_mib // 4:
        smaller = replace(setup, config=changed(config, logits_chunk_mib=chunk))
        lever("smaller logits chunk", f"logits_chunk_mib: {chunk}", smaller, (SCORING, UPDATE), only_less=True)
    for option, word in _WORDS.items():
        half = min(setup.size(option), setup.limit(option)) // 2
        if half:
            other = setup.with_size(option, half)
            lever(f"half the {word}", f"{option}: {half}", other, SIZES[option], only_less=True)
    return found


def _lasting(plan: MemoryPlan) -> int:
    """Weights, adapters, heads and the optimizer's state."""
    return sum(size for name, size in plan.parts.items() if name in STANDING or name.endswith(" adapter"))


_WORDS = {
    "per_device_train_batch_size": "micro-batch",
    "local_rollout_forward_batch_size": "sampling batch",
}
