"""Reward functions are called as GRPO calls them, and what breaks the contract is named."""

from __future__ import annotations

import asyncio
import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from builders import EOS, PAD, tiny_tokenizer
from ppo_lora import Prompts, Responses, Role, Rollout, Scorer
from ppo_lora.responses import read_responses
from ppo_lora.rollout import assemble

TEXTS = ["uno", "due", "tre"]


class NoBase:
    """A base without a reward role."""

    roles = ()


class RewardBase:
    """A base whose reward role scores a row with its number of real tokens; it remembers what it was given."""

    roles = (Role.POLICY, Role.REWARD)
    packs_rows = False

    def __init__(self):
        self.batches = []

    def scores(self, input_ids, attention_mask):
        self.batches.append(len(input_ids))
        assert not torch.is_grad_enabled()
        return attention_mask.sum(dim=1).float()


@pytest.fixture
def responses():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    rollout = Rollout(torch.arange(9).reshape(3, 3), mask, mask[:, 1:], torch.ones(3, dtype=torch.bool))
    return Responses(["one", "two", "three"], list(TEXTS), [[1], [4, 5], []], {"answer": [7, 8, 9]}, rollout)


def _scorer(*functions, weights=None, base=None) -> Scorer:
    return Scorer(base or NoBase(), functions, weights, batch_size=2)


def _constant(result):
    def fixed(prompts, completions, completion_ids, **columns):
        return result

    return fixed


def _length(completions, **kwargs):
    return [len(text) for text in completions]


def _answer(answer, **kwargs):
    return [float(number) for number in answer]


def test_a_function_gets_what_grpo_gives_it(responses):
    seen = {}

    def watching(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [0.0] * 3

    _scorer(watching)(responses, trainer_state="state")
    assert callable(seen.pop("log_metric")) and callable(seen.pop("log_extra"))
    assert seen == {
        "prompts": ["one", "two", "three"],
        "completions": TEXTS,
        "completion_ids": [[1], [4, 5], []],
        "answer": [7, 8, 9],
        "trainer_state": "state",
    }


def test_scores_are_the_sum_of_the_sources(responses):
    scores, by_source = _scorer(_constant([1, 2, 3]), _answer)(responses)
    assert scores.tolist() == [8.0, 10.0, 12.0]
    assert {name: column.tolist() for name, column in by_source.items()} == {"fixed": [1, 2, 3], "_answer": [7, 8, 9]}
    assert {tensor.dtype for tensor in (scores, *by_source.values())} == {torch.float32}


def test_weights_by_hand(responses):
    scores, by_source = _scorer(_constant([1, 2, 3]), _answer, weights=[2.0, -0.5])(responses)
    assert scores.tolist() == [-1.5, 0.0, 1.5]
    assert by_source["_answer"].tolist() == [7, 8, 9]


def test_none_counts_nothing_and_shows_as_nan(responses):
    scores, by_source = _scorer(_constant([1.0, None, 3.0]), _constant([None, 5.0, 10.0]), weights=[2, 1])(responses)
    assert scores.tolist() == [2.0, 5.0, 16.0]
    assert [by_source["fixed_0"].isnan().tolist(), by_source["fixed_1"].isnan().tolist()] == [
        [False, True, False],
        [True, False, False],
    ]


def test_a_row_that_nobody_scores_has_no_score_and_is_warned_of_once(responses):
    scorer = _scorer(_constant([1.0, None, 3.0]), _constant([1.0, None, None]))
    message = "['fixed_0', 'fixed_1'] returned None for 1 of 3 responses, first to 'two'. Nothing is learned from"
    with pytest.warns(UserWarning, match=re.escape(message)):
        scores, _ = scorer(responses)
    assert scores.isnan().tolist() == [False, True, False] and scores[0] == 2.0 and scores[2] == 3.0
    assert torch.equal(scorer(responses)[0].isnan(), scores.isnan())  # a warning would be an error


def test_sources_that_never_scored_a_row_are_an_error(responses):
    message = "['fixed'] returned None for all 3 completions, and so judge nothing."
    with pytest.raises(ValueError, match=re.escape(message)):
        _scorer(_constant([None] * 3))(responses)


@pytest.mark.filterwarnings("ignore:.*returned None for 3 of 3")
def test_a_batch_without_a_score_after_one_with_is_none(responses):
    results = iter([[1.0, 2.0, 3.0], [None] * 3])
    scorer = _scorer(lambda completions, **kwargs: next(results))
    scorer(responses)
    assert scorer(responses)[0].isnan().all()


async def _slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


class Judge:
    def __call__(self, completions, **kwargs):
        return [len(text) for text in completions]


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return [len(text) for text in completions]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (_length, "_length"),
        (_slow, "_slow"),
        (Judge(), "Judge"),
        (AsyncJudge(), "AsyncJudge"),
        (partial(_length, extra=1), "partial"),
        (lambda completions, **kwargs: [3] * 3, "<lambda>"),
    ],
    ids=["function", "async", "instance", "async instance", "partial", "lambda"],
)
@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_every_kind_of_callable(responses, function, name, inside_a_loop):
    scorer = _scorer(function)

    async def main():
        return scorer(responses)

    scores, by_source = asyncio.run(main()) if inside_a_loop else scorer(responses)
    assert scores.tolist() == [3.0, 3.0, 3.0]
    assert list(by_source) == scorer.names == [name]


