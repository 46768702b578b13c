"""What is done with scores before they become rewards: each option changes what it should and nothing else."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch
from datasets import Dataset

import oracles
from batches import assert_close
from builders import CHAT_TEMPLATE, prompts, tiny_tokenizer
from ppo_lora.demonstrations import Demonstrations
from runs import config, count_w5, logged, trainer

SCORES = [((7 * i) % 16) / 4 - 1 for i in range(64)]
"""A score for each row of a batch, spread from -1 to 2.75."""
SAME = {"kl_coef": 0.0, "whiten_advantages": False}


def by_row(completions, **kwargs):
    return SCORES[: len(completions)]


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def experience(folder, reward_funcs=by_row, trainer_options=None, **options):
    made = trainer(folder, reward_funcs=reward_funcs, trainer_options=trainer_options, **{**SAME, **options})
    rows = made.collect(0)
    return rows, made._scored.metrics, made


def expected_finals(rows, scores) -> torch.Tensor:
    """The rewards of a run without a KL: each score at its row's last token."""
    rewards = torch.zeros(rows.response_mask.shape)
    for row, score in enumerate(scores):
        rewards[row, int(rows.response_mask[row].sum()) - 1] = score
    return rewards


def lengths(rows) -> list[int]:
    return rows.response_mask.sum(dim=1).tolist()


def finished(rows, stops=(1,)) -> list[bool]:
    return [ids[-1] in stops for ids in _ids(rows)]


def _ids(rows) -> list[list[int]]:
    width = rows.response_length
    return [ids[-width:][:n] for ids, n in zip(rows.sequences.tolist(), lengths(rows), strict=True)]


def assert_only(plain, changed, *, scores) -> None:
    """The same responses and log-probabilities; other scores, and rewards made of them."""
    for item in fields(plain):
        if item.name not in ("scores", "rewards", "advantages", "returns"):
            assert torch.equal(getattr(plain, item.name), getattr(changed, item.name)), item.name
    assert_close(changed.scores, scores)
    assert_close(changed.rewards, expected_finals(changed, scores))


def _normalized(scores):
    return oracles.running_normalized([scores])[0]


