"""PPOConfig: what it refuses, what it derives, and the way from a YAML file or a command line into it."""

from __future__ import annotations

import inspect
import json
import math
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
from ppo_lora.kl_control import kl_controller

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
def make(tmp_path):
    def make(**options) -> PPOConfig:
        return PPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)

    return make


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


ABOVE_ONE = "a number above 1, or None"
ABOVE_ZERO, AT_LEAST_ZERO = "a number above 0", "a number of at least 0"
AT_LEAST_ONE, UNIT, OPTIONAL = "an integer of at least 1", "a number from 0 to 1", "a number above 0, or None"
REFUSED = {
    "max_completion_length": (AT_LEAST_ONE, 0, -3),
    "local_rollout_forward_batch_size": (AT_LEAST_ONE, 0, -3),
    "num_ppo_epochs": (AT_LEAST_ONE, 0, -3),
    "num_mini_batches": (AT_LEAST_ONE, 0, -3),
    "per_device_train_batch_size": (AT_LEAST_ONE, 0, -3),
    "gradient_accumulation_steps": (AT_LEAST_ONE, 0, -3),
    "num_generations": (AT_LEAST_ONE, 0, -3),
    "num_generations_eval": (f"{AT_LEAST_ONE}, or None", 0, -1, 2.5),
    "ptx_coef": (AT_LEAST_ZERO, -0.1, math.nan, math.inf),
    "ptx_batch_size": (f"{AT_LEAST_ONE}, or None", 0, -1, 2.5),
    "ptx_max_length": (AT_LEAST_ONE, 0, -3),
    "temperature": (ABOVE_ZERO, 0.0, -0.5, math.nan, math.inf),
    "cliprange": (ABOVE_ZERO, 0.0, -0.2, math.nan, math.inf),
    "cliprange_value": (ABOVE_ZERO, 0.0, -0.2, math.nan, math.inf),
    "gamma": (UNIT, -0.01, 1.01, math.nan),
    "lam": (UNIT, -0.01, 1.01, math.nan),
    "kl_coef": (AT_LEAST_ZERO, -0.1, math.nan, math.inf),
    "vf_coef": (AT_LEAST_ZERO, -0.1, math.nan, math.inf),
    "entropy_coef": (AT_LEAST_ZERO, -0.1, math.nan, math.inf),
    "learning_rate": (AT_LEAST_ZERO, -1e-5, math.nan, math.inf),
    "num_completions_to_print": ("an integer of at least 0", -1, 1.5),
    "max_prompt_length": (f"{AT_LEAST_ONE}, or None", 0, -1, 2.5),
    "total_episodes": (f"{AT_LEAST_ONE}, or None", 0, -1, 3.3),
    "value_learning_rate": (OPTIONAL, 0.0, -1e-5, math.nan, math.inf),
    "missing_eos_penalty": (OPTIONAL, 0.0, -1.0, math.nan, math.inf),
    "kl_target": (OPTIONAL, 0.0, -1.0, math.nan, math.inf),
    "kl_horizon": (AT_LEAST_ONE, 0, -3),
    "target_kl": (OPTIONAL, 0.0, -1.0, math.nan, math.inf),
    "cliprange_high": (OPTIONAL, 0.0, -0.2, math.nan, math.inf),
    "dual_clip": (ABOVE_ONE, 1.0, 0.2, math.nan, math.inf),
    "ratio_threshold": (ABOVE_ONE, 1.0, 0.2, math.nan, math.inf),
    "importance_sampling_cap": (OPTIONAL, 0.0, -1.0, math.nan, math.inf),
    "kl_warning": (OPTIONAL, 0.0, -1.0, math.nan, math.inf),
    "value_warmup_iterations": ("an integer of at least 0", -1, 1.5),
    "score_clip": (OPTIONAL, 0.0, -1.0, math.nan, math.inf),
    "overlong_penalty": (OPTIONAL, 0.0, -1.0, math.nan, math.inf),
    "overlong_buffer_length": (f"{AT_LEAST_ONE}, or None", 0, -1, 2.5),
    "reward_server_timeout": (ABOVE_ZERO, 0.0, -1.0, math.nan, math.inf),
    "reward_server_retries": ("an integer of at least 0", -1, 1.5),
    "reward_server_concurrency": (AT_LEAST_ONE, 0, -3),
    "reward_server_batch_size": (AT_LEAST_ONE, 0, -3),
}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [(name, value, wanted) for name, (wanted, *values) in REFUSED.items() for value in values],
)
def test_a_number_out_of_range_is_named(make, name, value, wanted):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value}; expected {wanted}.") + "$"):
        make(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {name: edge}
        for name, edge in {
            **dict.fromkeys([name for name, (wanted, *_) in REFUSED.items() if wanted == AT_LEAST_ONE], 1),
            **dict.fromkeys([name for name, (wanted, *_) in REFUSED.items() if wanted == ABOVE_ONE], 1.01),
            **dict.fromkeys([name for name, (wanted, *_) in REFUSED.items() if wanted == AT_LEAST_ZERO], 0),
            **dict.fromkeys([name for name, (wanted, *_) in REFUSED.items() if wanted == OPTIONAL], None),
            "gamma": 0.0,
            "lam": 1.0,
            "cliprange": 1e-9,
            "top_k": None,
            "missing_eos_score": -1e3,
        }.items()
    ],
    ids=str,
)
def test_the_edge_of_a_range_is_allowed(make, options):
    needed = {
        **({"kl_target": 6.0, "per_device_train_batch_size": 4} if "kl_horizon" in options else {}),
        **({"ptx_coef": 1.0} if "ptx_max_length" in options else {}),
    }
    config = make(**options, **needed)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize("name", [name for name, (wanted, *_) in REFUSED.items() if wanted == AT_LEAST_ONE])
