"""The quickstart's parts: data sets, gold rule, base, evaluation, tables. A whole run is `make quickstart`."""

import io
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from datasets import load_dataset
from rich.console import Console
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import quickstart  # noqa: E402
import quickstart_base  # noqa: E402
import quickstart_data  # noqa: E402
import quickstart_evaluation  # noqa: E402
import quickstart_report  # noqa: E402
import recipe_base  # noqa: E402
import recipe_data  # noqa: E402
import recipe_evaluation  # noqa: E402
import recipe_stages  # noqa: E402
from ppo_lora import EvaluationConfig, Role, SharedBase  # noqa: E402

TINY = recipe_base.BaseSettings(texts=64, steps=2, batch_size=4, layers=1, heads=2)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    quickstart_base.make_base(folder, TINY)
    return folder


@pytest.fixture
def reviews() -> quickstart_evaluation.Reviews:
    return quickstart_evaluation.Reviews(
        prompts=["review of the red [mug] :"] * 3,
        texts=["it is solid .", "it is solid .", "it is [poor] ."],
        scores=[1.0, 2.0, 3.0],
        golds=[1.0, 1.0, 0.0],
        kl=0.5,
        length=5.0,
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("the handle is solid .", 1.0),
        ("the handle is poor .", 0.0),
        ("the handle is solid . i find the lid poor . it has a neat size .", 2 / 3),
        ("the handle is solid", 0.0),
        ("it came on a monday .", 0.0),
        ("", 0.0),
    ],
)
def test_gold_score(text: str, score: float) -> None:
    assert quickstart_data.gold_score(text) == pytest.approx(score)
    assert quickstart_data.gold_reward([text], prompts=["p"], completion_ids=[[1]]) == [pytest.approx(score)]


def test_praise_and_blame_share_no_word() -> None:
    assert not set(quickstart_data.PRAISE) & set(quickstart_data.BLAME)


def test_reviews_are_judged_about_evenly_and_differ() -> None:
    rng = random.Random(0)
    texts = [quickstart_data.write_review(("red", "mug"), rng) for _ in range(1000)]
    mean = sum(map(quickstart_data.gold_score, texts)) / len(texts)
    assert 0.4 < mean < 0.6
    assert len(set(texts)) > 990


def test_data_sets_load_in_trl_formats(tmp_path: Path) -> None:
    quickstart_data.write_data_sets(tmp_path / "data", seed=0, size=64)
    columns = {
        "sft": ["completion", "prompt"],
        "preference": ["chosen", "prompt", "rejected"],
        "prompts": ["prompt"],
    }
    for name, expected in columns.items():
        data_set = load_dataset(str(tmp_path / "data" / name), cache_dir=str(tmp_path / "cache"))
        assert sorted(data_set) == ["test", "train"]
        for split in data_set.values():
            assert sorted(split.column_names) == expected


def test_chosen_reviews_are_better_than_rejected() -> None:
    train, _ = quickstart_data.split_products(seed=0)
    for pair in quickstart_data.preferences(train, 50, random.Random(0)):
        assert quickstart_data.gold_score(pair["chosen"]) > quickstart_data.gold_score(pair["rejected"])


def test_held_out_products_are_in_no_training_data(tmp_path: Path) -> None:
    quickstart_data.write_data_sets(tmp_path, seed=3, size=256)
    _, held_out = quickstart_data.split_products(seed=3)
    asked = {row["prompt"] for row in recipe_data.read_rows(tmp_path / "prompts" / "test.jsonl")}
    assert len(asked) == len(held_out) * len(quickstart_data.OPENINGS)
    for name in ("sft", "preference", "prompts"):
        trained = {row["prompt"] for row in recipe_data.read_rows(tmp_path / name / "train.jsonl")}
        assert not trained & asked
    corpus = quickstart_data.base_corpus(256, seed=3)
    assert not any(text.startswith(tuple(asked)) for text in corpus)


def test_data_depend_on_the_seed_alone(tmp_path: Path) -> None:
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        quickstart_data.write_data_sets(tmp_path / folder, seed=seed, size=16)
    a, b, c = ((tmp_path / folder / "sft" / "train.jsonl").read_bytes() for folder in "abc")
    assert a == b != c


def test_tokenizer_knows_every_word_and_returns_the_text() -> None:
    tokenizer = quickstart_base.build_tokenizer()
    for text in quickstart_data.base_corpus(200, seed=0):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_base_learns() -> None:
    tokenizer = quickstart_base.build_tokenizer()
    settings = recipe_base.BaseSettings(texts=256, steps=30, batch_size=8, layers=1, heads=2)
    torch.manual_seed(0)
    model = recipe_base.build_model(settings, tokenizer)
    blocks = quickstart_base.pack_corpus(settings, tokenizer)
    assert blocks.shape[1] == settings.block_tokens
    untrained = model(input_ids=blocks[:8], labels=blocks[:8]).loss.item()
    assert recipe_base.train_model(model, blocks, blocks, settings) < 0.8 * untrained


def test_base_is_saved_in_nf4_and_used_again(base_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_folder / "nf4")
    assert model.is_loaded_in_4bit
    assert model.config.quantization_config.bnb_4bit_quant_type == "nf4"
    assert recipe_base.is_made(base_folder, TINY)
    assert not recipe_base.is_made(base_folder, recipe_base.BaseSettings())
    assert not recipe_base.is_made(base_folder / "nowhere", TINY)