OPTIONS = {
    "running": ({"score_normalization": "running"}, lambda scores, rows: _normalized(scores)),
    "clip": ({"score_clip": 1.5}, lambda scores, rows: [max(-1.5, min(x, 1.5)) for x in scores]),
    "overlong": (
        {"overlong_penalty": 2.0, "overlong_buffer_length": 4},
        lambda scores, rows: [
            x - oracles.overlong_penalty(n, 6, 4, 2.0) for x, n in zip(scores, lengths(rows), strict=True)
        ],
    ),
    "replace": (
        {"missing_eos_score": -5.0},
        lambda scores, rows: [x if end else -5.0 for x, end in zip(scores, finished(rows), strict=True)],
    ),
    "subtract": (
        {"missing_eos_penalty": 0.5},
        lambda scores, rows: [x if end else x - 0.5 for x, end in zip(scores, finished(rows), strict=True)],
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_scores_and_nothing_else(tmp_path, name):
    options, made_of = OPTIONS[name]
    plain, _, _ = experience(tmp_path)
    changed, _, _ = experience(tmp_path, **options)
    scores = made_of(SCORES[: len(plain)], plain)
    assert scores != SCORES[: len(plain)]
    assert_only(plain, changed, scores=scores)


def test_the_order_is_normalise_clip_eos_overlong(tmp_path):
    every = {key: value for name in ("running", "replace", "overlong") for key, value in OPTIONS[name][0].items()}
    rows, _, _ = experience(tmp_path, **every, score_clip=0.75)
    scores = [max(-0.75, min(x, 0.75)) for x in _normalized(SCORES[: len(rows)])]
    for name in ("replace", "overlong"):
        scores = OPTIONS[name][1](scores, rows)
    assert min(scores) < -6.9  # replaced by -5, and then the longest pay 2
    assert_close(rows.scores, scores)


@pytest.mark.parametrize("options", [{"score_normalization": "running"}, {"score_clip": 0.5}])
def test_trls_key_has_the_scores_as_they_came(tmp_path, options):
    _, plain, _ = experience(tmp_path, missing_eos_penalty=0.5)
    rows, metrics, _ = experience(tmp_path, missing_eos_penalty=0.5, **options)
    for name in ("objective/scores", "objective/scores_std"):
        assert metrics[name] == plain[name]
    assert metrics["objective/normalized_scores"] == rows.scores.mean()
    assert metrics["objective/normalized_scores_std"] == rows.scores.std(correction=0)
    assert metrics["objective/rlhf_reward"] == metrics["objective/normalized_scores"]
    assert set(metrics) - set(plain) == {"objective/normalized_scores", "objective/normalized_scores_std"}


@pytest.mark.parametrize("stops", [[7], [7, 8, 9], list(range(10, 16))])
def test_any_set_of_stop_tokens_counts_as_an_end(tmp_path, stops):
    rows, metrics, _ = experience(tmp_path, stop_token_ids=stops, missing_eos_score=-5.0)
    ends = finished(rows, {1, *stops})
    assert {ids[-1] for ids in _ids(rows)} & set(stops) and not all(ends)
    assert_close(rows.scores, [x if end else -5.0 for x, end in zip(SCORES, ends, strict=False)])
    assert metrics["val/num_eos_tokens"] == sum(ends)


def test_moments_run_over_iterations_and_evaluation_leaves_them_alone(tmp_path):
    made = trainer(tmp_path, reward_funcs=by_row, score_normalization="running", trainer_options=None, **SAME)
    first = made.collect(0)
    state = made._collector.normalizer.state_dict()
    assert state["count"] == len(first) == 16
    metrics = made.evaluate(Dataset.from_dict({"prompt": ["w3", "w4 w5"]}))
    assert made._collector.normalizer.state_dict() == state
    raw = SCORES[:2]
    assert metrics["eval_objective/scores"] == pytest.approx(sum(raw) / 2)
    shifted = [(x - state["mean"]) / (state["squares"] / 15) ** 0.5 for x in raw]
    assert metrics["eval_objective/normalized_scores"] == pytest.approx(sum(shifted) / 2, abs=1e-5)
    made.collect(1)
    assert made._collector.normalizer.state_dict()["count"] == 32


# Demonstrations

DEMONSTRATIONS = Dataset.from_dict({"prompt": ["w3", "w4 w5", "w9"], "completion": ["w7", "w8 w9 w10", "w11 w12"]})


def test_demonstrations_are_worth_nothing_in_the_mean(tmp_path):
    """Their completions have 2, 9 and 7 characters, 6 in the mean."""
    plain, before, _ = experience(tmp_path, length)
    given = {"demonstration_dataset": DEMONSTRATIONS}
    changed, after, made = experience(tmp_path, length, given, score_normalization="dataset")
    assert made._collector.normalizer.mean == 6.0
    assert_only(plain, changed, scores=[score - 6.0 for score in plain.scores.tolist()])
    assert after["objective/scores"] == before["objective/scores"]


def test_demonstrations_are_scored_in_batches_like_samples(tmp_path):
    seen = []

    def watching(prompts, completions, completion_ids, **kwargs):
        seen.append((prompts, completions, completion_ids))
        return [1.0] * len(prompts)

    given = {"demonstration_dataset": DEMONSTRATIONS.add_column("answer", [1, 2, 3])}
    options = {"score_normalization": "dataset", "local_rollout_forward_batch_size": 2, "max_completion_length": 3}
    experience(tmp_path, watching, given, **options)
    assert seen[0] == (["w3", "w4 w5"], ["w7", "w8 w9 w10"], [[7, 1], [8, 9, 10]])
    assert seen[1] == (["w9"], ["w11 w12"], [[11, 12, 1]])
    assert len(seen[2][0]) == 16


def test_demonstrations_as_chat(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": "w9"}]],
            "completion": [[{"role": "assistant", "content": "w7 w8"}]],
        }
    )
    responses = Demonstrations(chat, tokenizer, config(tmp_path)).responses([0], [1], torch.device("cpu"))
    assert responses.rollout.sequences.tolist() == [[3, 9, 4, 7, 8, 1]]
    assert responses.completions == [[{"role": "assistant", "content": "w7 w8"}]]
    assert responses.rollout.stopped.tolist() == [True]


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        (None, "dataset", "score_normalization is 'dataset' and demonstration_dataset is None"),
        (DEMONSTRATIONS, "running", "score_normalization is 'running' and demonstration_dataset is given"),
        (DEMONSTRATIONS.remove_columns("completion"), "dataset", "expected 'prompt' and 'completion'"),
        (DEMONSTRATIONS.select([]), "dataset", "demonstration_dataset is empty"),
        (
            Dataset.from_dict({"prompt": ["w3"], "completion": [[{"role": "user", "content": "w4"}]]}),
            "dataset",
            "expected text, or one message of the assistant",
        ),
        (
            Dataset.from_dict({"prompt": ["w3"], "completion": [[{"role": "assistant", "content": None}]]}),
            "dataset",
            "expected text, or one message of the assistant",
        ),
    ],
)
def test_demonstrations_that_are_refused(tmp_path, dataset, kind, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, trainer_options={"demonstration_dataset": dataset}, score_normalization=kind)


# State and manifest


