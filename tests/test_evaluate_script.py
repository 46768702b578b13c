"""scripts/evaluate.py: what a run writes and shows, and what is refused before anything is loaded."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import sys
from pathlib import Path

import datasets
import pytest
import torch
from rich.console import Console
from trl import ModelConfig, TrlParser

from builders import randomize, save_tiny_model
from ppo_lora import Evaluation, PolicySamples, Role, SharedBase, compare_policies
from ppo_lora.adapters import write_adapter

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import evaluate  # noqa: E402
import evaluate_report  # noqa: E402

PROMPTS, SAMPLES = 4, 2
WRITTEN = ("evaluation.json", "evaluation.png", "samples.jsonl")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A base, an SFT, a PPO and a reward adapter for it, and prompts."""
    root = tmp_path_factory.mktemp("evaluate")
    save_tiny_model(root / "model")
    for seed, name in enumerate(("sft", "ppo", "reward")):
        start = SharedBase.from_pretrained(str(root / "model"))
        role = Role.VALUE if name == "reward" else Role.POLICY
        randomize(start.trainable_parameters()[role], seed, scale=0.2)
        write_adapter(root / name, start.adapter(role))
    (root / "data").mkdir()
    rows = (json.dumps({"prompt": f"w{3 + i}", "answer": f"w{9 + i}"}) for i in range(PROMPTS))
    (root / "data" / "test.jsonl").write_text("\n".join(rows))
    (root / "eval_rewards.py").write_text(
        "def says_answer(completions, answer, **kwargs):\n"
        "    return [float(a in c) for c, a in zip(completions, answer)]\n"
    )
    return root


