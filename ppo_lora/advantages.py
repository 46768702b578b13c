"""Generalized advantage estimation."""

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
