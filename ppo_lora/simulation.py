"""The phases of an iteration run on shapes alone, for what they allocate.

The passes are the library's own (``score_rows``, ``PolicyValueUpdate``); sampling is one prefill and one step at the
longest cache.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from . import logprobs
from .config import PPOConfig
from .fake_operations import FakeOperations
from .kv_cache import ROOM, give_room, held
from .live_bytes import LiveBytes
from .metrics import RunningMeans
from .packing import tell_rows_apart
from .planned_base import KERNELS, BaseShape, PlannedBase
from .roles import Role
from .rollout import score_rows
from .rows import Rows
from .sampling import DecodeLoop
from .shared_base import SharedBase
from .standing import optimizer_state, standing_bytes, tensor_size, trainable
from .types import Experience, Rollout
from .update import MicroBatch, PolicyValueUpdate

SAMPLING, SCORING, UPDATE = "sampling", "scoring", "update"
PHASES = (SAMPLING, SCORING, UPDATE)

_FEW, _MORE = 2, 3
"""Layers that are run in place of more where all are alike: what is needed grows with each by the same amount."""


@dataclass(frozen=True)
class Simulated:
    """Bytes of one set-up.

    Attributes:
        standing: what is there all the time, by part.
        gradients: of adapters and heads.
        optimizer: its state.
        peaks: alive at the most in each phase, all of the above in it where it is there.
        kv_cache: keys and values of a sampling batch at full length.
        logits_chunk: what one micro-batch's log-probabilities need besides the states.
    """

    standing: dict[str, int]
    gradients: int
    optimizer: int
    peaks: dict[str, int]
    kv_cache: int
    logits_chunk: int

    def lasting(self, phase: str) -> int:
        """Bytes that are there through the whole of a phase."""
        return sum(self.standing.values()) + self.optimizer + (self.gradients if phase == UPDATE else 0)

    def extrapolated(self, more: Simulated, steps: float) -> Simulated:
        """What ``steps`` times the difference to ``more`` beyond it comes to.

        Args:
            more: the same with more layers.
            steps: how many times as many again.
        """

        def beyond(one: int, other: int) -> int:
            return round(other + steps * (other - one))

        return Simulated(
            standing={name: beyond(self.standing[name], more.standing[name]) for name in more.standing},
            gradients=beyond(self.gradients, more.gradients),
            optimizer=beyond(self.optimizer, more.optimizer),
            peaks={name: beyond(self.peaks[name], more.peaks[name]) for name in more.peaks},
            kv_cache=beyond(self.kv_cache, more.kv_cache),
            logits_chunk=more.logits_chunk,
        )


class Simulator:
    """Runs phases. What it built and what operations return is kept for the next time.

    Args:
        device: whose kernels are to be counted, "cpu" or "cuda"; it need not be there for "cpu".
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._mode, self._operations = FakeTensorMode(), FakeOperations()
        self._uniform: dict[int, tuple[BaseShape, bool]] = {}
        self._bases: dict[tuple[int, int, bool], tuple[BaseShape, PlannedBase]] = {}

    def simulate(
        self, shape: BaseShape, config: PPOConfig, prompt_length: int, phases: Sequence[str] = PHASES
    ) -> Simulated:
        """Run the phases and say what they need. Of many layers that are all alike only some are run.

        Args:
            shape: of the base and its adapters.
            config: sizes, losses, optimizer.
            prompt_length: tokens of the longest prompt.
            phases: those that are wanted.
        """
        if shape.layers <= _MORE or not self._is_uniform(shape):
            return self.simulate_layers(shape, shape.layers, config, prompt_length, phases)
        few, more = (self.simulate_layers(shape, count, config, prompt_length, phases) for count in (_FEW, _MORE))
        return few.extrapolated(more, (shape.layers - _MORE) / (_MORE - _FEW))

    def simulate_layers(
        self, shape: BaseShape, layers: int, config: PPOConfig, prompt_length: int, phases: Sequence[str] = PHASES
    ) -> Simulated:
        """The same, of a base with so many layers, all of them."""
        base = self._base(shape, layers, config)
        base.chunk_elements = config.logits_chunk_mib * 2**18
        live = LiveBytes(KERNELS, scalar=False, operate=self._operations)
        with self._mode, live, _no_cyclic_garbage(), _few_chunks(), _no_casts_told():
            standing = standing_bytes(live, base)
            optimizer = optimizer_state(base, config)
            state = [torch.empty(optimizer, dtype=torch.uint8, device=self.device)]
            run = _Phases(live, base, config, prompt_length, self.device)
            kv_cache = run.sampling() if SAMPLING in phases else 0
            if SCORING in phases:
                run.scoring()
            if UPDATE in phases:
                run.update()
            chunk = run.logits_chunk()
            del state
        gradients = sum(tensor_size(p) for p in trainable(base))
        peaks = {name: peak for name, peak in live.peaks.items() if name in phases}
        return Simulated(standing, gradients, optimizer, peaks, kv_cache, chunk)

    def _is_uniform(self, shape: BaseShape) -> bool:
        if id(shape) not in self._uniform:
            self._uniform[id(shape)] = shape, shape.is_uniform  # an id stands for a shape as long as it is there
        return self._uniform[id(shape)][1]

    def _base(self, shape: BaseShape, layers: int, config: PPOConfig) -> PlannedBase:
        key = (id(shape), layers, bool(config.gradient_checkpointing))
        if key not in self._bases:
            fewer = shape if layers == shape.layers else shape.with_layers(layers)
            base = PlannedBase(fewer, self._mode, self.device)
            if config.gradient_checkpointing:
                base.activation_checkpointing_enable(config.gradient_checkpointing_kwargs or {})
            self._bases[key] = shape, base
        return self._bases[key][1]


