"""PPOConfig: its fields, what it derives, and the way from a YAML file or a command line into it."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments
from trl import TrlParser

import ppo_lora
from ppo_lora import PPOConfig

OWN = tuple(inspect.get_annotations(PPOConfig))
ONLY_CHECKED = {"top_p", "top_k"}
INHERITED = {field.name for field in fields(TrainingArguments)}

# One value other than the default for each field; top_p takes no other.
SETTINGS = {
    "metric_for_best_model": "objective/kl",
    "greater_is_better": True,
    "learning_rate": 3e-4,
    "adam_epsilon": 1e-6,
    "logging_steps": 7,
    "logging_nan_inf_filter": True,
    "gradient_checkpointing": False,
    "bf16": False,
    "model_init_kwargs": {"attn_implementation": "sdpa", "revision": "main"},
    "trust_remote_code": True,
    "allow_pickle": True,
    "save_value": False,
    "max_prompt_length": 33,
    "overlong_prompts": "drop",
    "max_completion_length": 44,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": -1,
    "generation_kwargs": {"cache_implementation": "offloaded"},
    "stop_token_ids": [5, 6],
    "local_rollout_forward_batch_size": 11,
    "logits_chunk_mib": 3,
    "max_tokens_per_micro_batch": 77,
    "sync_timings": True,
    "pack_sequences": True,
    "num_generations": 4,
    "num_generations_eval": 8,
    "total_episodes": 640,
    "reward_weights": [1.0, 0.25],
    "kl_coef": 0.125,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "kl_target": 6.0,
    "kl_horizon": 500,
    "normalize_kl_by_length": True,
    "log_exact_kl": True,
    "missing_eos_penalty": 1.5,
    "missing_eos_score": -2.5,
    "reward_model_init_kwargs": {"dtype": "bfloat16", "load_in_4bit": True},
    "reward_server_timeout": 7.5,
    "reward_server_retries": 2,
    "reward_server_concurrency": 3,
    "reward_server_batch_size": 16,
    "score_normalization": "running",
    "score_clip": 5.0,
    "overlong_penalty": 0.5,
    "overlong_buffer_length": 10,
    "whiten_rewards": True,
    "whiten_advantages": False,
    "num_ppo_epochs": 3,
    "num_mini_batches": 2,
    "gamma": 0.99,
    "lam": 0.9,
    "cliprange": 0.3,
    "cliprange_high": 0.35,
    "dual_clip": 3.0,
    "target_kl": 0.02,
    "ratio_threshold": 10.0,
    "loss_aggregation": "sequence_mean",
    "importance_sampling_cap": 2.0,
    "value_warmup_iterations": 2,
    "cliprange_value": 0.4,
    "vf_coef": 0.5,
    "entropy_coef": 0.01,
    "ptx_coef": 27.8,
    "ptx_batch_size": 3,
    "ptx_max_length": 55,
    "value_learning_rate": 2e-4,
    "log_completions": True,
    "num_completions_to_print": 9,
    "startup_checks": "warn",
    "health_warnings": False,
    "kl_warning": 25.0,
}
EXCLUSIVE = (
    ("missing_eos_penalty", "kl_in", "health_warnings"),
    ("missing_eos_score", "normalize_kl_by_length", "kl_warning"),
)
"""Settings of which only one may be given: leaving out either of these groups makes the others possible."""


@pytest.fixture
def parse(tmp_path):
    """Parses options as a script does: from a YAML file, then from the command line."""

    def parse(in_file: str, *arguments: str) -> PPOConfig:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}) + in_file)
        (config,) = TrlParser((PPOConfig,)).parse_args_and_config(args=["--config", str(path), *arguments])
        return config

    return parse


def test_the_defaults_are_valid_and_ppos(make):
    config = make()
    for field in fields(PPOConfig):
        if field.name in OWN and field.name != "bf16":
            assert getattr(config, field.name) == field.default
    assert isinstance(config.bf16, bool)


@pytest.mark.parametrize("name", OWN)
def test_every_own_field_has_help_and_a_default(name):
    field = PPOConfig.__dataclass_fields__[name]
    assert field.metadata["help"].endswith(".")
    assert field.default is not MISSING


@pytest.mark.parametrize("name", sorted(set(OWN) - INHERITED - ONLY_CHECKED))
def test_every_own_field_is_read_somewhere(name):
    modules = {path.stem: path.read_text() for path in Path(ppo_lora.__file__).parent.glob("*.py")}
    own = modules.pop("config")
    used = any(re.search(rf"\b(args|config)\.{name}\b", text) for text in modules.values())
    assert used or re.search(rf"\bself\.{name}\b(?! = )", own)


SIZES = dict(per_device_train_batch_size=3, gradient_accumulation_steps=2, num_mini_batches=5, num_ppo_epochs=4)


def test_derived_sizes(make):
    config = make(**SIZES)
    assert config.mini_batch_size == 6
    assert config.local_batch_size == config.batch_size == 30
    assert config.steps_per_iteration == 20


def test_every_process_adds_its_rows(make, monkeypatch):
    monkeypatch.setattr(PPOConfig, "world_size", 4)
    config = make(**SIZES, total_episodes=121)
    assert (config.mini_batch_size, config.local_batch_size, config.batch_size) == (6, 30, 120)
    assert config.max_steps == 2 * 20


@pytest.mark.parametrize(("episodes", "iterations"), [(1, 1), (29, 1), (30, 1), (31, 2), (300, 10)])
def test_total_episodes_are_rounded_up_to_whole_iterations(make, episodes, iterations):
    assert make(**SIZES, total_episodes=episodes).max_steps == iterations * 20


def test_the_same_run_given_twice_is_no_contradiction(make):
    config = make(**SIZES, total_episodes=60, max_steps=40)
    assert config.max_steps == 40
    assert replace(config).max_steps == 40


def test_without_total_episodes_the_number_of_steps_is_left_alone(make):
    assert make().max_steps == -1
    assert make(max_steps=8).max_steps == 8


@pytest.mark.parametrize("name", ["model_init_kwargs", "generation_kwargs", "reward_model_init_kwargs"])
def test_dict_options_are_read_from_json(make, name):
    assert getattr(make(**{name: '{"cache_config": 2.5}'}), name) == {"cache_config": 2.5}
    assert getattr(make(**{name: {"cache_config": 2.5}}), name) == {"cache_config": 2.5}
    assert getattr(make(**{name: None}), name) is None


@pytest.mark.parametrize("name", ["model_init_kwargs", "generation_kwargs", "reward_model_init_kwargs"])
@pytest.mark.parametrize("text", ["max_time=3", '{"max_time": 3', "[1, 2]", "null", "3", "[]"])
def test_text_that_is_no_json_object_is_named(make, name, text):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {text!r}; expected a JSON object")):
        make(**{name: text})


def test_generation_options(make):
    assert make().generation_options == {}
    cache = {"cache_implementation": "quantized"}
    assert make(generation_kwargs=cache).generation_options == cache


def test_model_options(make):
    assert make().model_options == {"trust_remote_code": False}
    given = make(trust_remote_code=True, model_init_kwargs={"revision": "main"})
    assert given.model_options == {"trust_remote_code": True, "revision": "main"}


def test_tokens_are_in_nothing_that_is_written(make):
    config = make(
        hub_token="hf_secret1",
        reward_model_init_kwargs={"token": "hf_secret3"},
        model_init_kwargs={"token": "hf_secret2", "revision": "main", "deep": {"token": "hf_s3"}},
    )
    written = [repr(config), str(config), config.to_json_string(), pickle.dumps(config)]
    assert not [text for text in written if "hf_s" in (text if isinstance(text, str) else text.decode("latin1"))]
    assert config.hub_token == "hf_secret1" and config.model_init_kwargs["token"] == "hf_secret2"
    again = pickle.loads(written[-1])
    assert again.model_init_kwargs == {"token": None, "revision": "main", "deep": {"token": None}}
    assert again.learning_rate == config.learning_rate


@pytest.mark.parametrize("switch", [True, False])
def test_gradient_checkpointing_keeps_its_name(make, switch):
    config = make(gradient_checkpointing=switch, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert config.gradient_checkpointing is switch
    assert getattr(config, "activation_checkpointing", switch) is switch


def test_the_settings_of_this_test_are_all_there_are():
    assert sorted(SETTINGS) == sorted(OWN)
    for name in set(OWN) - {"top_p"}:
        assert SETTINGS[name] != PPOConfig.__dataclass_fields__[name].default


@pytest.mark.parametrize("left_out", EXCLUSIVE)
def test_a_yaml_file_sets_every_own_field(parse, left_out):
    settings = {name: value for name, value in SETTINGS.items() if name not in left_out}
    config = parse(yaml.safe_dump(settings))
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize("left_out", EXCLUSIVE)
def test_the_command_line_sets_every_own_field(parse, left_out):
    settings = {name: value for name, value in SETTINGS.items() if name not in left_out}
    arguments = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        arguments += [f"--{name}", *map(str, values)]
    config = parse("", *arguments)
    assert {name: getattr(config, name) for name in settings} == settings


def test_the_command_line_beats_the_file(parse):
    assert parse("kl_coef: 0.5", "--kl_coef", "0.25").kl_coef == 0.25


def test_exponents_without_a_dot_are_numbers_in_yaml(parse):
    config = parse("kl_coef: 1e-3\nvalue_learning_rate: 5e-6\n")
    assert (config.kl_coef, config.value_learning_rate) == (0.001, 5e-6)


def test_a_wrong_value_in_a_file_is_named(parse):
    with pytest.raises(ValueError, match="lam is 2.0; expected a number from 0 to 1"):
        parse("lam: 2.0")


def test_a_saved_configuration_loads_again(make, tmp_path):
    settings = {name: value for name, value in SETTINGS.items() if name not in EXCLUSIVE[0]}
    saved = json.loads(make(**settings).to_json_string())
    again = PPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **{n: saved[n] for n in settings})
    assert {name: getattr(again, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("metric", "more"),
    [
        *[(name, True) for name in ("objective/scores", "eval_objective/scores", "eval_kl_objective/best_of_4")],
        *[(name, True) for name in ("rewards/kl_judge/mean", "eval_a_rewards/loss/mean", "completions/mean_length")],
        *[(name, False) for name in ("objective/kl", "eval_objective/kl", "eval_a_objective/exact_kl")],
        *[(name, False) for name in ("loss", "eval_loss", "loss/value_avg", "policy/approx_kl")],
    ],
)
def test_more_is_better_but_of_a_kl_and_a_loss(make, metric, more):
    assert make(metric_for_best_model=metric).greater_is_better is more
    assert make(metric_for_best_model=metric, greater_is_better=not more).greater_is_better is not more


def test_the_best_model_is_the_one_with_the_best_score(make):
    best = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau"}
    for options in ({"load_best_model_at_end": True}, {"save_strategy": "best"}, plateau):
        config = make(**best, **options)
        assert (config.metric_for_best_model, config.greater_is_better) == ("objective/scores", True)
    assert make().greater_is_better is None


def test_prompts_and_responses_of_an_iteration(make):
    config = make(per_device_train_batch_size=4, num_mini_batches=3, num_generations=2)
    assert (config.batch_size, config.prompts_per_iteration, config.samples_per_eval_prompt) == (12, 6, 2)
    assert make(num_generations_eval=5).samples_per_eval_prompt == 5
