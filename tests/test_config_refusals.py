"""PPOConfig: which options it refuses, by themselves and beside others, and what it says."""

from __future__ import annotations

import math
import re

import pytest

from ppo_lora.kl_control import kl_controller

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