@pytest.mark.parametrize("kind", ["running", "dataset"])
def test_a_resumed_run_goes_on_with_the_numbers_it_had(tmp_path, kind):
    calls = []

    def watching(completions, **kwargs):
        calls.append(completions)
        return length(completions)

    def run(folder, **options):
        given = {"demonstration_dataset": DEMONSTRATIONS} if kind == "dataset" else {}
        made = trainer(
            folder,
            reward_funcs=watching,
            trainer_options=given,
            score_normalization=kind,
            max_steps=8,
            save_strategy="steps",
            save_steps=4,
        )
        made.train(**options)
        return made

    whole = run(tmp_path / "whole")
    calls.clear()
    resumed = run(tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert len(calls) == 1  # the second iteration's responses, and no demonstrations
    state = whole._collector.normalizer.state_dict()
    assert resumed._collector.normalizer.state_dict() == state
    assert json.loads((tmp_path / "resumed" / "checkpoint-8" / "ppo_state.json").read_text())["scores"] == state
    for (name, one), (_, other) in zip(whole.base.named_parameters(), resumed.base.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert logged(whole)[-1]["objective/normalized_scores"] == logged(resumed)[-1]["objective/normalized_scores"]


def test_the_manifest_says_how_scores_were_made(tmp_path):
    _, _, made = experience(tmp_path, score_normalization="running", score_clip=2.0, missing_eos_penalty=1.0)
    made.save_model()
    reward = json.loads((tmp_path / "ppo_lora.json").read_text())["reward"]
    assert reward == {
        "weights": {"by_row": 1.0},
        "normalisation": made._collector.normalizer.state_dict(),
        "whitened": False,
        "score_clip": 2.0,
        "missing_eos_penalty": 1.0,
        "missing_eos_score": None,
        "overlong_penalty": None,
        "overlong_buffer_length": None,
    }
    assert reward["normalisation"]["kind"] == "running" and reward["normalisation"]["count"] == 16


# Rewards of steps, and what functions log


def _first_words(completions, **kwargs):
    """A reward of 3 for the first word, -1 for the whole text; nothing for an empty completion."""
    ends = [(len(text.split(" ")[0]), len(text)) for text in completions]
    return [[((0, first), 3.0), ((0, last), -1.0)] if last else [] for first, last in ends]


def test_step_rewards_are_in_the_rewards_of_their_tokens(tmp_path):
    plain, _, _ = experience(tmp_path)
    rows, metrics, _ = experience(tmp_path, [by_row, _first_words], reward_weights=[1.0, 0.5])
    expected = plain.rewards.clone()
    words = [sum(token > 2 for token in ids) for ids in _ids(rows)]
    assert max(words) > 1
    for row, count in enumerate(words):
        if count:
            visible = [t for t, token in enumerate(_ids(rows)[row]) if token > 2]
            expected[row, visible[0]] += 1.5
            expected[row, visible[-1]] -= 0.5
    assert_close(rows.rewards, expected)
    assert_close(rows.scores, expected.sum(dim=1))
    assert metrics["objective/scores"] == rows.scores.mean()
    spoken = sum(count > 0 for count in words)
    assert metrics["rewards/_first_words/mean"] == pytest.approx(2.0 * spoken / len(words))
    assert metrics["rewards/_first_words/steps"] == pytest.approx(2.0 * spoken / len(words))
    assert metrics["rewards/_first_words/step_mean"] == 1.0
    for name in ("sequences", "logprobs", "values", "response_mask"):
        assert torch.equal(getattr(plain, name), getattr(rows, name))


def test_step_rewards_are_neither_normalised_nor_clipped(tmp_path):
    def tokens(completion_ids, **kwargs):
        return [[2.0] * len(ids) for ids in completion_ids]

    options = {"score_normalization": "running", "score_clip": 0.5}
    rows, _, _ = experience(tmp_path, [by_row, tokens], **options)
    finals = [max(-0.5, min(x, 0.5)) for x in _normalized(SCORES[: len(rows)])]
    assert_close(rows.rewards, expected_finals(rows, finals) + 2.0 * rows.response_mask)


def test_functions_log_metrics_and_columns_under_trls_keys(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def logging(completions, log_metric, log_extra, **kwargs):
        log_metric("accuracy", 0.25)
        log_metric("accuracy", 0.75)
        log_extra("parsed", [f"<{len(text)}>" for text in completions])
        return [float(len(text)) for text in completions]

    made = trainer(tmp_path, reward_funcs=logging, log_completions=True)
    made.train()
    assert [entry["accuracy"] for entry in logged(made)] == [0.5]
    first = made._scored.responses.completions[0]
    printed = capsys.readouterr().out
    assert "parsed" in printed and f"<{len(first)}>" in printed
    assert made.evaluate(Dataset.from_dict({"prompt": ["w3"]}))["eval_accuracy"] == 0.5


def test_what_functions_log_replaces_nothing_that_was_measured(tmp_path):
    measured = ("loss", "step", "learning_rate", "objective/kl", "rewards/count_w5/mean", "completions/distinct_ratio")

    def logging(log_metric, **kwargs):
        for name in measured:
            log_metric(name, -77.0)
        return count_w5(**kwargs)

    logging.__name__ = "count_w5"
    options = {"kl_target": 1.0, "kl_horizon": 100, "eval_strategy": "steps", "eval_steps": 4}
    with_eval = {"trainer_options": {"eval_dataset": prompts(3)}}
    plain = trainer(tmp_path / "plain", **options, **with_eval)
    made = trainer(tmp_path / "made", reward_funcs=logging, **options, **with_eval)
    plain.train()
    made.train()
    for name in measured:
        assert logged(made)[0][name] == logged(plain)[0][name]
    evaluated, expected = (next(e for e in t.state.log_history if "eval_objective/kl" in e) for t in (made, plain))
    for name in measured[3:5]:
        assert evaluated[f"eval_{name}"] == expected[f"eval_{name}"]
