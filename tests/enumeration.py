"""Problems small enough that every response can be listed, so that everything has an exact value.

Nothing here uses ppo_lora's maths: log-probabilities come from the whole model's logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from builders import EOS, PAD

VOCABULARY = 8
LENGTH = 3


def all_responses() -> list[tuple[int, ...]]:
    """Every response of at most three tokens: ended by EOS, or cut at the limit. The pad id is a token like others."""
    others = [token for token in range(VOCABULARY) if token != EOS]
    ended = [(*body, EOS) for n in range(LENGTH) for body in itertools.product(others, repeat=n)]
    return ended + list(itertools.product(others, repeat=LENGTH))


def responses_batch(prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All responses to one prompt: sequences [N, P + 3] and their mask."""
    responses = all_responses()
    rows = [[*prompt, *response, *[PAD] * (LENGTH - len(response))] for response in responses]
    mask = [[True] * (len(prompt) + len(response)) + [False] * (LENGTH - len(response)) for response in responses]
    return torch.tensor(rows), torch.tensor(mask)


def reward_table(prompts: int, seed: int) -> Tensor:
    """A standard normal reward for each prompt and response, [prompts, N]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prompts, len(all_responses()), generator=generator)


def response_logprobs(model, prompt: Sequence[int]) -> Tensor:
    """log pi(y|x) of every response, [N], from the full logits of the model as it stands."""
    sequences, mask = responses_batch(prompt)
    logits = model(sequences, attention_mask=mask.long(), use_cache=False).logits.float()
    table = torch.log_softmax(logits, dim=-1)
    width = len(prompt)
    tokens = table[:, width - 1 : -1].gather(-1, sequences[:, width:, None]).squeeze(-1)
    return torch.where(mask[:, width:], tokens, 0.0).sum(dim=1)


def objective(logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, kl_coef: float) -> Tensor:
    """J(pi) = E[r] - kl_coef * KL(pi || pi_ref), exactly."""
    return (logprobs.exp() * (rewards - kl_coef * (logprobs - ref_logprobs))).sum()


def optimum(ref_logprobs: Tensor, rewards: Tensor, kl_coef: float) -> Tensor:
    """max J = kl_coef * log sum_y pi_ref(y) exp(r(y) / kl_coef)."""
    return kl_coef * torch.logsumexp(ref_logprobs + rewards / kl_coef, dim=0)
