"""The weight of the KL to the reference: fixed, or adapted so that the KL comes to a target."""

from __future__ import annotations

from collections.abc import Mapping

LARGEST_ERROR = 0.2
"""Of the KL from its target, as a share of it, that an update takes into account (Ziegler et al. 2019)."""


class FixedKLController:
    """A coefficient that stays what it is.

    Args:
        kl_coef: the coefficient.
    """

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, kl: float, responses: int) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing."""


class AdaptiveKLController:
    """A coefficient that rises where the KL is over its target, and falls where it is under it.

    After n responses: kl_coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon. Source: Ziegler et al. 2019
    (arXiv 1909.08593), section 2.2.

    Args:
        kl_coef: the coefficient at the start.
        target: KL in nats a response.
        horizon: responses.

    Attributes:
        value: the coefficient of the moment.
    """

    def __init__(self, kl_coef: float, target: float, horizon: int):
        self.value = kl_coef
        self._target, self._horizon = target, horizon

    def update(self, kl: float, responses: int) -> None:
        """Adapt the coefficient.

        Args:
            kl: measured since the last update, the mean over responses in nats.
            responses: measured on how many.
        """
        error = max(-LARGEST_ERROR, min(kl / self._target - 1.0, LARGEST_ERROR))
        self.value *= 1.0 + error * responses / self._horizon

    def state_dict(self) -> dict[str, float]:
        """What a resumed run has to know."""
        return {"kl_coef": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from there."""
        self.value = state["kl_coef"]


KLController = FixedKLController | AdaptiveKLController


def kl_controller(kl_coef: float, target: float | None, horizon: int) -> KLController:
    """The controller for these options; a fixed one where there is no ``target``."""
    return FixedKLController(kl_coef) if target is None else AdaptiveKLController(kl_coef, target, horizon)
