"""The quickstart's verdict: reviews of held-out products by the SFT policy and by PPO's, on one loaded base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_lora import Role, SharedBase
from quickstart_data import gold_score


@dataclass(frozen=True)
class Reviews:
    """What one policy wrote about the held-out products, and how it was judged.

    Args:
        prompts: one a review.
        texts: the reviews.
        scores: the reward model's, one a review.
        golds: the gold rule's, one a review.
        kl: mean over reviews of log p_policy - log p_reference, in nats a review.
        length: mean number of tokens, the stop token included.
    """

    prompts: list[str]
    texts: list[str]
    scores: list[float]
    golds: list[float]
    kl: float
    length: float

    @property
    def score(self) -> float:
        """The reward model's mean score."""
        return mean(self.scores)

    @property
    def gold(self) -> float:
        """The gold rule's mean score."""
        return mean(self.golds)

    @property
    def distinct(self) -> int:
        """The number of different reviews."""
        return len(set(self.texts))


def response_mask(responses: Tensor, eos_token_id: int) -> Tensor:
    """Return [B, T] bool, True up to and including the first stop token of `responses` [B, T]."""
    stops = (responses == eos_token_id).long()
    return stops.cumsum(1) - stops == 0


def write_reviews(
    base: SharedBase,
    tokenizer: PreTrainedTokenizerBase,
    role: Role,
    prompts: Sequence[str],
    max_new_tokens: int,
    seed: int,
) -> Reviews:
    """Sample one review a prompt under `role` (policy or reference), and judge it."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    torch.manual_seed(seed)
    sequences = base.generate(**batch, role=role, do_sample=True, temperature=1.0, max_new_tokens=max_new_tokens)
    responses = sequences[:, batch["input_ids"].shape[1] :]
    mask = response_mask(responses, tokenizer.eos_token_id)
    attention_mask = torch.cat([batch["attention_mask"].bool(), mask], dim=1)
    texts = tokenizer.batch_decode(responses.masked_fill(~mask, tokenizer.pad_token_id), skip_special_tokens=True)
    with torch.no_grad():
        scores = base.scores(sequences, attention_mask)
        logprobs, ref_logprobs = (
            base.logprobs(each, sequences, attention_mask, responses.shape[1]) for each in (role, Role.REFERENCE)
        )
    return Reviews(
        prompts=list(prompts),
        texts=texts,
        scores=scores.tolist(),
        golds=[gold_score(text) for text in texts],
        kl=(logprobs - ref_logprobs).sum(1).mean().item(),
        length=mask.sum(1).float().mean().item(),
    )