@pytest.mark.parametrize(
    "result",
    [
        (1, 2, 3),
        [True, 2, 3.0],
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), torch.tensor(2), 3],
        [np.float32(1), np.int64(2), 3],
        np.array([1, 2, 3]),
    ],
    ids=["tuple", "bool", "tensor", "bfloat16 with a graph", "list of tensors", "list of numpy", "array"],
)
def test_every_kind_of_result(responses, result):
    assert _scorer(_constant(result))(responses)[0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        ("0.5", "'0.5'"),
        ({}, "{}"),
        (1j, "1j"),
        (1e39, "1e+39"),
    ],
)
def test_a_result_that_is_no_finite_number_is_named_with_its_row(responses, value, shown):
    message = (
        f"The reward function fixed returned {shown} for row 1 (completion 'due'); expected a finite number, or None "
        "where it does not apply."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        _scorer(_constant([1.0, value, 3.0]))(responses)


@pytest.mark.parametrize(
    ("result", "given"),
    [
        ([1.0], "1 values"),
        ([1.0] * 4, "4 values"),
        ([], "0 values"),
        (torch.ones(2), "2 values"),
        (torch.tensor(1.0), "a float"),
        (None, "a NoneType"),
        (1.0, "a float"),
        ("abc", "a str"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "a dict"),
    ],
)
def test_a_result_of_the_wrong_shape_or_type_is_named(responses, result, given):
    message = f"The reward function fixed returned {given}; expected a list of 3, one a completion."
    with pytest.raises(ValueError, match=re.escape(message)):
        _scorer(_constant(result))(responses)


async def _failing_slowly(**kwargs):
    raise KeyError("gold")


def _failing(**kwargs):
    raise KeyError("gold")


@pytest.mark.parametrize("function", [_failing, _failing_slowly])
def test_a_function_that_raises_is_named(responses, function):
    message = (
        f"The reward function {function.__name__} raised KeyError: 'gold'. It was called with 3 prompts and "
        "completions and the columns ['answer']"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)) as caught:
        _scorer(function)(responses)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_refuses_columns_is_told_of_kwargs(responses):
    def strict(prompts, completions, completion_ids):
        return [0.0] * 3

    with pytest.raises(RuntimeError, match=r"raised TypeError: .*'answer'.*should accept \*\*kwargs"):
        _scorer(strict)(responses)


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        ([_length, _answer], ["_length", "_answer"]),
        ([_length, _answer, _length], ["_length_0", "_answer", "_length_1"]),
    ],
)
def test_names(functions, names):
    assert _scorer(*functions).names == names