@pytest.fixture
def run(root, monkeypatch):
    """Run the script in the folder; options given as None are left out."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(root / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(**changes) -> None:
        options = {
            "model_name_or_path": "model",
            "dataset_name": "data",
            "policies": ["base", "sft=sft", "ppo=ppo"],
            "reward_adapter": "reward",
            "reward_funcs": ["eval_rewards.says_answer"],
            "num_samples": SAMPLES,
            "max_completion_length": 5,
            "output_dir": "out",
            **changes,
        }
        words = []
        for name, value in options.items():
            values = value if isinstance(value, list) else [value]
            words += [] if value is None else [f"--{name}", *map(str, values)]
        evaluate.run(words)

    return run


def test_a_run_writes_numbers_a_picture_and_samples(root, run, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run()
    report = json.loads((root / "out" / "evaluation.json").read_text())
    assert (report["prompts"], report["samples"], report["reference"]) == (PROMPTS, SAMPLES, "sft")
    assert list(report["policies"]) == ["base", "sft", "ppo"]
    for policy in report["policies"].values():
        assert set(policy["scores"]) == {"reward_adapter", "says_answer"}
        assert {"kl", "length", "stopped", "distinct_1", "distinct_2", "best_of"} <= set(policy)
        assert set(policy["best_of"]["reward_adapter"]) == {"1", "2"} == set(report["best_of_kl"])
    assert len(report["win_rates"]) == 3 * 2
    assert report["settings"]["num_samples"] == SAMPLES and report["settings"]["dataset_name"] == "data"
    assert set(report["adapters"]) == {"base", "sft", "ppo", "reward"} and report["base"]["name"] == "model"
    assert report["versions"]["ppo_lora"]
    assert (root / "out" / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (root / "out" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == PROMPTS * 3 * SAMPLES
    assert {"prompt", "policy", "sample", "completion", "scores", "kl", "tokens", "stopped"} == set(rows[0])
    mean = sum(row["scores"]["reward_adapter"] for row in rows if row["policy"] == "ppo") / (PROMPTS * SAMPLES)
    assert report["policies"]["ppo"]["scores"]["reward_adapter"]["estimate"]["mean"] == pytest.approx(mean, rel=1e-5)
    shown = capsys.readouterr().out
    assert "ppo over sft" in shown and "KL to sft" in shown and "best of n" in shown
    assert all(b"hf_secret" not in (root / "out" / name).read_bytes() for name in WRITTEN)


def test_the_same_seed_writes_the_same_bytes(root, run):
    run(output_dir="same")
    first = [(root / "same" / name).read_bytes() for name in WRITTEN]
    run(output_dir="same")
    assert [(root / "same" / name).read_bytes() for name in WRITTEN] == first


def test_fewer_prompts_and_a_named_reference(root, run):
    run(policies=["ppo=ppo"], reference="base", max_prompts=2, reward_funcs=None, num_samples=1, output_dir="few")
    report = json.loads((root / "few" / "evaluation.json").read_text())
    assert (report["prompts"], report["reference"], report["win_rates"]) == (2, "base", [])
    assert report["policies"]["ppo"]["kl"]["estimate"]["mean"] != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ["ppo"]}, "policies has 'ppo'"),
        ({"policies": ["a=sft", "a=ppo"]}, "'a' twice"),
        ({"best_of": [1, 4]}, "best_of has 4"),
        ({"reward_adapter": None, "reward_funcs": None}, "Nothing scores the responses"),
        ({"reward_funcs": ["eval_rewards.unknown"]}, "has no function unknown"),
        ({"reference": "dpo"}, "reference is 'dpo'"),
        ({"dataset_name": "nowhere"}, "nowhere"),
        ({"dataset_test_split": "validation"}, "validation"),
        ({"max_prompts": 0}, "max_prompts is 0"),
        ({"output_dir": "eval_rewards.py"}, "which is a file"),
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded_or_written(root, run, monkeypatch, changes, message):
    monkeypatch.setattr(evaluate, "load_policies", lambda *_, **__: pytest.fail("the base was loaded"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as stop:
        run(**{"output_dir": "refused", **changes})
    assert str(stop.value).startswith("error: ") and message in str(stop.value)
    assert "\n" not in str(stop.value)
    assert not (root / "refused").exists()


def test_prompts_without_their_column_are_refused(root, run):
    (root / "questions").mkdir()
    (root / "questions" / "test.jsonl").write_text('{"question": "w3"}\n')
    with pytest.raises(SystemExit, match=r"error: The data set questions has the columns \['question'\]"):
        run(dataset_name="questions", output_dir="refused")


def test_the_readmes_command_parses():
    readme = (SCRIPTS.parent / "README.md").read_text()
    (command,) = re.findall(r"^python scripts/evaluate.py (.*?)\n```", readme, flags=re.MULTILINE | re.DOTALL)
    parser = TrlParser((evaluate.EvaluationArguments, evaluate.EvaluationConfig, ModelConfig))
    arguments, config, _ = parser.parse_args_and_config(
        shlex.split(command.replace("\\\n", "")), fail_with_unknown_args=True
    )
    assert list(evaluate.parse_policies(arguments.policies)) == ["base", "sft", "ppo"]
    assert config.temperature == 1.0 and evaluate.load_function(arguments.reward_funcs[0])


# What is shown


@pytest.fixture
def evaluation() -> Evaluation:
    """Chat prompts; one scorer speaks, the other never."""

    def said(score: float) -> PolicySamples:
        return PolicySamples(
            completions=[[[{"role": "assistant", "content": "[good]"}]] * 2] * 2,
            completion_ids=[[[1, 2, 3]] * 2] * 2,
            scores={"judge": torch.tensor([[score, 2.0], [1.0, 1.0]]), "mute": torch.full((2, 2), math.nan)},
            kl=torch.zeros(2, 2),
            stopped=torch.tensor([[True, False]] * 2),
        )

    prompt = [{"role": "user", "content": "what [of] it?"}]
    return Evaluation([prompt, prompt], {"sft": said(0.0), "ppo": said(2.0)}, "sft")


def shown(*tables) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_tables_have_the_numbers_and_the_text_as_it_is(evaluation):
    comparison = compare_policies(evaluation, [1, 2])
    text = shown(*evaluate_report.tables(comparison), evaluate_report.samples_table(evaluation))
    parts = ("no scores", "1.00 to 1.00", "50.0%", "ppo over sft", "0.19", "user: what [of] it?", "assistant: [good]")
    for part in parts:
        assert part in text, part


def test_without_pairs_or_further_n_there_is_one_table(evaluation):
    alone = Evaluation(evaluation.prompts, {"sft": evaluation.policies["sft"]}, "sft")
    assert len(evaluate_report.tables(compare_policies(alone, [1]))) == 1


def test_a_score_that_is_missing_is_null(evaluation):
    rows = list(evaluate_report.sample_rows(evaluation))
    assert len(rows) == 2 * 2 * 2
    assert rows[2]["policy"] == "ppo" and rows[2]["scores"] == {"judge": 2.0, "mute": None}
    assert rows[1]["sample"] == 1 and rows[1]["tokens"] == 3 and rows[1]["stopped"] is False


@pytest.mark.parametrize("best_of", [[1], [1, 2]])
def test_the_picture_is_drawn_with_what_there_is(evaluation, best_of, tmp_path):
    evaluate_report.draw(evaluation, compare_policies(evaluation, best_of), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_base_is_grey_and_others_are_not():
    colours = evaluate_report.policy_colours(["sft", "base", "ppo"])
    assert colours["base"] == evaluate_report.BASE_COLOUR and len(set(colours.values())) == 3


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0.5, -1.0], "-1.000"), ([8.41, 1.0], "1.00"), ([26.4], "26.4"), ([1234.0], "1234"), ([0.0], "0.00"), ([], "0")],
)
def test_numbers_of_a_row_have_the_same_decimals(numbers, text):
    assert evaluate_report._format(numbers)(numbers[-1] if numbers else 0.0).startswith(text)
