"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding all the logits.

The rows go through the output head in chunks. Where a gradient is wanted, the chunk's own gradient with respect to
its hidden states is taken while its logits are at hand: the log-probability of a token depends on that token's hidden
state alone, so one [N, H] tensor is all that backward needs and the head is never run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**23
"""Logits held at once, in numbers: 32 MiB of float32, of which there are two while a chunk is worked on."""

Head = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    temperature: float = 1.0,
    *,
    vocab_size: int,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature) at ``tokens``, and the entropy of that distribution.

    The log-probabilities are differentiable once with respect to ``hidden``, the entropies only when asked for. The
    head must be frozen: it gets no gradient here.

    Args:
        hidden: [N, H] float, the states that predict ``tokens``.
        head: maps [n, H] to logits [n, V]; every row independently of the others.
        tokens: [N] int64.
        temperature: divides the logits, as in sampling.
        vocab_size: V, which sizes the chunks.
        entropy_gradient: let gradients flow through the entropies too (one more product with the head).
        chunk_elements: upper bound of the numbers in one chunk of logits. A chunk never holds more than half the rows.

    Returns:
        ``(logprobs, entropy)``, each [N] float32, in nats.
    """
    size = max(1, min(chunk_elements // vocab_size, -(-hidden.shape[0] // 2)))
    if torch.is_grad_enabled() and hidden.requires_grad:
        logprobs, entropy = _TokenLogprobs.apply(hidden, head, tokens, temperature, size, entropy_gradient)
        return logprobs, entropy
    room: list[Tensor] = []
    pieces = [
        _statistics(head(hidden[rows]), tokens[rows], temperature, room)[:2] for rows in _slices(len(tokens), size)
    ]
    logprobs, entropy = (_joined(column, hidden) for column in _columns(pieces, 2))
    return logprobs, entropy


@torch.no_grad()
def vocabulary_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    head: Head,
    temperature: float = 1.0,
    *,
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """KL(p || q) over the vocabulary, p from ``hidden`` and q from ``ref_hidden``, in chunks.

    Args:
        hidden, ref_hidden: [N, H] float.
        head: maps [n, H] to logits [n, V].
        temperature: divides the logits.
        vocab_size: V, which sizes the chunks.
        chunk_elements: upper bound of the numbers in one chunk of both logits.

    Returns:
        [N] float32, in nats.
    """
    size = max(1, chunk_elements // (2 * vocab_size))
    pieces = []
    for rows in _slices(len(hidden), size):
        log_p, log_q = (
            torch.log_softmax(head(states[rows]).float() / temperature, dim=-1) for states in (hidden, ref_hidden)
        )
        pieces.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
    return _joined(pieces, hidden)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]


def _columns(pieces: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    return [[piece[i] for piece in pieces] for i in range(count)]


def _joined(chunks: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(chunks) if chunks else like.new_zeros(0, dtype=torch.float32)


def _statistics(
    logits: Tensor, tokens: Tensor, temperature: float, room: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies [n] of one chunk, the whole log-softmax and softmax [n, V], float32.

    Overwrites ``logits``: no output head needs its own output in backward. The first chunk leaves its log-softmax in
    ``room`` for the next ones to write into, since fresh memory of that size costs the system as much as the numbers.
    """
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled.div_(temperature)
    if not room:
        room.append(torch.empty_like(scaled))
    log_softmax = torch.log_softmax(scaled, dim=-1, out=room[0][: len(scaled)])
    probabilities = torch.exp(log_softmax, out=scaled)
    chosen = log_softmax.gather(-1, tokens[:, None]).squeeze(-1)
    log_softmax.clamp_(min=torch.finfo(torch.float32).min)  # 0 * log 0 is 0
    with torch.autocast(scaled.device.type, enabled=False):
        entropy = -torch.bmm(probabilities[:, None], log_softmax[:, :, None]).flatten()
    return chosen, entropy, log_softmax, probabilities


def _chunk(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    temperature: float,
    room: list[Tensor],
    slopes: Tensor,
    entropy_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [n] of one chunk, whose logits are gone afterwards; writes their gradients with
    respect to ``hidden`` [n, H] into ``slopes`` and ``entropy_slopes``."""
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        logits = head(leaf)
    chosen, entropy, log_softmax, probabilities = _statistics(logits.detach(), tokens, temperature, room)
    if entropy_slopes is not None:
        slope = _entropy_slope(log_softmax, probabilities, entropy, temperature).to(logits.dtype)
        entropy_slopes.copy_(torch.autograd.grad(logits, leaf, slope, retain_graph=True)[0])
    slope = _negative_slope(probabilities, tokens).to(logits.dtype)
    torch.div(torch.autograd.grad(logits, leaf, slope)[0], -temperature, out=slopes)
    return chosen, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Chunked log-probabilities whose gradients with respect to the hidden states are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, tokens: Tensor, temperature: float, size: int, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        slopes = torch.empty_like(hidden)
        entropy_slopes = torch.empty_like(hidden) if entropy_gradient else None
        pieces: list[tuple[Tensor, Tensor]] = []
        room: list[Tensor] = []
        for rows in _slices(len(tokens), size):
            of_entropy = None if entropy_slopes is None else entropy_slopes[rows]
            pieces.append(_chunk(hidden[rows], head, tokens[rows], temperature, room, slopes[rows], of_entropy))
        ctx.save_for_backward(slopes, entropy_slopes)
        logprobs, entropy = (_joined(column, hidden) for column in _columns(pieces, 2))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        slopes, entropy_slopes = ctx.saved_tensors
        gradient = logprob_gradient[:, None] * slopes
        if entropy_slopes is not None:
            gradient = gradient + entropy_gradient[:, None] * entropy_slopes
        return gradient.to(slopes.dtype), None, None, None, None, None


def _negative_slope(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """p - onehot_a, [n, V], which is -temperature * d log p_a / d logits; overwrites ``probabilities``.

    A head's gradient is linear in it, so that the factor can wait for the [n, H] that comes of it.
    """
    return probabilities.scatter_add_(-1, tokens[:, None], torch.full_like(probabilities[:, :1], -1.0))


def _entropy_slope(log_softmax: Tensor, probabilities: Tensor, entropy: Tensor, temperature: float) -> Tensor:
    """d H / d logits = -p * (log p + H) / temperature, [n, V]; overwrites ``log_softmax``."""
    return log_softmax.add_(entropy[:, None]).mul_(probabilities).div_(-temperature)
