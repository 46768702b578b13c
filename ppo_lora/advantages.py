"""Generalized advantage estimation, and what corrects advantages where sampling and training differ."""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantage_estimation(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token.

    delta_t = r_t + gamma * V(s_{t+1}) - V(s_t);  A_t = delta_t + gamma * lam * A_{t+1};  returns_t = A_t + V(s_t).
    The state after the last real token is worth 0. Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16.

    Args:
        rewards: [B, T] float, r_t of each response token; ignored at masked positions.
        values: [B, T] float, V(s_t), the value before token t; ignored at masked positions.
        mask: [B, T] bool, True at real tokens, which come first in a row.
        gamma: discount, in [0, 1].
        lam: lambda of GAE, in [0, 1].

    Returns:
        ``(advantages, returns)``, each [B, T]; 0 at masked positions.
    """
    zeros = torch.zeros_like(values)
    rewards, values = torch.where(mask, rewards, zeros), torch.where(mask, values, zeros)
    next_values = torch.cat([values[:, 1:], zeros[:, :1]], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        running = torch.where(mask[:, t], deltas[:, t] + gamma * lam * running, running.new_zeros(()))
        advantages[:, t] = running
    return advantages, advantages + values


def truncated_importance_weights(logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(pi_train / pi_sample, cap) of each token: corrects for a sampler that computes a little differently.

    The expected gradient of the sampled tokens becomes that of the policy as training computes it, up to the cap that
    bounds the variance. Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training" (truncated importance sampling, token level).

    Args:
        logprobs: [B, T] float, in nats, of the sampled tokens as training computes them, before the update.
        sampling_logprobs: [B, T] float, as they were sampled.
        mask: [B, T] bool, True at real tokens.
        cap: the largest weight.

    Returns:
        [B, T] float; 1 at masked positions.
    """
    log_ratio = torch.where(mask, logprobs - sampling_logprobs, torch.zeros_like(logprobs))
    return log_ratio.exp().clamp(max=cap)
