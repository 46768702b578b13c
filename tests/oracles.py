"""The maths of PPO a second time: plain loops over lists and floats, written from the definitions.

Nothing here imports ppo_lora or torch. A row is a list with one entry a token; a batch is a list of rows; in a mask
True is a real token. Masked positions of a result are 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Row = Sequence[float]
Mask = Sequence[bool]


def log_softmax(logits: Row) -> list[float]:
    """log(exp(x_i) / sum_j exp(x_j)), with the largest logit taken out first."""
    largest = max(logits)
    log_total = math.log(sum(math.exp(x - largest) for x in logits))
    return [x - largest - log_total for x in logits]


def token_logprob(logits: Row, token: int, temperature: float = 1.0) -> float:
    return log_softmax([x / temperature for x in logits])[token]


def entropy(logits: Row, temperature: float = 1.0) -> float:
    """-sum_i p_i log p_i, where a probability of 0 adds nothing."""
    total = 0.0
    for log_p in log_softmax([x / temperature for x in logits]):
        if log_p > -math.inf:
            total -= math.exp(log_p) * log_p
    return total


def kl_penalty(logprob: float, ref_logprob: float, estimator: str) -> float:
    """Schulman's k1, k2, k3 from the ratio q / p of reference and policy probability."""
    log_q_over_p = ref_logprob - logprob
    if estimator == "k1":
        return -log_q_over_p
    if estimator == "k2":
        return log_q_over_p**2 / 2
    assert estimator == "k3"
    return math.exp(log_q_over_p) - 1 - log_q_over_p


def token_rewards(
    score: float, logprobs: Row, ref_logprobs: Row, mask: Mask, kl_coef: float, estimator: str
) -> list[float]:
    """One row: the penalty at each real token, the score on top at the last of them."""
    rewards = [0.0] * len(mask)
    last = None
    for t in range(len(mask)):
        if mask[t]:
            rewards[t] = -kl_coef * kl_penalty(logprobs[t], ref_logprobs[t], estimator)
            last = t
    if last is not None:
        rewards[last] += score
    return rewards


def gae(rewards: Row, values: Row, mask: Mask, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """One row: A_t = sum_l (gamma * lam)^l delta_{t+l}, the sum written out, and the returns A_t + V_t."""
    length = sum(mask)
    assert all(mask[:length]), "real tokens come first"
    deltas = []
    for t in range(length):
        next_value = values[t + 1] if t + 1 < length else 0.0
        deltas.append(rewards[t] + gamma * next_value - values[t])
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for t in range(length):
        advantages[t] = math.fsum((gamma * lam) ** step * deltas[t + step] for step in range(length - t))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def discounted_return(rewards: Row, mask: Mask, gamma: float, t: int) -> float:
    """What is still to come from token t on: sum_l gamma^l r_{t+l} over the real tokens."""
    return math.fsum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards)) if mask[s])


def running_normalized(batches: Sequence[Row], epsilon: float = 2.0**-23) -> list[list[float]]:
    """Each batch by the mean and standard deviation of all numbers up to its end, taken over all of them anew."""
    seen: list[float] = []
    results = []
    for batch in batches:
        seen += batch
        mean = math.fsum(seen) / len(seen)
        variance = math.fsum((x - mean) ** 2 for x in seen) / (len(seen) - 1) if len(seen) > 1 else 0.0
        std = math.sqrt(variance)
        results.append([(x - mean) / std if std > epsilon * abs(mean) else x - mean for x in batch])
    return results


def overlong_penalty(length: int, max_length: int, buffer_length: int, penalty: float) -> float:
    """DAPO's equation 13, case by case, with the sign of a penalty."""
    if length <= max_length - buffer_length:
        return 0.0
    if length <= max_length:
        return penalty * (length - (max_length - buffer_length)) / buffer_length
    return penalty


def kept(batch: Sequence[Row], mask: Sequence[Mask]) -> list[float]:
    """The real entries of a batch, one after the other."""
    return [x for row, real in zip(batch, mask, strict=True) for x, r in zip(row, real, strict=True) if r]


def masked_mean(batch: Sequence[Row], mask: Sequence[Mask]) -> float:
    real = kept(batch, mask)
    return math.fsum(real) / len(real) if real else 0.0


def masked_var(batch: Sequence[Row], mask: Sequence[Mask]) -> float:
    """Unbiased: divided by n - 1."""
    real = kept(batch, mask)
    if len(real) < 2:
        return 0.0
    mean = math.fsum(real) / len(real)
    return math.fsum((x - mean) ** 2 for x in real) / (len(real) - 1)


def masked_whiten(
    batch: Sequence[Row], mask: Sequence[Mask], shift_mean: bool = True, epsilon: float = 1e-8
) -> list[list[float]]:
    mean, scale = masked_mean(batch, mask), math.sqrt(masked_var(batch, mask) + epsilon)
    offset = 0.0 if shift_mean else mean
    return [
        [(x - mean) / scale + offset if r else 0.0 for x, r in zip(row, real, strict=True)]
        for row, real in zip(batch, mask, strict=True)
    ]


def policy_loss(
    logprobs: Sequence[Row],
    old_logprobs: Sequence[Row],
    advantages: Sequence[Row],
    mask: Sequence[Mask],
    cliprange: float,
) -> tuple[float, float]:
    """Minus the mean of min(ratio * A, clip(ratio) * A), and the share of tokens where the clip takes the gradient."""
    surrogates, clipped = [], 0
    columns = (kept(batch, mask) for batch in (logprobs, old_logprobs, advantages))
    for new, old, advantage in zip(*columns, strict=True):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - cliprange), 1 + cliprange)
        surrogates.append(min(ratio * advantage, bounded * advantage))
        clipped += (advantage > 0 and ratio > 1 + cliprange) or (advantage < 0 and ratio < 1 - cliprange)
    return -math.fsum(surrogates) / len(surrogates), clipped / len(surrogates)


def value_loss(
    values: Sequence[Row],
    old_values: Sequence[Row],
    returns: Sequence[Row],
    mask: Sequence[Mask],
    cliprange_value: float,
) -> tuple[float, float]:
    """0.5 * mean of the larger of two squared errors, and the share of tokens where the clipped one is larger."""
    errors, clipped = [], 0
    columns = (kept(batch, mask) for batch in (values, old_values, returns))
    for value, old, target in zip(*columns, strict=True):
        near = old + min(max(value - old, -cliprange_value), cliprange_value)
        errors.append(max((value - target) ** 2, (near - target) ** 2))
        clipped += (near - target) ** 2 > (value - target) ** 2
    return 0.5 * math.fsum(errors) / len(errors), clipped / len(errors)


def distinct_n(texts: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams over n-grams, counted one by one."""
    seen: list[list[int]] = []
    total = 0
    for text in texts:
        for start in range(len(text)):
            gram = list(text[start : start + n])
            if len(gram) == n:
                total += 1
                if gram not in seen:
                    seen.append(gram)
    return len(seen) / total if total else 0.0


def win_rate(scores_a: Row, scores_b: Row) -> float:
    """One prompt: wins and half of the ties over all pairs."""
    wins = 0.0
    for a in scores_a:
        for b in scores_b:
            wins += 1.0 if a > b else 0.5 if a == b else 0.0
    return wins / (len(scores_a) * len(scores_b))


def best_of_n(scores: Row, n: int) -> float:
    """One prompt: the mean of the largest score over every set of n samples."""
    largest = [max(chosen) for chosen in itertools.combinations(scores, n)]
    return math.fsum(largest) / len(largest)
