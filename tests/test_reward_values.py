"""What reward functions may return for a row: a number, None, rewards of tokens, or rewards of spans of text."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from batches import assert_close
from builders import tiny_tokenizer
from byte_level import EOS, byte_level_tokenizer
from ppo_lora import Scorer
from ppo_lora.reward_values import checked_rewards
from scoring import NoBase, responses_of


@pytest.fixture
def responses():
    """Two completions: "w7 w8 w9" with EOS behind it, and "w5" with EOS and padding."""
    return responses_of(["w3", "w4"], [[7, 8, 9, 1], [5, 1, 0, 0]], tiny_tokenizer())


def _same(*rows):
    def function(**kwargs):
        return list(rows)

    return function


def test_numbers_are_final_rewards(responses):
    found = checked_rewards("f", [2.0, None], responses)
    assert found.finals[0] == 2.0 and found.finals[1].isnan()
    assert found.steps is None and found.step_counts is None


def test_a_number_for_each_token(responses):
    found = checked_rewards("f", [[1.0, 2.0, 0.0, 4.0], [8.0, 16.0]], responses)
    assert_close(found.steps, [[1, 2, 0, 4], [8, 16, 0, 0]], 0)
    assert found.finals.tolist() == [0.0, 0.0]
    assert found.values.tolist() == [7.0, 24.0]
    assert found.step_counts.tolist() == [4.0, 2.0]


def test_rewards_of_spans(responses):
    """ "w7 w8 w9": the tokens end after 2, 5 and 8 characters; EOS shows nothing."""
    found = checked_rewards("f", [[((0, 2), 1.0), ((0, 3), 2.0), ([3, 5], 4), ((5, 8), 8.0)], []], responses)
    assert_close(found.steps, [[1, 6, 8, 0], [0, 0, 0, 0]], 0)
    assert found.values.tolist() == [15.0, 0.0]
    assert found.step_counts.tolist() == [4.0, 0.0]


def test_spans_of_chat_completions():
    tokenizer = byte_level_tokenizer(0)
    ids = [*tokenizer("a🙂b")["input_ids"], EOS]
    responses = responses_of([[{"role": "user", "content": "x"}]], [ids], tokenizer)
    assert responses.text(0) == "a🙂b"
    found = checked_rewards("f", [[((0, 1), 1.0), ((1, 2), 2.0), ((0, 3), 4.0)]], responses)
    assert_close(found.steps, [[1, 0, 0, 0, 2, 4, 0]], 0)


def test_rows_may_differ(responses):
    found = checked_rewards("f", [3.0, [((0, 2), 1.0)]], responses)
    assert found.values.tolist() == [3.0, 1.0]
    assert found.finals.tolist() == [3.0, 0.0]
    silent = checked_rewards("f", [None, [1.0, 1.0]], responses)
    assert silent.values[0].isnan() and silent.values[1] == 2.0


@pytest.mark.parametrize(
    "row",
    [torch.ones(4), np.ones(4), [torch.tensor(1.0)] * 4, (True, 1, 1.0, np.float32(1))],
    ids=["tensor", "array", "list of tensors", "mixed tuple"],
)
def test_every_kind_of_list(responses, row):
    assert checked_rewards("f", [row, 0.0], responses).steps[0].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1.0] * 3, "3 numbers for row 0, whose completion has 4 tokens; expected a finite number for each"),
        (
            [1.0, None, 1.0, 1.0],
            "for row 0 (completion 'w7 w8 w9'); expected a finite number for each token, or pairs",
        ),
        ([1.0, math.nan, 1.0, 1.0], "expected a finite number for each token, or pairs"),
        ([((0, 2), math.inf)], "expected a finite number for each token, or pairs"),
        ([((0, 2), "1")], "expected a finite number for each token, or pairs"),
        ([((0, 2), 1.0), 1.0], "expected a finite number for each token, or pairs"),
        ([((0.0, 2.0), 1.0)], "expected a finite number for each token, or pairs"),
        ([((0, 9), 1.0)], "for row 0: the span (0, 9) is not inside of the completion's 8 characters."),
        ([((2, 2), 1.0)], "the span (2, 2) is not inside of"),
    ],
)
def test_what_is_refused_and_why(responses, row, message):
    with pytest.raises(ValueError, match=r"^The reward function f returned .*" + re.escape(message)):
        checked_rewards("f", [row, 0.0], responses)


def test_sources_are_weighted_and_added(responses):
    final = _same(1.0, 2.0)
    tokens = _same([1.0, 2.0, 3.0, 4.0], None)
    spans = _same([((0, 2), 10.0)], [((0, 1), 20.0)])
    judgement = Scorer(NoBase(), [final, tokens, spans], [1.0, 2.0, -0.5], 8).judge(responses)
    assert judgement.finals.tolist() == [1.0, 2.0]
    assert_close(judgement.steps, [[2 - 5, 4, 6, 8], [-10, 0, 0, 0]], 0)
    assert judgement.scores.tolist() == [16.0, -8.0]
    assert [column.tolist() for column in judgement.by_source.values()][::2] == [[1.0, 2.0], [10.0, 20.0]]
    assert judgement.by_source["function_1"][0] == 10.0 and judgement.by_source["function_1"][1].isnan()


def test_steps_have_metrics_of_their_own(responses):
    judgement = Scorer(NoBase(), [_same(1.0, 2.0), _same([((0, 2), 1.0), ((3, 5), 4.0)], 3.0)], None, 8).judge(
        responses
    )
    assert {name: float(value) for name, value in judgement.metrics.items()} == {
        "rewards/function_1/steps": 2.0,
        "rewards/function_1/step_mean": 2.5,
    }


def test_no_span_in_the_whole_batch_is_no_observation(responses):
    metrics = Scorer(NoBase(), [_same([], [])], None, 8).judge(responses).metrics
    assert metrics["rewards/function/steps"] == 0.0 and math.isnan(metrics["rewards/function/step_mean"])


def test_spans_need_a_tokenizer(responses):
    with pytest.raises(ValueError, match="rewards of spans need responses with a tokenizer"):
        checked_rewards("f", [[((0, 1), 1.0)], 0.0], replace(responses, tokenizer=None))
