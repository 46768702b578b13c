"""Rewards for answers that can be checked: what counts as the answer, and texts that try to break the reading."""

from __future__ import annotations

import time

import pytest

from ppo_lora import format_reward, numeric_answer_reward

SAME = [
    ("42", "42"),
    ("The answer is 42.", "42"),
    ("first 7, then 42", "42"),
    ("6 * 7 = 42", 42),
    ("42", "6 * 7 = <<6*7=42>>42\n#### 42"),
    ("42.0", "42"),
    ("42", 42.0),
    ("+42", "42"),
    ("042", "42"),
    ("0.5", ".5"),
    ("1/2", "0.5"),
    ("84 / 2", "42"),
    ("-3", "-3.0"),
    ("it is −3", "-3"),
    ("5-3", "3"),
    ("(5)-3", "3"),
    ("- 42", "42"),  # a list's bullet
    ("1,234,567", "1234567"),
    ("1234567", "#### 1,234,567"),
    ("1,234.50", "1234.5"),
    ("2, 3,4", "4"),
    ("1,2345", "2345"),
    ("$42", "42"),
    ("-$42.00", "-42"),
    ("$-42", "-42"),
    ("\\$ 1,000", "1000"),
    ("€5", "5"),
    ("5€3", "3"),
    ("$42$", "42"),
    ("50%", "50"),
    ("42km and CO2", "42"),
    ("x=42", "42"),
    ("答案是42", "42"),
    ("and so ...42", "42"),
    ("version 1.2.3", "1.2"),
    ("1e3", "1000"),
    ("2.5E-1", "1/4"),
    ("0.0000001", 1e-07),
    ("#### 42\n\nQuestion: what is 5 + 6?", "42"),
    ("#### 5\nno,\n#### 42 apples at 3 dollars", "42"),
    ("####\n$42", "42"),
    ("#### Step 3\nso 42", "42"),  # a heading
    ("\\boxed{42}, checked 3 times", "42"),
    ("\\boxed{41} no, \\boxed{x = 42\\text{ km}} or #### 5", "42"),
    ("\\boxed{\\frac{3}{4}} of 8", "0.75"),
    ("-\\dfrac{1}{2}", "-0.5"),
    ("\\frac{-1}{2}", "-1/2"),
    ("\\boxed{1{,}000}", "1000"),
    ("1\\,000", "1000"),
    ("\\boxed{42", "42"),
    ("42", "\\boxed{42}"),
]

DIFFERENT = [
    ("", "42"),
    ("forty-two", "42"),
    ("42 or 43", "42"),
    ("43 or 42 or 41", "42"),
    ("0.33", "1/3"),
    ("0.30000000000000004", "0.3"),
    ("420", "42"),
    ("-42", "42"),
    ("4 2", "42"),
    ("50%", "0.5"),
    ("x42", "42"),
    ("5/0", "5"),
    ("5/0.0", "0"),
    ("\\boxed{A} 42", "42"),
    ("\\boxed{} 42", "42"),
    ("#### 41, that is 42", "42"),
    ("1e9999999999", "1"),
    ("12e99999", "12"),
    ("9" * 5000, "9"),
    ("__import__('os').system('true') or 42.5", "42"),
    ("nan", "42"),
    ("inf", "42"),
]


@pytest.mark.parametrize(("completion", "answer"), SAME)
def test_the_answer_is_right(completion, answer):
    assert numeric_answer_reward(completions=[completion], answer=[answer]) == [1.0]


@pytest.mark.parametrize(("completion", "answer"), DIFFERENT)
def test_the_answer_is_wrong(completion, answer):
    assert numeric_answer_reward(completions=[completion], answer=[answer]) == [0.0]


@pytest.mark.parametrize("answer", ["yes", "", None, float("nan"), float("inf"), "1/0", "7" * 5000])
def test_rows_without_a_number_to_check_against_get_no_reward(answer):
    assert numeric_answer_reward(completions=["42"], answer=[answer]) == [None]


def test_chat_completions_are_judged_by_their_last_message():
    call = [{"role": "assistant", "content": "42"}, {"role": "tool", "content": "7"}]
    parts = [{"type": "text", "text": "it is 4"}, {"type": "image"}, {"type": "text", "text": "2"}]
    completions = [call, [{"role": "assistant", "content": parts}], [{"role": "assistant", "content": None}], []]
    assert numeric_answer_reward(completions=completions, answer=[7, 42, 42, 42]) == [1.0, 1.0, 0.0, 0.0]


def test_the_solution_column_is_read_where_there_is_no_answer_column():
    columns = {"prompts": ["q"] * 2, "completion_ids": [[1], [2]], "trainer_state": None}
    assert numeric_answer_reward(completions=["1", "2"], solution=["1", "1"], **columns) == [1.0, 0.0]
    assert numeric_answer_reward(completions=["1"], answer=["1"], solution=["2"]) == [1.0]
    with pytest.raises(ValueError, match=r"'answer' or 'solution'.*\['label'\]"):
        numeric_answer_reward(completions=["1"], label=["1"])


def test_rows_that_do_not_pair_up_are_an_error():
    with pytest.raises(ValueError, match="shorter"):
        numeric_answer_reward(completions=["1", "2"], answer=["1"])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("so #### 42", 1.0),
        ("\\boxed{42}", 1.0),
        ([{"role": "assistant", "content": "#### $1,000"}], 1.0),
        ("42", 0.0),
        ("#### Answer\n42", 0.0),
        ("\\boxed{A}", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward(completion, reward):
    assert format_reward(completions=[completion], answer=["42"]) == [reward]


@pytest.mark.parametrize(
    "piece",
    ["9", "1,", "1,000,", "1 / ", "-", "#", "#### ", "{", "\\boxed{", "\\frac{1}{", "\\frac{1", "$", "1.", "1e", " "],
)
def test_long_texts_take_linear_time(piece):
    text = piece * (300_000 // len(piece))
    start = time.process_time()
    numeric_answer_reward(completions=[text, text + "x"], answer=["42", "42"])
    format_reward(completions=[text])
    assert time.process_time() - start < 3  # one quadratic search would take minutes
