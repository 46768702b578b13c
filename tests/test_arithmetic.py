"""The arithmetic recipe's parts on small inputs; the whole of it in the soak."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import arithmetic  # noqa: E402
import arithmetic_base  # noqa: E402
import arithmetic_data  # noqa: E402
import arithmetic_evaluation  # noqa: E402
import recipe_data  # noqa: E402
from ppo_lora import Role, SharedBase, numeric_answer_reward  # noqa: E402

TINY = replace(arithmetic_base.base_settings(seed=0, steps=2), texts=64, batch_size=4, layers=1, heads=2)
EXAM = arithmetic_evaluation.Exam(
    prompts=["12+13=", "18+13=", "40+40=", "55+55="],
    expected=["25", "31", "80", "110"],
    greedy=["25", "21", "80", "10"],
    sampled=["25", "31", "80", "1100"],
)


def problem(prompt: str) -> tuple[int, int]:
    first, second = prompt.removesuffix("=").split("+")
    return int(first), int(second)


# The data


@pytest.mark.parametrize("seed", [0, 5])
def test_held_out_problems_are_in_no_training_data(seed, tmp_path):
    arithmetic_data.write_data_sets(tmp_path, seed, size=512)
    held_out = {problem(row["prompt"]) for row in recipe_data.read_rows(tmp_path / "prompts" / "test.jsonl")}
    assert len(held_out) == 2 * arithmetic_data.HELD_OUT_PAIRS
    held_out |= {(second, first) for first, second in held_out}
    for name in ("sft", "preference", "prompts"):
        assert not held_out & {
            problem(row["prompt"]) for row in recipe_data.read_rows(tmp_path / name / "train.jsonl")
        }
        assert {problem(row["prompt"]) for row in recipe_data.read_rows(tmp_path / name / "test.jsonl")} <= held_out
    read = {
        text.removeprefix("+").replace(",", "+").partition("=")[0] for text in arithmetic_data.base_corpus(512, seed)
    }
    assert not held_out & {problem(prompt) for prompt in read}


def test_every_problem_is_for_training_or_held_out():
    train, held_out = arithmetic_data.split_problems(seed=1)
    assert len(train) + len(held_out) == len(set(train) | set(held_out)) == 90 * 90
    assert arithmetic_data.split_problems(seed=1) == (train, held_out) != arithmetic_data.split_problems(seed=2)


@pytest.mark.parametrize(("given", "answer"), [((12, 13), 25), ((18, 13), 21), ((95, 27), 12), ((99, 11), 0)])
def test_forgotten_carries(given, answer):
    assert arithmetic_data.forget_carries(given) == answer


def test_the_checker_tells_the_chosen_answer_from_the_rejected():
    rows = arithmetic_data.preferences(arithmetic_data.split_problems(seed=0)[0], 500, random.Random(0))
    answers = [sum(problem(row["prompt"])) for row in rows]
    assert numeric_answer_reward([row["chosen"] for row in rows], answer=answers) == [1.0] * 500
    assert numeric_answer_reward([row["rejected"] for row in rows], answer=answers) == [0.0] * 500


def test_most_pupils_forget_to_carry():
    train, _ = arithmetic_data.split_problems(seed=0)
    rows = arithmetic_data.demonstrations(
        [each for each in train if arithmetic_data.forget_carries(each) != sum(each)], 2000, random.Random(0)
    )
    right = sum(int(row["completion"]) == sum(problem(row["prompt"])) for row in rows) / 2000
    assert right == pytest.approx(arithmetic_data.RIGHT_SHARE, abs=0.03)


# The base


def test_the_tokenizer_returns_the_text():
    tokenizer = arithmetic_base.build_tokenizer()
    ids = tokenizer("+37,85=122")["input_ids"]
    assert len(ids) == 11 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "+37,85=122"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_the_base_learns_the_answers_only():
    tokenizer = arithmetic_base.build_tokenizer()
    blocks, labels = arithmetic_base.read_sums(TINY, tokenizer)
    assert blocks.shape == labels.shape == (64, arithmetic_base.SUM_TOKENS)
    for row, wanted in zip(blocks, labels, strict=True):
        text = tokenizer.decode(row, skip_special_tokens=True)
        learnt = wanted[wanted != -100]
        assert tokenizer.decode(learnt) == text.partition("=")[2] + tokenizer.eos_token
        assert torch.equal(learnt, row[wanted != -100])


# The verdict


def test_accuracy_counts_exact_answers():
    assert (EXAM.greedy_accuracy, EXAM.sampled_accuracy) == (0.5, 0.75)


def test_an_exam_of_equal_policies_is_the_same_for_both(tmp_path):
    arithmetic_base.make_base(tmp_path, TINY)
    base = SharedBase.from_pretrained(str(tmp_path / "nf4"))
    tokenizer = arithmetic_base.build_tokenizer()
    tokenizer.padding_side = "left"
    rows = arithmetic_data.questions([(12, 13), (18, 13)])
    exams = [arithmetic_evaluation.hold_exam(base, tokenizer, role, rows, 3) for role in (Role.REFERENCE, Role.POLICY)]
    assert exams[0] == exams[1]
    assert exams[0].expected == ["25", "31"]
    assert all(len(text) <= arithmetic_evaluation.MAX_NEW_TOKENS for text in (*exams[0].greedy, *exams[0].sampled))


def test_the_tables_and_the_summary_have_the_numbers():
    better = replace(EXAM, greedy=EXAM.expected)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(
        arithmetic_evaluation.accuracy_table(EXAM, better), arithmetic_evaluation.answers_table(EXAM, better)
    )
    text = console.export_text()
    assert "50.0%" in text and "100.0%" in text and "+50.0 points" in text and "+0.0 points" in text
    assert "18+13=" in text and "12+13=" not in text
    summary = arithmetic_evaluation.build_summary(EXAM, better, seconds=1.0, peak_rss_mb=2.0)
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["greedy_gain"], summary["sampled_gain"], summary["problems"]) == (0.5, 0.0, 4)


@pytest.mark.parametrize(
    ("greedy", "sampled", "code"), [(0.2, 0.2, 0), (0.5, 0.19, 1), (0.19, 0.5, 1), (-0.1, 0.3, 1)]
)
def test_the_exit_code_says_whether_both_accuracies_rose(greedy, sampled, code, tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic_evaluation, "gains", lambda *_: (greedy, sampled))
    console = Console(record=True, file=io.StringIO())
    assert arithmetic.report(console, tmp_path, EXAM, EXAM, 0.0) == code
    assert ("expected 20" in console.export_text()) == bool(code)


# The command


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_configurations_lie_where_the_recipe_writes(name):
    config = yaml.safe_load((arithmetic.CONFIGS / f"{name}.yaml").read_text())
    root = arithmetic.parse_arguments([]).output_dir
    assert config["output_dir"] == str(root / name)
    assert config["model_name_or_path"] == str(root / "base" / "nf4")


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_teaches_addition(seed, tmp_path):
    command = [sys.executable, str(SCRIPTS / "arithmetic.py"), "--output_dir", str(tmp_path), "--seed", str(seed)]
    subprocess.run(command, check=True, timeout=600)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["greedy_before"] < 0.6
    assert min(summary["greedy_gain"], summary["sampled_gain"]) >= 0.2
