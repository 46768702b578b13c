"""The numbers of a comparison, from records made by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ppo_lora import Evaluation, PolicySamples, compare_policies

NAN = math.nan


def samples(scores, kl=((0.0, 0.0), (0.0, 0.0)), ids=None, stopped=((True, True), (True, True))) -> PolicySamples:
    ids = ids or [[[1], [1]], [[1], [1]]]
    texts = [["text" for _ in row] for row in ids]
    tables = {name: torch.tensor(table) for name, table in scores.items()}
    return PolicySamples(texts, ids, tables, torch.tensor(kl), torch.tensor(stopped))


@pytest.fixture
def evaluation() -> Evaluation:
    """Two prompts, two samples; the function says nothing about the second prompt of either policy."""
    sft = samples({"judge": [[0.0, 2.0], [4.0, 4.0]], "function": [[1.0, 0.0], [NAN, NAN]]})
    ppo = samples(
        {"judge": [[1.0, 3.0], [4.0, 0.0]], "function": [[1.0, 1.0], [NAN, 3.0]]},
        kl=[[1.0, 2.0], [0.5, 0.5]],
        ids=[[[1, 2, 1], [3]], [[1, 2], [5, 5]]],
        stopped=[[True, False], [True, True]],
    )
    return Evaluation(["one", "two"], {"sft": sft, "ppo": ppo}, "sft")


@pytest.fixture
def comparison(evaluation):
    return compare_policies(evaluation, [1, 2], seed=0)


def rate(comparison, scorer):
    (found,) = [win.rate for win in comparison.win_rates if win.scorer == scorer]
    return found


def test_sizes_and_names(comparison):
    assert (comparison.prompts, comparison.samples, comparison.reference) == (2, 2, "sft")
    assert list(comparison.policies) == ["sft", "ppo"]
    assert [(win.policy, win.against, win.scorer) for win in comparison.win_rates] == [
        ("ppo", "sft", "judge"),
        ("ppo", "sft", "function"),
    ]


def test_scores_of_a_policy(comparison):
    judge = comparison.policies["ppo"].scores["judge"]
    assert judge.estimate.mean == 2.0 and judge.estimate.prompts == 2 and judge.responses == 4
    assert judge.std == pytest.approx(math.sqrt((1 + 1 + 4 + 4) / 4))
    assert judge.quantiles[0.5] == 2.0 and judge.quantiles[0.25] == 0.75
    assert judge.estimate.low == judge.estimate.high == 2.0  # both prompts have the mean 2


def test_the_interval_is_over_prompts(comparison):
    judge = comparison.policies["sft"].scores["judge"]
    assert judge.estimate.mean == 2.5
    assert (judge.estimate.low, judge.estimate.high) == (1.0, 4.0)  # the two prompts' means


def test_responses_without_a_score_are_left_out(comparison):
    function = comparison.policies["ppo"].scores["function"]
    assert function.responses == 3 and function.estimate.prompts == 2
    assert function.estimate.mean == 2.0  # of the prompts' means 1 and 3
    assert comparison.policies["sft"].scores["function"].estimate.prompts == 1


def test_kl_length_stops_and_diversity(comparison):
    ppo = comparison.policies["ppo"]
    assert ppo.kl.estimate.mean == 1.0 and (ppo.kl.estimate.low, ppo.kl.estimate.high) == (0.5, 1.5)
    assert ppo.length.estimate.mean == 2.0 and ppo.stopped == 0.75
    assert ppo.distinct_1 == 4 / 8  # 1, 2, 3, 5 among eight tokens
    assert ppo.distinct_2 == 3 / 4  # (1, 2) twice, (2, 1), (5, 5)
    assert comparison.policies["sft"].kl.estimate.mean == 0.0


def test_win_rates_compare_samples_that_were_drawn_independently(comparison):
    judge = rate(comparison, "judge")
    # First prompt: 1 against 2 loses, 3 against 0 wins. Second: 4 against 4 is a tie, 0 against 4 loses.
    assert judge.mean == pytest.approx((0.5 + 0.25) / 2)
    assert (judge.low, judge.high) == (0.25, 0.5) and judge.prompts == 2


def test_win_rates_take_prompts_that_are_scored_whole(comparison):
    function = rate(comparison, "function")
    assert function.prompts == 1 and function.mean == 0.75  # 1 against 0 wins, 1 against 1 is a tie


@pytest.mark.parametrize("silent", ["sft", "ppo"])
def test_a_prompt_that_is_not_scored_for_one_policy_counts_for_no_pair(silent):
    whole, part = [[1.0, 1.0], [2.0, 2.0]], [[1.0, 1.0], [NAN, 2.0]]
    policies = {name: samples({"judge": part if name == silent else whole}) for name in ("sft", "ppo")}
    assert rate(compare_policies(Evaluation(["one", "two"], policies, "sft"), [1]), "judge").prompts == 1


def test_a_single_sample_is_compared_with_the_only_other(evaluation):
    one = [[[1]]]
    policies = {
        name: samples({"judge": [[score]]}, [[0.0]], one, [[True]]) for name, score in (("sft", 1.0), ("ppo", 2.0))
    }
    comparison = compare_policies(Evaluation(["one"], policies, "sft"), [1])
    assert rate(comparison, "judge").mean == 1.0


def test_best_of_n_and_its_kl(comparison):
    assert comparison.policies["ppo"].best_of["judge"] == {1: 2.0, 2: 3.5}
    assert comparison.policies["sft"].best_of == {"judge": {1: 2.5, 2: 3.0}, "function": {1: 0.5, 2: 1.0}}
    assert comparison.best_of_kl == {1: 0.0, 2: pytest.approx(math.log(2) - 0.5)}


def test_a_scorer_that_never_spoke_has_no_numbers():
    policies = {name: samples({"judge": [[1.0, 2.0]] * 2, "mute": [[NAN, NAN]] * 2}) for name in ("sft", "ppo")}
    comparison = compare_policies(Evaluation(["one", "two"], policies, "sft"), [1])
    assert comparison.policies["sft"].scores["mute"] is None
    assert comparison.policies["sft"].best_of == {"judge": {1: 1.5}}
    assert rate(comparison, "mute") is None
    json.dumps(comparison.entry(), allow_nan=False)


def test_the_bootstrap_has_a_seed():
    rows = torch.arange(40.0).reshape(20, 2)
    ids = [[[1], [1]]] * 20
    policy = samples({"judge": rows.tolist()}, torch.zeros(20, 2).tolist(), ids, [[True, True]] * 20)
    first, again, other = (compare_policies(Evaluation(["x"] * 20, {"sft": policy}, "sft"), [1], s) for s in (1, 1, 2))
    assert first == again != other
