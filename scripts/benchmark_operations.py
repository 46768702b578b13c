"""How many operations PPO needs, by arithmetic: for real tokens only, nothing computed twice. Pure functions.

A multiplication with an addition is two operations. Norms, activations, softmaxes and optimizers are left out: they
are linear in the hidden size where products are quadratic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama, and the LoRA rank of its adapters (on all linear layers but the output head).

    ``kv_width`` is the size of keys and of values where heads share them; 0 where they do not.
    """

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    rank: int
    kv_width: int = 0

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's products: queries, output, keys, values, gate, up, down."""
        hidden, wide, narrow = self.hidden, self.intermediate, self.cached
        return [(hidden, hidden)] * 2 + [(hidden, narrow)] * 2 + [(hidden, wide)] * 2 + [(wide, hidden)]

    @property
    def cached(self) -> int:
        """Numbers of one token's keys, and of its values, in a layer."""
        return self.kv_width or self.hidden

    @property
    def weights(self) -> int:
        """Weights of all layers' products."""
        return self.layers * sum(wide * high for wide, high in self.linears)

    @property
    def adapter_weights(self) -> int:
        """Weights of one LoRA adapter."""
        return self.layers * sum(self.rank * (wide + high) for wide, high in self.linears)

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.hidden * self.vocab


@dataclass(frozen=True)
class Rollout:
    """Real tokens of an iteration's rows: prompts' and responses' (stop token included)."""

    prompts: Sequence[int]
    responses: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """Tokens of each row."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(self.rows)

    @property
    def response_tokens(self) -> int:
        """Those that are trained on."""
        return sum(self.responses)


def attention(shape: Shape, rows: Sequence[int]) -> int:
    """Forward: scores and weighted values, 4 n^2 h a layer, of which a causal model needs half."""
    return sum(2 * shape.layers * shape.hidden * length**2 for length in rows)


def forward(shape: Shape, rollout: Rollout, adapter: bool = True, head: bool = False) -> int:
    """One pass over all rows; ``head``: with the output head at the response tokens."""
    weights = shape.weights + (shape.adapter_weights if adapter else 0)
    logits = 2 * shape.head_weights * rollout.response_tokens if head else 0
    return 2 * weights * rollout.tokens + attention(shape, rollout.rows) + logits


def lora_backward(shape: Shape, rollout: Rollout, head: bool = False) -> int:
    """Backward through frozen weights to the adapters.

    Frozen weights need the gradient of their inputs only, adapters that of their weights too. Below the first layer's
    queries, keys and values nothing is trained, so they need no gradient of their inputs.
    """
    first = shape.hidden * (shape.hidden + 2 * shape.cached + 3 * shape.rank)
    a_token = 2 * shape.weights + 4 * shape.adapter_weights - 2 * first
    logits = 2 * shape.head_weights * rollout.response_tokens if head else 0
    return a_token * rollout.tokens + 2 * attention(shape, rollout.rows) + logits


def full_backward(shape: Shape, rollout: Rollout) -> int:
    """Backward where all weights of the layers are trained, the embeddings too (a gather, not counted)."""
    return 4 * shape.weights * rollout.tokens + 2 * attention(shape, rollout.rows)


def scalar_head(shape: Shape, rollout: Rollout) -> int:
    """Forward and backward of a value head at the response tokens."""
    return 6 * shape.hidden * rollout.response_tokens


def update(shape: Shape, rollout: Rollout, value: str) -> dict[str, int]:
    """One epoch's update of policy and value.

    Args:
        shape: of the base.
        rollout: what is trained on.
        value: ``separate`` (an adapter of its own), ``shared`` (the policy's adapter: one pass for both, counted as
            the policy's) or ``full`` (a model of its own, all of it trained).

    Returns:
        Operations of ``policy_update`` and ``value_update``.
    """
    policy = forward(shape, rollout, head=True) + lora_backward(shape, rollout, head=True)
    own_head = scalar_head(shape, rollout)
    if value == "shared":
        return {"policy_update": policy + own_head, "value_update": 0}
    if value == "full":
        passes = forward(shape, rollout, adapter=False) + full_backward(shape, rollout)
    else:
        passes = forward(shape, rollout) + lora_backward(shape, rollout)
    return {"policy_update": policy, "value_update": passes + own_head}


def scoring(shape: Shape, rollout: Rollout) -> int:
    """Policy, reference (no adapter), value and reward over all rows; heads of the first two at response tokens."""
    texts = forward(shape, rollout, head=True) + forward(shape, rollout, adapter=False, head=True)
    return texts + 2 * forward(shape, rollout)


@dataclass(frozen=True)
class Machine:
    """What was measured, and how numbers are held.

    Attributes:
        rate: operations a second.
        bandwidth: bytes a second.
        number_bytes: bytes of one number: activations, cache, adapters, output head.
        weight_bytes: bytes of one weight of the layers; less where they are quantized.
    """

    rate: float
    bandwidth: float
    number_bytes: float = 4
    weight_bytes: float = 4


def sampling_seconds(shape: Shape, rollout: Rollout, machine: Machine) -> float:
    """The least time of sampling: each step takes its operations or its bytes, whichever take longer.

    Bytes are the weights, read once a step for all rows that still answer, and their keys and values. The last token
    of a response is never fed back.
    """
    weights, head = shape.weights + shape.adapter_weights, shape.head_weights
    a_row = 2 * (weights + head)
    all_bytes = machine.weight_bytes * shape.weights + machine.number_bytes * (shape.adapter_weights + head)
    prompts = 2 * weights * sum(rollout.prompts) + attention(shape, rollout.prompts)
    seconds = max((prompts + 2 * head * len(rollout.prompts)) / machine.rate, all_bytes / machine.bandwidth)
    for step in range(1, max(rollout.responses)):
        live = [prompt for prompt, length in zip(rollout.prompts, rollout.responses, strict=True) if length > step]
        seen = sum(live) + step * len(live)
        operations = len(live) * a_row + 4 * shape.layers * shape.hidden * seen
        cache = 2 * shape.layers * shape.cached * seen * machine.number_bytes
        seconds += max(operations / machine.rate, (all_bytes + cache) / machine.bandwidth)
    return seconds


def floors(shape: Shape, rollout: Rollout, epochs: int, value: str, machine: Machine) -> dict[str, float]:
    """The least seconds of each phase of an iteration at the measured rate and bandwidth; see the functions above."""
    updates = {name: epochs * count / machine.rate for name, count in update(shape, rollout, value).items()}
    sampling = sampling_seconds(shape, rollout, machine)
    return {"sampling": sampling, "scoring": scoring(shape, rollout) / machine.rate, **updates}
