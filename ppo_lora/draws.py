"""How tokens are drawn: random numbers that belong to a response and not to its batch, and what was drawn."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


def stream_seed(*numbers: int) -> int:
    """The seed of the stream of random numbers that ``numbers`` name."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**63
    return seed


def uniform_draws(rows: int, length: int, *stream: int) -> Tensor:
    """Uniform random numbers of a stream of their own; the global random numbers are left as they were.

    Args:
        rows: responses.
        length: tokens of the longest response.
        stream: numbers that name the stream.

    Returns:
        [rows, length] float64, on the CPU, from 0 to below 1.
    """
    generator = torch.Generator().manual_seed(stream_seed(*stream))
    return torch.rand(rows, length, generator=generator, dtype=torch.float64)


class InverseTransform(LogitsProcessor):
    """Makes greedy decoding sample: each row's next token is drawn with the row's own random number.

    The token is the first at which the cumulative distribution exceeds the number (inverse transform sampling), so
    what a row says does not depend on the rows beside it, and two models that agree say the same.

    Args:
        draws: [B, T] float64, uniform numbers, one a token.
        temperature: divides the logits.
        prompt_length: P, tokens before the first that is drawn.
    """

    def __init__(self, draws: Tensor, temperature: float, prompt_length: int):
        self._draws, self._temperature, self._prompt_length = draws, temperature, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [B, V] in, logits out that leave one token a row."""
        cumulative = (scores.double() / self._temperature).softmax(dim=-1).cumsum(dim=-1)
        numbers = self._draws[:, input_ids.shape[1] - self._prompt_length, None].to(scores.device)
        tokens = (cumulative <= numbers * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


class SampledLogprobs(LogitsProcessor):
    """Notes with which log-probability each token is sampled; holds the logits of one step and never of more.

    Args:
        temperature: divides the logits.
    """

    def __init__(self, temperature: float):
        self._temperature = temperature
        self._step: Tensor | None = None
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [B, V] in, the same out; ``input_ids`` end with the token that was drawn in the step before."""
        self._note(input_ids)
        self._step = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        return scores

    def of(self, sequences: Tensor) -> Tensor:
        """The log-probabilities of the tokens at the end of the finished ``sequences`` [B, P + T]: [B, T] float32."""
        self._note(sequences)
        return torch.stack(self._chosen, dim=1)

    def _note(self, sequences: Tensor) -> None:
        if self._step is not None:
            self._chosen.append(self._step.gather(1, sequences[:, -1:]).squeeze(1))
            self._step = None
