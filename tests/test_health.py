"""The health warnings: hand-made histories on both sides of each bound, and small runs."""

from __future__ import annotations

import math

import pytest

from ppo_lora.health import RULES, HealthMonitor, Limits, kl_bound, trend
from runs import count_w5, logged, trainer


def told(values, metric, limits=None, steps=1, every=1) -> list[list[str]]:
    """The names of the warnings after each of the logs."""
    monitor = HealthMonitor(limits or Limits(), steps)
    logs = [{metric: value, "step": (i + 1) * steps * every} for i, value in enumerate(values)]
    return [[text.split(":")[0] for text in monitor.observe(log)] for log in logs]


@pytest.mark.parametrize(
    ("metric", "healthy", "ill", "name", "window"),
    [
        ("objective/kl", 50.0, 50.1, "kl", 1),
        ("policy/clipfrac_avg", 0.5, 0.51, "clipping", 2),
        ("val/explained_variance", 0.0, -0.01, "value", 20),
        ("completions/clipped_ratio", 0.99, 1.0, "length", 3),
        ("completions/distinct_ratio", 0.25, 0.24, "duplicates", 3),
        ("objective/scores_std", 1e-6, 0.0, "spread", 2),
        ("policy/skipped_steps", 0.5, 0.51, "skipped", 3),
    ],
)
def test_each_bound_and_window_once_and_again_after_health(metric, healthy, ill, name, window):
    limits = Limits(kl=50.0)
    assert not any(told([healthy] * 30, metric, limits))
    seen = told([ill] * 25 + [healthy] + [ill] * 25, metric, limits)
    first, second = window - 1, 26 + window - 1
    assert [i for i, names in enumerate(seen) if names] == [first, second]
    assert seen[first] == seen[second] == [name]


def test_windows_are_iterations_however_many_a_log_covers():
    assert [bool(names) for names in told([1.0] * 3, "completions/clipped_ratio", steps=4)] == [False, False, True]
    assert [bool(names) for names in told([1.0] * 3, "completions/clipped_ratio", every=5)] == [True, False, False]


def test_entropy_is_compared_with_the_start():
    assert told([2.0, 0.2, 0.19], "policy/entropy_avg") == [[], [], ["entropy"]]


def test_no_bound_on_kl_is_no_warning():
    assert told([1e9], "objective/kl", Limits(kl=None)) == [[]]


def test_the_bound_on_kl_is_twice_the_target_where_that_is_more():
    assert kl_bound(50.0, 40.0) == 80.0
    assert kl_bound(50.0, 20.0) == kl_bound(50.0, None) == 50.0 and kl_bound(None, 40.0) is None


def goodhart(scores, gold, watched=("gold",)) -> list[str]:
    monitor = HealthMonitor(Limits(watched=watched), 1)
    seen = []
    for i, (score, other) in enumerate(zip(scores, gold, strict=True)):
        seen += monitor.observe({"objective/scores": score, "rewards/gold/mean": other, "step": i + 1})
    return [text.split(":")[0] for text in seen]


def test_a_second_scorer_that_falls_while_the_score_rises():
    up, down = [0.1 * i for i in range(20)], [-0.1 * i for i in range(20)]
    assert goodhart(up, down) == ["goodhart"]
    assert goodhart(up, up) == goodhart(down, down) == goodhart(up[:19], down[:19]) == goodhart(up, down, ()) == []
    noise = [(-1.0) ** i for i in range(20)]
    assert goodhart(up, noise) == []


@pytest.mark.parametrize(("errors", "warnings"), [(1.9, []), (2.1, ["goodhart"])])
def test_a_second_scorer_has_to_fall_by_two_standard_errors(errors, warnings):
    noise = [(-1.0) ** i for i in range(10)]  # of variance 10 / 9
    step = errors * math.sqrt(2 * 10 / 9 / 10)
    up = noise + [x + step for x in noise]
    far = [float(i) for i in range(20)]
    assert goodhart(far, [-x for x in up]) == goodhart(up, [-x for x in far]) == warnings


def test_trend_by_hand():
    # Halves 0, 2 and 3, 5: means 1 and 4, variances 2 each, standard error sqrt((2 + 2) / 2).
    assert trend([0.0, 2.0, 3.0, 5.0]) == pytest.approx(3 / math.sqrt(2))
    assert trend([1.0, 1.0, 1.0, 1.0]) == 0.0 and trend([1.0, 1.0, 2.0, 2.0]) == math.inf
    assert trend([0.0, 1.0, 2.0]) == 0.0


def test_a_resumed_run_does_not_forget():
    logs = [{"completions/clipped_ratio": 1.0, "step": i} for i in (1, 2, 3, 4)]
    monitor = HealthMonitor(Limits(), 1, logs[:3])
    assert monitor.observe(logs[3]) == []
    assert len(HealthMonitor(Limits(), 1, logs[:2]).observe(logs[2])) == 1


def test_every_rule_names_an_option_and_has_a_name_of_its_own():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all("_" in rule.advice and rule.advice.endswith(".") for rule in RULES)


def test_a_run_says_that_rewards_are_all_the_same_and_counts_it(tmp_path, capsys):
    def constant(completions, **kwargs):
        return [1.0] * len(completions)

    made = trainer(tmp_path, reward_funcs=constant, max_steps=12, kl_warning=1e-9)
    made.train()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("spread: objective/scores_std is 0") == 1
    assert [entry["health/warnings"] for entry in logged(made)][1] >= 1.0
    quiet = trainer(tmp_path / "quiet", reward_funcs=constant, max_steps=12, health_warnings=False)
    quiet.train()
    assert "spread" not in capsys.readouterr().out
    assert not any("health/warnings" in entry for entry in logged(quiet))


def test_a_run_says_that_the_kl_is_over_its_bound(tmp_path, capsys):
    trainer(tmp_path, max_steps=12, kl_warning=1e-6, learning_rate=0.05, kl_coef=0.0).train()
    assert "kl: objective/kl is" in " ".join(capsys.readouterr().out.split())


def test_a_run_watches_its_history_and_the_sources_without_weight(tmp_path):
    def gold(completions, **kwargs):
        return [0.0] * len(completions)

    made = trainer(tmp_path, reward_funcs=[count_w5, gold], reward_weights=[1.0, 0.0])
    logs = [{"loss": 0.0, "step": 4 * (i + 1), "objective/scores": i, "rewards/gold/mean": -i} for i in range(20)]
    made.state.log_history, made.state.global_step = logs[:19], logs[19]["step"]
    assert made._warn_of_health(logs[19]) == 1
