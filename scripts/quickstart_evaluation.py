"""The quickstart's verdict: reviews of held-out products by the SFT policy and by PPO's, on one loaded base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from datasets import Dataset

from ppo_lora import Adapter, Evaluation, EvaluationConfig, evaluate_policies, load_policies
from quickstart_data import gold_reward


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


def write_reviews(
    nf4: Path,
    policies: Mapping[str, str | Adapter],
    reward: str | Adapter,
    rows: Sequence[dict[str, str]],
    config: EvaluationConfig,
) -> dict[str, Reviews]:
    """Return what each policy writes to the prompts of `rows`, judged; the KL is measured from the first policy."""
    base = load_policies(str(nf4), policies, config, reward=reward)
    names = list(policies)
    evaluation = evaluate_policies(base, names, Dataset.from_list(list(rows)), [gold_reward], config, names[0])
    return {name: _reviews(evaluation, name) for name in names}


def _reviews(evaluation: Evaluation, policy: str) -> Reviews:
    samples = evaluation.policies[policy]
    pairs = zip(evaluation.prompts, samples.completions, strict=True)
    return Reviews(
        prompts=[prompt for prompt, texts in pairs for _ in texts],
        texts=[text for texts in samples.completions for text in texts],
        scores=samples.scores["reward_adapter"].flatten().tolist(),
        golds=samples.scores["gold_reward"].flatten().tolist(),
        kl=samples.kl.mean().item(),
        length=samples.lengths.mean().item(),
    )