def test_fresh_policies_write_the_same_reviews(base_folder: Path, tmp_path: Path) -> None:
    nf4 = base_folder / "nf4"
    base = SharedBase.from_pretrained(str(nf4))
    policies = {name: base.adapter(Role.POLICY) for name in ("sft", "ppo")}
    rows = [{"prompt": "review of the red mug :"}, {"prompt": "what i think of the green garden chair :"}]
    config = EvaluationConfig(num_samples=2, temperature=1.0, max_completion_length=6, seed=1)
    reviews = quickstart_evaluation.write_reviews(nf4, policies, base.adapter(Role.VALUE), rows, config)
    assert reviews["ppo"] == reviews["sft"]
    assert reviews["ppo"].prompts == [rows[0]["prompt"]] * 2 + [rows[1]["prompt"]] * 2
    assert reviews["ppo"].kl == 0.0
    assert reviews["ppo"].scores == [0.0] * 4  # the value head of a fresh base is zero
    assert reviews["ppo"].golds == [quickstart_data.gold_score(text) for text in reviews["ppo"].texts]
    assert 1 <= reviews["ppo"].length <= 6


def test_pair_accuracy_counts_pairs_in_the_right_order() -> None:
    class CountsPraise:
        """Scores a row by its number of "solid"."""

        def scores(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            solid = tokenizer.convert_tokens_to_ids("solid")
            return ((input_ids == solid) & attention_mask.bool()).sum(1).float()

    tokenizer = quickstart_base.build_tokenizer()
    better, worse = " it is solid .", " it is poor ."
    pairs = [{"prompt": "review of the mug :", "chosen": better, "rejected": worse}] * 3
    pairs += [{"prompt": "review of the mug :", "chosen": worse, "rejected": better}]
    assert recipe_evaluation.pair_accuracy(CountsPraise(), tokenizer, pairs) == pytest.approx(0.75)


def test_tables_show_the_numbers_and_the_text_as_it_is(reviews: quickstart_evaluation.Reviews) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(quickstart_report.comparison_table(reviews, reviews))
    console.print(quickstart_report.samples_table(reviews, reviews))
    text = console.export_text()
    for part in ("0.667", "2.00", "0.50", "5.0", "red [mug]", "it is [poor] ."):
        assert part in text


def test_curves_are_drawn_from_the_newest_trainer_state(
    tmp_path: Path, reviews: quickstart_evaluation.Reviews
) -> None:
    history = [{key: float(step) for key in quickstart_report.CURVES} for step in range(4)] + [{"train_runtime": 1.0}]
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"log_history": history}))
    assert quickstart_report.read_history(tmp_path, "objective/kl") == {"objective/kl": [0.0, 1.0, 2.0, 3.0]}
    quickstart_report.draw_curves(tmp_path, reviews, reviews, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_summary_has_the_promised_keys(reviews: quickstart_evaluation.Reviews) -> None:
    summary = quickstart_report.build_summary(reviews, reviews, seconds=1.0, peak_rss_mb=2.0)
    promised = {"gold_before", "gold_after", "score_before", "score_after", "kl", "seconds", "peak_rss_mb"}
    assert promised <= summary.keys()
    assert json.loads(json.dumps(summary)) == summary


def test_failed_stage_shows_its_log_and_command_and_ends_with_its_code(tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    stages = recipe_stages.Stages(console, tmp_path / "logs")
    command = [sys.executable, "-c", "print('what [went] wrong'); raise SystemExit(3)"]
    with pytest.raises(SystemExit) as stop, stages.stage("a stage"):
        stages.run("broken", command)
    assert stop.value.code == 3
    text = console.export_text()
    assert "what [went] wrong" in text
    assert sys.executable in text
    assert "done" not in text


def test_finished_stage_shows_its_time_and_remarks(tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    stages = recipe_stages.Stages(console, tmp_path / "logs")
    with stages.stage("a stage") as remarks:
        stages.run("fine", [sys.executable, "-c", "print('hello')"])
        remarks.append("99% right")
    assert (tmp_path / "logs" / "fine.log").read_text() == "hello\n"
    assert "a stage" in console.export_text(clear=False)
    assert "99% right" in console.export_text()


def test_options() -> None:
    defaults = quickstart.parse_arguments([])
    assert (defaults.output_dir, defaults.seed, defaults.short) == (Path("runs/quickstart"), 0, False)
    assert quickstart.parse_arguments(["--short", "--seed", "3"]).seed == 3


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_configurations_lie_where_the_quickstart_writes(name: str) -> None:
    config = yaml.safe_load((quickstart.CONFIGS / f"{name}.yaml").read_text())
    root = quickstart.parse_arguments([]).output_dir
    assert config["output_dir"] == str(root / name)
    assert config["model_name_or_path"] == str(root / "base" / "nf4")


@pytest.mark.parametrize("name", ["trl", "accelerate"])
def test_programs_of_this_environment_are_found(name: str) -> None:
    assert Path(recipe_stages.program(name)).is_file()


@pytest.mark.parametrize(("gold_after", "code"), [(0.9, 0), (0.5, 1), (0.4, 1)])
def test_exit_code_says_whether_ppo_raised_the_gold_score(
    gold_after: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reviews: quickstart_evaluation.Reviews,
) -> None:
    before, after = (replace(reviews, golds=[gold]) for gold in (0.5, gold_after))
    for stage in ("make_base_and_data", "train_adapters", "run_ppo", "show"):
        monkeypatch.setattr(quickstart, stage, lambda *_: None)
    monkeypatch.setattr(quickstart, "quiet_environment", lambda _: {})
    monkeypatch.setattr(quickstart, "compare", lambda *_: (before, after))
    assert quickstart.main(["--output_dir", str(tmp_path)]) == code
