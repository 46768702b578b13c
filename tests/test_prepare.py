"""scripts/prepare.py: raw rows to TRL's formats, and what a slip in a solution is."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import datasets
import pytest
from datasets import load_dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import prepare  # noqa: E402
from ppo_lora import format_reward, numeric_answer_reward  # noqa: E402
from recipe_stand_ins import GSM8K, IMDB, TEST_ROWS, TRAIN_ROWS  # noqa: E402

TWO_STEPS = (
    "In May she sold 48/2 = <<48/2=24>>24 clips, 24 in all.\nTogether 48+24 = <<48+24=72>>72 clips, or 124.\n#### 72"
)
SOLUTIONS = [
    TWO_STEPS,
    "It is 5*200 = $<<5*200=1000>>1,000.\nSo 1,000+500 = $<<1000+500=1500>>1,500.\n#### 1,500",
    "It is 3*.5 = <<3*.5=1.5>>1.5 km.\n#### 1.5",
    "None is left: 2-2 = <<2-2=0>>0.\n#### 0",
    "It was warmer: <<2-5=-3>>-3 degrees.\n#### -3",
    "Without a note it is 7.\n#### 7",
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module", params=sorted(prepare.RECIPES))
def written(request, tmp_path_factory):
    """A recipe's raw data in small, and what was written of them."""
    root = tmp_path_factory.mktemp(request.param)
    {"gsm8k": GSM8K, "imdb": IMDB}[request.param](root / "raw")
    prepare.main(["--recipe", request.param, "--output_dir", str(root / "data"), "--source", str(root / "raw")])
    return request.param, root / "data"


def test_each_folder_is_a_data_set_with_two_splits(written):
    recipe, folder = written
    columns = {
        "sft": {"prompt", "completion"},
        "preference": {"chosen", "rejected"} if recipe == "imdb" else {"prompt", "chosen", "rejected"},
        "prompts": {"prompt"} if recipe == "imdb" else {"prompt", "answer"},
    }
    assert {path.name for path in folder.iterdir()} == columns.keys()
    for name, wanted in columns.items():
        data = load_dataset(str(folder / name))
        share = 2 if (recipe, name) == ("imdb", "preference") else 1
        assert {split: len(data[split]) for split in data} == {
            "train": TRAIN_ROWS // share,
            "test": TEST_ROWS // share,
        }
        assert set(data["train"].column_names) == wanted


def test_gsm8k_has_the_solutionwithout_notes_and_its_number():
    sets = prepare.gsm8k([{"question": " How many? ", "answer": TWO_STEPS}], random.Random(0))
    right = " In May she sold 48/2 = 24 clips, 24 in all.\nTogether 48+24 = 72 clips, or 124.\n#### 72"
    assert sets["sft"] == [{"prompt": "Question: How many?\nAnswer:", "completion": right}]
    assert sets["prompts"] == [{"prompt": "Question: How many?\nAnswer:", "answer": "72"}]
    assert sets["preference"][0]["chosen"] == right
    assert numeric_answer_reward(completions=[right], answer=["72"]) == format_reward(completions=[right]) == [1.0]


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_a_slip_leaves_the_form_and_changes_the_answer(solution):
    right = prepare.without_notes(solution)
    for seed in range(40):
        wrong = prepare.without_notes(prepare.with_a_slip(solution, random.Random(seed)))
        assert numeric_answer_reward(completions=[wrong], answer=[solution]) == [0.0]
        assert format_reward(completions=[wrong]) == [1.0]
        assert re.sub(r"-?[0-9][0-9.,]*", "N", wrong) == re.sub(r"-?[0-9][0-9.,]*", "N", right)
        assert len(wrong) - len(right) <= 6


def test_a_slip_is_at_any_step_and_leaves_what_is_before_it():
    wrong = [prepare.without_notes(prepare.with_a_slip(TWO_STEPS, random.Random(seed))) for seed in range(40)]
    first = [text for text in wrong if "48/2 = 24 " not in text]
    assert 0 < len(first) < len(wrong)
    assert all(text.startswith("In May she sold 48/2 = ") for text in wrong)
    for text in first:  # carried on, and 124 is another number
        slipped = re.search(r"48/2 = (\d+) clips, (\d+) in all.\nTogether 48\+(\d+) = (\d+) clips, or 124.", text)
        assert slipped[1] == slipped[2] == slipped[3] != "24" and slipped[4] != "72"


def test_pairs_without_a_difference_are_left_out():
    odd = {"question": "How many?", "answer": "One half.\n#### one half"}
    assert prepare.gsm8k([odd], random.Random(0))["preference"] == []


def test_imdb_keeps_whole_sentences_and_pairs_labels():
    long = "It had " + "very " * 50 + "many scenes. " + "word " * 60 + "end."
    rows = [
        {"text": f"<br /><br />One two  three four five. {long}", "label": 1},
        {"text": "Five six seven eight nine. Ten, and so on?", "label": 0},
        {"text": "Too short. Really.", "label": 0},
        {"text": "word " * 81 + "end. Then more of it.", "label": 1},
    ]
    sets = prepare.imdb(rows, random.Random(0))
    good = "One two three four five. It had " + "very " * 50 + "many scenes."
    bad = "Five six seven eight nine. Ten, and so on?"
    assert sets["preference"] == [{"chosen": good, "rejected": bad}]
    assert sorted(row["prompt"] + row["completion"] for row in sets["sft"]) == [bad, good]
    assert sorted(row["prompt"] for row in sets["prompts"]) == ["Five six seven eight", "One two three four"]


def test_the_seed_decides_everything(tmp_path):
    GSM8K(tmp_path / "raw")
    recipe, seen = prepare.RECIPES["gsm8k"], []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare.prepare(recipe, tmp_path / folder, source=str(tmp_path / "raw"), seed=seed)
        seen.append((tmp_path / folder / "preference" / "train.jsonl").read_text())
    assert seen[0] == seen[1] != seen[2]
    assert json.loads(seen[0].splitlines()[0])["chosen"].endswith("#### 14")


def test_an_unknown_recipe_is_told_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--recipe", "quickstart", "--output_dir", "data"])
    assert "gsm8k" in capsys.readouterr().err