@contextmanager
def _no_cyclic_garbage() -> Iterator[None]:
    """What reference counts do not free is freed when the collector comes by: too late to be a part of the plan."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _no_casts_told() -> Iterator[None]:
    """bitsandbytes warns at every int8 product of other inputs than float16; the run will say it often enough."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _few_chunks() -> Iterator[None]:
    """Of the chunks of logits, which need all the same, run three."""
    slices, joined = logprobs._slices, logprobs._joined
    logprobs._slices = lambda total, size: slices(total, size)[:3]
    logprobs._joined = lambda chunks, like: like.new_empty(len(like), dtype=torch.float32)
    try:
        yield
    finally:
        logprobs._slices, logprobs._joined = slices, joined


class _Phases:
    """The phases on one base.

    Args:
        live: counts.
        base: the roles.
        config: sizes.
        prompt_length: P.
        device: where everything is.
    """

    def __init__(self, live: LiveBytes, base: SharedBase, config: PPOConfig, prompt_length: int, device: torch.device):
        self._live, self._base, self._config, self._device = live, base, config, device
        self._prompt, self._response = prompt_length, config.max_completion_length

    @torch.no_grad()
    def sampling(self) -> int:
        """Prefill, then the step in which the cache grows the last time, and one at its end; the cache's bytes."""
        base, rows, device = self._base, self._batch, self._device
        length = self._prompt + self._response
        base._set_checkpointing_layers(False)
        with self._live.phase(SAMPLING), base.role(Role.POLICY), base._precision():
            draws = torch.empty(rows, self._response, dtype=torch.float64, device=device)
            mask = self._mask(rows, length).long()
            every, running = torch.zeros(rows, dtype=torch.long, device=device), self._mask(rows, 1)[:, 0]
            loop = DecodeLoop(
                base.backbone,
                base._output_head,
                mask[:, : self._prompt],
                draws,
                self._config.temperature,
                [0],
                0,
                base._takes_positions,
            )
            cache = DynamicCache(config=base.config)
            give_room(cache, length - 1)
            prompts, seen = self._tokens(rows, self._prompt), mask[:, : self._prompt]
            loop.next_tokens(prompts, seen, torch.zeros_like(prompts), cache, every, running, 0)
            last = self._tokens(rows, 1)
            for tokens in (*range(self._prompt + ROOM, length - 1, ROOM + 1)[-1:], length - 2):
                for layer in cache.layers:
                    layer.keys, layer.values = (_of_length(part, tokens) for part in held(layer))
                loop.next_tokens(last, mask[:, : tokens + 1], torch.zeros_like(last), cache, every, running, 0)
            size = sum(tensor_size(part) for layer in cache.layers for part in held(layer))
        return size

    def scoring(self) -> None:
        """The passes over one batch of finished rows; the reward adapter's needs no more than the policy's."""
        config, rows = self._config, self._batch
        with self._live.phase(SCORING):
            rollout = self._rollout(max(rows, config.local_batch_size))
            score_rows(self._base, self._full_rows(rows), config)
            del rollout

    def update(self) -> None:
        """A micro-batch's forward and backward passes, with the gradients of those before it."""
        config, base, rows = self._config, self._base, self._micro_batch
        with self._live.phase(UPDATE):
            for parameter in trainable(base):
                parameter.grad = torch.empty_like(parameter)
            experience = self._experience(config.local_batch_size)
            piece = Experience(
                **{item.name: getattr(experience, item.name)[:rows].clone() for item in fields(Experience)}
            )
            weights, portion = torch.zeros_like(piece.logprobs), torch.zeros((), device=self._device)
            batch = MicroBatch(piece, weights, portion)
            vars(batch)["rows"] = self._full_rows(rows)
            update = PolicyValueUpdate(base, config, _Alone(self._device), RunningMeans())
            update.begin_iteration(config.value_warmup_iterations)
            update.gradients(base, [batch])
            if config.ptx_coef:
                self._pretraining()
            for parameter in trainable(base):
                parameter.grad = None

    def _pretraining(self) -> None:
        config = self._config
        rows = min(config.per_device_train_batch_size, config.ptx_batch_size or config.per_device_train_batch_size)
        logprobs, _ = self._base(Role.POLICY, self._rows(rows, 1, config.ptx_max_length - 1))
        (-logprobs.sum()).backward()

    def logits_chunk(self) -> int:
        """What log-probabilities with gradients need besides the states of a micro-batch's responses."""
        base, count = self._base, self._micro_batch * self._response
        head = base._output_head
        dtype = base.compute_dtype
        with self._live.phase("chunk"):
            states = torch.empty(
                count, base._hidden_size, device=self._device, dtype=dtype, requires_grad=torch.is_grad_enabled()
            )
            before = self._live.now
            self._live.peaks["chunk"] = 0
            with base._precision():
                logprobs.token_logprobs(
                    states,
                    head,
                    self._tokens(1, count)[0],
                    1.0,
                    vocab_size=head.vocab_size,
                    chunk_elements=base.chunk_elements,
                )
        return max(self._live.peaks["chunk"] - before, 0)

    @property
    def _batch(self) -> int:
        return min(self._config.local_rollout_forward_batch_size, self._config.local_batch_size)

    @property
    def _micro_batch(self) -> int:
        """Rows of full length in a micro-batch."""
        config, tokens = self._config, self._config.max_tokens_per_micro_batch
        if tokens is None:
            return config.per_device_train_batch_size
        return min(config.mini_batch_size, max(1, tokens // (self._prompt + self._response)))

    def _full_rows(self, rows: int) -> Rows:
        """Prompts and responses of full length. Packing them would change nothing, but where attention that cannot
        tell them apart is to pack."""
        masked = bool(self._config.pack_sequences) and not tell_rows_apart(self._base.model)
        return self._rows(rows, self._prompt, self._response, masked)

    def _rows(self, rows: int, prompt: int, response: int, packed: bool = False) -> Rows:
        """What a pass over rows without padding reads."""
        ids, last = self._tokens(rows, prompt + response), self._tokens(1, rows)[0]
        predictors, tokens, places = (self._tokens(1, rows * response)[0] for _ in range(3))
        positions = None
        if packed:
            ids = ids.reshape(1, -1)
            positions = torch.zeros_like(ids)
        return Rows(ids, last, predictors, tokens, places, (rows, response), positions)

    def _tokens(self, rows: int, length: int) -> Tensor:
        return torch.zeros(rows, length, dtype=torch.long, device=self._device)

    def _mask(self, rows: int, length: int) -> Tensor:
        return torch.ones(rows, length, dtype=torch.bool, device=self._device)

    def _rollout(self, rows: int) -> Rollout:
        length = self._prompt + self._response
        mask = self._mask(rows, length)
        return Rollout(
            sequences=self._tokens(rows, length),
            attention_mask=mask,
            response_mask=self._mask(rows, self._response),
            stopped=self._mask(rows, 1)[:, 0],
        )

    def _experience(self, rows: int) -> Experience:
        rollout = self._rollout(rows)
        floats = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
        scores = torch.zeros(rows, device=self._device)
        return Experience(
            sequences=rollout.sequences,
            attention_mask=rollout.attention_mask,
            response_mask=rollout.response_mask,
            scores=scores,
            kl_weights=torch.zeros_like(scores),
            **{name: torch.zeros(rows, self._response, device=self._device) for name in floats},
        )


class _Alone:
    """What the update asks of an accelerator, for one process."""

    num_processes = 1
    distributed_type = DistributedType.NO

    def __init__(self, device: torch.device):
        self.device = device

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return tensor


def _of_length(part: Tensor, tokens: int) -> Tensor:
    """Keys or values, [B, heads, L, size], of so many positions."""
    batch, heads, length, size = part.shape
    return part[:, :, :tokens] if tokens <= length else part.new_empty(batch, heads, tokens, size)


def changed(config: PPOConfig, **changes: Any) -> PPOConfig:
    """A copy with other values, which are not checked against each other again."""
    made = copy.copy(config)
    for name, value in changes.items():
        setattr(made, name, value)
    return made