def test_a_fraction_is_no_integer(make, name):
    with pytest.raises(ValueError, match=f"{name} is 1.5; expected an integer of at least 1"):
        make(**{name: 1.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({name: value}, f"{name} is {value!r}; expected True or False.")
            for name, value in [
                ("trust_remote_code", "false"),
                ("allow_pickle", 1),
                ("normalize_kl_by_length", "no"),
                ("log_exact_kl", None),
                ("whiten_rewards", 0.5),
                ("whiten_advantages", "False"),
                ("save_value", []),
                ("health_warnings", 0),
                ("log_completions", "yes"),
            ]
        ],
        ({"reward_weights": 1.0}, "reward_weights is 1.0; expected a list of numbers, or None."),
        ({"reward_weights": ""}, "reward_weights is ''; expected a list of numbers, or None."),
        ({"stop_token_ids": 7}, "stop_token_ids is 7; expected a list of numbers, or None."),
        ({"generation_kwargs": 5}, "generation_kwargs is 5; expected a dict, or None."),
        ({"model_init_kwargs": ["x"]}, "model_init_kwargs is ['x']; expected a dict, or None."),
        ({"reward_model_init_kwargs": True}, "reward_model_init_kwargs is True; expected a dict, or None."),
        ({"adam_epsilon": math.nan}, "adam_epsilon is nan; expected a number above 0."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_kind_of_value_is_named(make, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


def test_the_shortest_horizon_leaves_the_coefficient_above_zero(make):
    config = make(kl_target=6.0, kl_horizon=4, per_device_train_batch_size=15)
    controller = kl_controller(config.kl_coef, config.kl_target, config.kl_horizon)
    controller.update(0.0, config.batch_size)
    assert 0 < controller.value < config.kl_coef


def test_a_missing_eos_score_that_is_no_number_is_refused(make):
    with pytest.raises(ValueError, match="missing_eos_score is nan"):
        make(missing_eos_score=math.nan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4'; expected one of ['k1', 'k2', 'k3']."),
        ({"overlong_prompts": "cut"}, "overlong_prompts is 'cut'; expected one of ['truncate', 'drop']."),
        ({"kl_in": "both"}, "kl_in is 'both'; expected one of ['reward', 'loss']."),
        (
            {"loss_aggregation": "mean"},
            "loss_aggregation is 'mean'; expected one of ['token_mean', 'sequence_mean', 'sequence_sum_constant'].",
        ),
        (
            {"score_normalization": "batch"},
            "score_normalization is 'batch'; expected one of ['none', 'running', 'dataset'].",
        ),
        ({"overlong_penalty": 1.0}, "overlong_penalty is 1.0, but overlong_buffer_length is None; set that too"),
        ({"overlong_buffer_length": 4}, "overlong_buffer_length is 4, but overlong_penalty is None; set that too"),
        (
            {"overlong_buffer_length": 9, "overlong_penalty": 1.0, "max_completion_length": 8},
            "overlong_buffer_length is 9, but no response is longer than max_completion_length; lower the buffer",
        ),
        ({"kl_horizon": 5}, "kl_horizon is 5, but kl_coef follows nothing without a kl_target; set that too"),
        (
            {"kl_target": 6.0, "kl_horizon": 3, "per_device_train_batch_size": 15},
            "kl_horizon is 3, but an iteration has so many responses that one update could take kl_coef below 0",
        ),
        (
            {"normalize_kl_by_length": True, "kl_coef": 0.0},
            "normalize_kl_by_length is True, but kl_coef=0 has no penalty to normalize",
        ),
        (
            {"value_warmup_iterations": 1, "vf_coef": 0.0},
            "value_warmup_iterations is 1, but vf_coef=0 trains no value, so these iterations would train nothing",
        ),
        (
            {"value_learning_rate": 1e-3, "vf_coef": 0.0},
            "value_learning_rate is 0.001, but vf_coef=0 trains no value; set vf_coef",
        ),
        ({"ptx_max_length": 8}, "ptx_max_length is 8, but ptx_coef is 0, so there is no pretraining mix"),
        ({"startup_checks": "on"}, "startup_checks is 'on'; expected one of ['error', 'warn', 'off']."),
        ({"health_warnings": False, "kl_warning": 9.0}, "kl_warning is 9.0, but health_warnings=False says nothing"),
        ({"kl_target": 6.0, "kl_coef": 0.0}, "kl_target is 6.0, but kl_coef=0 stays 0"),
        ({"kl_in": "loss", "kl_coef": 0.0}, "kl_in is 'loss', but kl_coef=0 takes the KL out of the loss again"),
        (
            {"kl_estimator": "k3", "kl_coef": 0.0},
            "kl_estimator is 'k3', but kl_coef=0 leaves nothing to estimate; set kl_coef, or leave kl_estimator out.",
        ),
        (
            {"kl_in": "loss", "normalize_kl_by_length": True},
            "normalize_kl_by_length is True, but with kl_in='loss' tokens count as loss_aggregation says",
        ),
        (
            {"value_warmup_iterations": 3, "max_steps": 12, "num_ppo_epochs": 4},
            "value_warmup_iterations is 3, but the run has 3 iterations: the policy would never be trained.",
        ),
        (
            {"value_warmup_iterations": 5, "total_episodes": 40},
            "value_warmup_iterations is 5, but the run has 5 iterations: the policy would never be trained.",
        ),
        (
            {"generation_kwargs": {"cache_implementation": "static"}},
            "generation_kwargs has cache_implementation='static': static caches serve compiled decode loops",
        ),
        ({"fp16": True}, "fp16=True: PPO's ratios overflow in float16. Use bf16=True, or neither for float32."),
        ({"top_p": 0.9}, "top_p is 0.9; expected 1.0 (PPO's log-probabilities are those of the whole distribution"),
        ({"top_k": 50}, "top_k is 50; expected 0 (PPO's log-probabilities are those of the whole distribution"),
        (
            {"generation_kwargs": {"min_p": 0.1, "cache_config": {}, "do_sample": False, "max_time": 3}},
            "generation_kwargs has ['do_sample', 'max_time', 'min_p']; allowed are ['cache_config', "
            "'cache_implementation']",
        ),
        (
            {"missing_eos_penalty": 1.0, "missing_eos_score": -2.0},
            "Both missing_eos_penalty=1.0 (subtract) and missing_eos_score=-2.0 (replace) are given; set one of them.",
        ),
        (
            {"num_generations": 3, "per_device_train_batch_size": 4, "num_mini_batches": 2},
            "num_generations is 3; expected a number that divides the 8 rows per process and iteration "
            "(per_device_train_batch_size 4 * gradient_accumulation_steps 1 * num_mini_batches 2): all responses to a "
            "prompt are sampled in one process.",
        ),
        (
            {"ptx_batch_size": 8},
            "ptx_batch_size is 8, but ptx_coef is 0, so there is no pretraining mix. Set ptx_coef, or leave "
            "ptx_batch_size out.",
        ),
        (
            {"save_strategy": "best"},
            "save_strategy is 'best', but eval_strategy is 'no', so nothing would ever be saved.",
        ),
        (
            {"max_steps": 9, "num_ppo_epochs": 2, "num_mini_batches": 3},
            "max_steps=9 is not a whole number of iterations: one takes num_ppo_epochs * num_mini_batches = 6 "
            "steps. Use 12, or total_episodes.",
        ),
        (
            {"max_steps": 12, "total_episodes": 100, "num_ppo_epochs": 3},
            "Both total_episodes=100 (that is 39 steps) and max_steps=12 are given; set one of them.",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_refused_and_why(make, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


def test_the_default_estimator_may_stand_beside_no_kl(make):
    assert make(kl_estimator="k1", kl_coef=0.0).kl_coef == 0


@pytest.mark.parametrize("name", ["cache_implementation", "cache_config"])
def test_generation_options_that_leave_the_distribution_alone_are_allowed(make, name):
    assert make(generation_kwargs={name: 5}).generation_options[name] == 5


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
