"""The model card and its picture: what a reader of a published policy gets to know, and what nobody gets to know."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from bases import lora_config
from ppo_lora.card import CardFacts, write_card
from ppo_lora.curves import draw_curves
from ppo_lora.identity import BaseIdentity
from ppo_lora.manifest import Origin
from runs import config, trainer


def _entry(episode: int, score: float, prefix: str = "") -> dict[str, float]:
    numbers = {"objective/scores": score, "objective/kl": 0.25, "completions/mean_length": 5.5, "time/sampling": 3.0}
    named = {f"{prefix}{key}": value for key, value in numbers.items()}
    return named if prefix else {**named, "episode": episode, "loss": 0.1}


HISTORY = [_entry(16, 0.5), _entry(0, 0.625, "eval_"), _entry(32, 0.75), _entry(0, 0.875, "eval_")]


@pytest.fixture
def facts(tmp_path):
    return CardFacts(
        name="my-policy",
        location="someone/my-policy",
        base=BaseIdentity("org/base", "main", "c" * 40, "nf4", 50, 64),
        lora=lora_config(r=7, lora_alpha=21),
        roles={
            "policy": Origin("org/sft@v1:deep", "d" * 40, "e" * 64),
            "reference": None,
            "value": Origin("the policy's"),
            "reward": Origin(str(tmp_path), None, "f" * 64),
        },
        reward_weights={"reward_adapter": 1.0, "short": 0.5},
        config=config(tmp_path / "out", hub_token="hf_secret", model_init_kwargs={"token": "hf_secret"}),
        history=HISTORY,
        dataset="org/prompts",
        tags={"ppo", "lora"},
        versions={"ppo_lora": "1.2.3"},
    )


def _card(tmp_path, facts) -> str:
    write_card(tmp_path, facts)
    return (tmp_path / "README.md").read_text()


def test_the_card_says_what_the_policy_is(tmp_path, facts):
    text = _card(tmp_path, facts)
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.base_model == "org/base" and data.datasets == "org/prompts" and data.library_name == "peft"
    assert data.tags == ["lora", "ppo"] and data.pipeline_tag == "text-generation"
    for said in (
        "# my-policy",
        "rank 7, alpha 21",
        "[`org/base`](https://huggingface.co/org/base) at `" + "c" * 40,
        "(loaded as nf4)",
        "datasets/org/prompts",
        'AutoPeftModelForCausalLM.from_pretrained("someone/my-policy")',
        'value="someone/my-policy:value"',
        f"| policy | [`org/sft`](https://huggingface.co/org/sft) at `{'d' * 40}` (sha256 `eeeeeeeeeeee`) |",
        "| reference | the base itself |",
        "| value | the policy's |",
        "| reward | an adapter in a local folder (sha256 `ffffffffffff`) |",
        "| short | 0.5 |",
        "| `kl_coef` | 0.05 |",
        "| `lr_scheduler_type` | linear |",
        "| last logged | training | eval |",
        "| `objective/scores` | 0.75 | 0.875 |",
        "![Score and KL while training](curves.png)",
        "ppo_lora 1.2.3",
        "```bibtex",
    ):
        assert said in text, said
    assert "time/sampling" not in text


def test_options_that_were_changed_are_in_it(tmp_path, facts):
    """Beside those that are always there."""
    facts.config.dual_clip, facts.config.loss_aggregation = 3.0, "sequence_mean"
    text = _card(tmp_path, facts)
    assert "| `dual_clip` | 3.0 |" in text and "| `loss_aggregation` | sequence_mean |" in text
    assert "kl_horizon" not in text


def test_no_secret_and_no_folder_of_the_machine_is_in_it(tmp_path, facts):
    local = replace(facts, base=BaseIdentity(str(tmp_path)), dataset=str(tmp_path), location="my-policy")
    text = _card(tmp_path, local)
    assert "hf_secret" not in text and str(tmp_path) not in text
    assert "on a local base" in text and "datasets" not in text
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None


@pytest.mark.parametrize("name", ["runs/base/nf4", "./base", "/no/such/folder"])
def test_a_folder_that_is_gone_is_no_hub_id(tmp_path, facts, name):
    assert name not in _card(tmp_path, replace(facts, base=BaseIdentity(name)))


def test_a_folder_with_a_name_like_an_id_is_a_folder(tmp_path, facts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "base").mkdir(parents=True)
    text = _card(tmp_path, facts)
    assert "on a local base" in text and "huggingface.co/org/base" not in text


def test_without_its_value_role_the_card_does_not_promise_one(tmp_path, facts):
    text = _card(tmp_path, replace(facts, value=False))
    assert ":value" not in text and "folder `value`" not in text


def test_a_run_that_logged_nothing_has_no_curve(tmp_path, facts):
    text = _card(tmp_path, replace(facts, history=[]))
    assert "Nothing was logged." in text and "curves.png" not in text
    assert not (tmp_path / "curves.png").exists()


def test_every_code_block_parses(tmp_path, facts):
    for made in (facts, replace(facts, base=BaseIdentity(str(tmp_path)))):
        blocks = re.findall(r"```python\n(.*?)```", _card(tmp_path, made), re.DOTALL)
        assert len(blocks) == 2
        for block in blocks:
            compile(block, "card", "exec")


def test_a_run_draws_its_curve(tmp_path):
    made = trainer(tmp_path / "run")
    made.train()
    made.create_model_card()
    with Image.open(tmp_path / "run" / "curves.png") as picture:
        assert picture.width > 2 * picture.height
        assert len(picture.convert("RGB").getcolors(10**6)) > 20


def test_curves_need_something_to_draw(tmp_path):
    assert not draw_curves([{"loss": 1.0}, _entry(0, 0.5, "eval_")], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert draw_curves(HISTORY, tmp_path / "some.png") and (tmp_path / "some.png").stat().st_size > 5000