def test_numbered_names_collide_with_no_other_name():
    def named(name):
        function = _constant([0.0])
        function.__name__ = name
        return function

    names = _scorer(named("f"), named("f"), named("f_0"), named("f_1")).names
    assert len(set(names)) == 4


def test_the_reward_role_is_the_first_source_and_goes_in_batches(responses):
    base = RewardBase()
    scorer = _scorer(_answer, weights=[10.0, 1.0], base=base)
    scores, by_source = scorer(responses)
    assert scorer.names == ["reward_adapter", "_answer"]
    assert by_source["reward_adapter"].tolist() == [2.0, 3.0, 1.0]
    assert scores.tolist() == [27.0, 38.0, 19.0]
    assert sorted(base.batches) == [1, 2]


def test_the_reward_role_is_enough(responses):
    assert _scorer(base=RewardBase())(responses)[0].tolist() == [2.0, 3.0, 1.0]


def test_no_source_at_all_is_an_error():
    with pytest.raises(ValueError, match="There is no reward source. Give reward_adapter .* or reward_funcs"):
        _scorer()


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 2.0, 3.0]])
def test_the_number_of_weights_is_checked(weights):
    message = f"reward_weights has {len(weights)} numbers; expected 2, one for each of ['_length', '_answer']."
    with pytest.raises(ValueError, match=re.escape(message)):
        _scorer(_length, _answer, weights=weights)


def test_weights_that_reward_nothing_are_refused():
    with pytest.raises(
        ValueError, match=re.escape("reward_weights is [0.0, 0] for ['_length', '_answer'], so nothing")
    ):
        _scorer(_length, _answer, weights=[0.0, 0])


@pytest.mark.parametrize("thing", ["a/reward-model", 3, None])
def test_what_cannot_be_called_is_refused(thing):
    message = f"reward_funcs holds {thing!r}; expected functions f(prompts, completions, completion_ids, **columns)."
    with pytest.raises(TypeError, match=re.escape(message)):
        _scorer(_length, thing)


def _prompts(*given, **columns) -> Prompts:
    ids = torch.full((len(given), 2), 3)
    return Prompts(ids, torch.ones_like(ids, dtype=torch.bool), {"prompt": list(given), **columns})


def _rollout(prompts, *rows):
    return assemble(prompts, torch.tensor(rows), [EOS])


def test_text_prompts_have_text_completions():
    prompts = _prompts("w3 w3", "w4", answer=[1, 2])
    responses = read_responses(prompts, _rollout(prompts, [7, 8, EOS, PAD], [9, 5, 6, 7]), tiny_tokenizer())
    assert responses.prompts == ["w3 w3", "w4"]
    assert responses.completions == ["w7 w8", "w9 w5 w6 w7"]
    assert responses.completion_ids == [[7, 8, EOS], [9, 5, 6, 7]]
    assert responses.columns == {"answer": [1, 2]}


def test_chat_prompts_have_one_assistant_message():
    question = [{"role": "user", "content": "w3"}]
    prompts = _prompts(question)
    responses = read_responses(prompts, _rollout(prompts, [7, EOS]), tiny_tokenizer())
    assert responses.prompts == [question]
    assert responses.completions == [[{"role": "assistant", "content": "w7"}]]


def test_an_empty_completion_is_empty_text():
    prompts = _prompts("w3")
    responses = read_responses(prompts, _rollout(prompts, [EOS, PAD]), tiny_tokenizer())
    assert (responses.completions, responses.completion_ids) == ([""], [[EOS]])


def test_columns_that_would_clash_with_arguments_are_left_out():
    prompts = _prompts("w3", completion=["x"], completions=["x"], prompts=["x"], completion_ids=[[1]], kept=["x"])
    responses = read_responses(prompts, _rollout(prompts, [7, EOS]), tiny_tokenizer())
    assert responses.columns == {"kept": ["x"]}
    assert _scorer(_constant([1.0]))(responses)[0].tolist() == [1.0]
