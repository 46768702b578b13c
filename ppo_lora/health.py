"""What looks unhealthy in a run's logs: pure rules over the history, and a monitor that says each thing once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, variance
from typing import Any

Log = Mapping[str, float]
"""What was logged at once: means over the iterations since the last log."""

ENTROPY_SHARE = 0.1
CLIP_FRACTION = 0.5
DISTINCT_SHARE = 0.25
SKIPPED_SHARE = 0.5
TREND_ERRORS = 2.0
"""Standard errors by which the later half of a window has to differ from the earlier for a trend."""


@dataclass(frozen=True)
class Limits:
    """What the rules know of the run's options.

    Attributes:
        kl: nats a response; None for no bound.
        watched: reward sources with weight 0.
    """

    kl: float | None = None
    watched: Sequence[str] = ()


def kl_bound(warning: float | None, target: float | None) -> float | None:
    """kl_warning, or twice kl_target where the run means to have more KL than that."""
    return warning if warning is None or target is None else max(warning, 2.0 * target)


@dataclass(frozen=True)
class Rule:
    """One thing that can go wrong.

    Attributes:
        name: of the warning.
        window: iterations that have to be logged, and that ``seen`` looks at.
        seen: the first log and those of the window; says what was seen, or None where all is well.
        advice: what it means, and what to do.
    """

    name: str
    window: int
    seen: Callable[[Log, Sequence[Log], Limits], str | None]
    advice: str


def _kl(first: Log, recent: Sequence[Log], limits: Limits) -> str | None:
    kl = recent[-1].get("objective/kl")
    if kl is None or limits.kl is None or kl <= limits.kl:
        return None
    return f"objective/kl is {kl:.4g}, over {limits.kl:g} nats a response"


def _entropy(first: Log, recent: Sequence[Log], limits: Limits) -> str | None:
    start, now = first.get("policy/entropy_avg"), recent[-1].get("policy/entropy_avg")
    if start is None or now is None or now >= ENTROPY_SHARE * start:
        return None
    return f"policy/entropy_avg is {now:.4g}, under {ENTROPY_SHARE:.0%} of {start:.4g} at the start"


def _always(
    metric: str, holds: Callable[[float], bool], what: str
) -> Callable[[Log, Sequence[Log], Limits], str | None]:
    """A rule's ``seen`` for a metric that is out of bounds in every log of the window."""

    def seen(first: Log, recent: Sequence[Log], limits: Limits) -> str | None:
        values = [log[metric] for log in recent if metric in log]
        if len(values) < len(recent) or not all(map(holds, values)):
            return None
        return f"{metric} is {values[-1]:.4g}, {what}"

    return seen


def _goodhart(first: Log, recent: Sequence[Log], limits: Limits) -> str | None:
    for name in limits.watched:
        metric = f"rewards/{name}/mean"
        pairs = [
            (log["objective/scores"], log[metric]) for log in recent if {metric, "objective/scores"} <= log.keys()
        ]
        scores, others = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if trend(scores) > TREND_ERRORS and trend(others) < -TREND_ERRORS:
            return f"objective/scores rises while {metric} falls (to {others[-1]:.4g})"
    return None


def trend(values: Sequence[float]) -> float:
    """The mean of the later half less that of the earlier, in standard errors; 0 for fewer than 4 values."""
    half = len(values) // 2
    if half < 2:
        return 0.0
    early, late = values[:half], values[-half:]
    difference = fmean(late) - fmean(early)
    error = sqrt((variance(early) + variance(late)) / half)
    return difference / error if error else (inf if difference > 0 else -inf if difference < 0 else 0.0)


RULES = (
    Rule(
        "kl",
        1,
        _kl,
        "The policy has moved far from the reference, where rewards are least to be trusted. Raise kl_coef, set "
        "kl_target, or lower learning_rate; kl_warning moves this bound.",
    ),
    Rule(
        "entropy",
        1,
        _entropy,
        "The policy says nearly the same every time, and explores no more. Raise entropy_coef or temperature, "
        "or lower learning_rate.",
    ),
    Rule(
        "clipping",
        2,
        _always("policy/clipfrac_avg", lambda x: x > CLIP_FRACTION, "so most tokens are clipped"),
        "The updates are too large. Lower learning_rate, num_ppo_epochs or num_mini_batches, or set target_kl.",
    ),
    Rule(
        "value",
        20,
        _always("val/explained_variance", lambda x: x < 0, "worse than a constant, for 20 iterations"),
        "The value role is a bad baseline. Raise value_learning_rate, vf_coef or cliprange_value, or set "
        "value_warmup_iterations.",
    ),
    Rule(
        "length",
        3,
        _always("completions/clipped_ratio", lambda x: x >= 1.0, "so no response ends by itself"),
        "Scores are those of cut responses. Raise max_completion_length, set missing_eos_penalty, or see that the "
        "prompts have the chat template and stop_token_ids the policy was trained with.",
    ),
    Rule(
        "goodhart",
        20,
        _goodhart,
        "The policy may be exploiting the reward. Stop earlier, raise kl_coef, or give the second scorer a weight in "
        "reward_weights.",
    ),
    Rule(
        "duplicates",
        3,
        _always("completions/distinct_ratio", lambda x: x < DISTINCT_SHARE, "so most responses are copies of others"),
        "Different prompts get the same answer. Raise entropy_coef, kl_coef or temperature, unless answers are meant "
        "to be few.",
    ),
    Rule(
        "spread",
        2,
        _always("objective/scores_std", lambda x: x <= 0.0, "so all responses score the same"),
        "There is nothing left to learn from. Stop here, take harder prompts, or look at what reward_funcs return.",
    ),
    Rule(
        "skipped",
        3,
        _always("policy/skipped_steps", lambda x: x > SKIPPED_SHARE, "so most steps are not taken"),
        "The ratio spikes. Lower learning_rate, or raise ratio_threshold.",
    ),
)


class HealthMonitor:
    """Applies the rules to log after log. Each warns once, and again only where it was healthy in between.

    Args:
        limits: what the rules know of the options.
        steps_per_iteration: optimizer steps.
        history: training logs of a resumed run; what they warned of is not said again.
    """

    def __init__(self, limits: Limits, steps_per_iteration: int, history: Sequence[Mapping[str, Any]] = ()):
        self._limits, self._steps = limits, steps_per_iteration
        self._logs: list[Log] = []
        self._unhealthy: set[str] = set()
        for log in history:
            self.observe(log)

    def observe(self, log: Mapping[str, Any]) -> list[str]:
        """The warnings that a log, with its ``step``, gives; empty where all is well or was said before."""
        self._logs.append(log)
        told = []
        for rule in RULES:
            recent = self._recent(rule.window)
            seen = rule.seen(self._logs[0], recent, self._limits) if recent else None
            if seen is None:
                self._unhealthy.discard(rule.name)
            elif rule.name not in self._unhealthy:
                self._unhealthy.add(rule.name)
                told.append(f"{rule.name}: {seen}. {rule.advice}")
        return told

    def _recent(self, window: int) -> list[Log]:
        """The logs of the last ``window`` iterations; none where there were fewer."""
        end = self._logs[-1]["step"]
        if end < window * self._steps:
            return []
        return [log for log in self._logs if log["step"] > end - window * self._steps]
