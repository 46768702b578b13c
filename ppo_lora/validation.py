"""What an option may be, and which options contradict each other. Errors name the option, and say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .kl_control import LARGEST_ERROR
from .losses import LOSS_AGGREGATIONS
from .normalization import SCORE_NORMALIZATIONS
from .rewards import KL_ESTIMATORS

SAMPLING_KWARGS = frozenset({"cache_implementation", "cache_config"})
"""`generation_kwargs` that the decode loop reads."""

_POSITIVE_INTEGERS = (
    "max_completion_length",
    "local_rollout_forward_batch_size",
    "num_ppo_epochs",
    "num_mini_batches",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "kl_horizon",
    "reward_server_concurrency",
    "reward_server_batch_size",
    "num_generations",
    "ptx_max_length",
    "logits_chunk_mib",
)
_POSITIVE = ("temperature", "cliprange", "cliprange_value", "reward_server_timeout", "adam_epsilon")
_UNIT = ("gamma", "lam")
_NOT_NEGATIVE = (
    *("kl_coef", "vf_coef", "entropy_coef", "ptx_coef"),
    "learning_rate",
)
_OPTIONAL_POSITIVE = (
    *("value_learning_rate", "missing_eos_penalty", "kl_target", "target_kl", "cliprange_high"),
    *("importance_sampling_cap", "kl_warning", "score_clip", "overlong_penalty"),
)
_OVER_ONE = ("dual_clip", "ratio_threshold")
_INTEGERS = ("value_warmup_iterations", "reward_server_retries", "num_completions_to_print")
_OPTIONAL_POSITIVE_INTEGERS = (
    *("max_prompt_length", "total_episodes", "num_generations_eval", "ptx_batch_size"),
    *("overlong_buffer_length", "max_tokens_per_micro_batch"),
)


_NUMBERS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_POSITIVE_INTEGERS, lambda number: isinstance(number, int) and number >= 1, "an integer of at least 1"),
    (_OPTIONAL_POSITIVE_INTEGERS, lambda number: isinstance(number, int) and number >= 1, "an integer of at least 1"),
    (_POSITIVE + _OPTIONAL_POSITIVE, lambda number: number > 0, "a number above 0"),
    (_OVER_ONE, lambda number: number > 1, "a number above 1"),
    (_INTEGERS, lambda number: isinstance(number, int) and number >= 0, "an integer of at least 0"),
    (_UNIT, lambda number: 0 <= number <= 1, "a number from 0 to 1"),
    (_NOT_NEGATIVE, lambda number: number >= 0, "a number of at least 0"),
    (("missing_eos_score",), lambda number: True, "a finite number"),
)
_SWITCHES = (
    *("trust_remote_code", "allow_pickle", "normalize_kl_by_length", "log_exact_kl", "whiten_rewards"),
    *("whiten_advantages", "save_value", "health_warnings", "log_completions"),
)
_LISTS = ("reward_weights", "stop_token_ids")
_DICTS = ("model_init_kwargs", "reward_model_init_kwargs", "generation_kwargs")
_MAY_BE_NONE = {*_OPTIONAL_POSITIVE, *_OVER_ONE, *_OPTIONAL_POSITIVE_INTEGERS, "missing_eos_score"}


_CHOICES = {
    "kl_estimator": sorted(KL_ESTIMATORS),
    "kl_in": ["reward", "loss"],
    "loss_aggregation": list(LOSS_AGGREGATIONS),
    "overlong_prompts": ["truncate", "drop"],
    "score_normalization": list(SCORE_NORMALIZATIONS),
    "startup_checks": ["error", "warn", "off"],
}


def check_config(config: Any) -> None:
    """Refuse options that PPO cannot run with.

    Args:
        config: a ``PPOConfig``.

    Raises:
        ValueError: the message names the option.
    """
    _check_kinds(config)
    _check_numbers(config)
    _check_sampling(config)
    _check_missing_eos(config)
    _check_data(config)
    _check_contradictions(config)
    _check_unsupported(config)


def _check_kinds(config: Any) -> None:
    """Text such as "false" would count as true, and one number is no list."""
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} is {getattr(config, name)!r}; expected True or False.")
    for names, kind, wanted in ((_LISTS, (list, tuple), "a list of numbers"), (_DICTS, dict, "a dict")):
        for name in names:
            given = getattr(config, name)
            if given is not None and not isinstance(given, kind):
                raise ValueError(f"{name} is {given!r}; expected {wanted}, or None.")


def _check_numbers(config: Any) -> None:
    for names, holds, wanted in _NUMBERS:
        for name in names:
            check_number(name, getattr(config, name), holds, wanted)
    for weight in config.reward_weights or []:
        check_number("reward_weights", weight, lambda number: True, "finite numbers")
    for token in config.stop_token_ids or []:
        check_number("stop_token_ids", token, lambda number: isinstance(number, int) and number >= 0, "token ids")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"{name} is {getattr(config, name)!r}; expected one of {choices}.")
    if config.fp16:
        raise ValueError("fp16=True: PPO's ratios overflow in float16. Use bf16=True, or neither for float32.")


def check_number(name: str, number: Any, holds: Callable[[Any], bool], wanted: str) -> None:
    """Refuse a number that is not finite or for which ``holds`` is not true; ``wanted`` says what it should be."""
    optional = name in _MAY_BE_NONE
    if number is None and optional:
        return
    known = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    if not known or not holds(number):
        raise ValueError(f"{name} is {number!r}; expected {wanted}{', or None' if optional else ''}.")


def _check_sampling(config: Any) -> None:
    why = "PPO's log-probabilities are those of the whole distribution, so the ratio would start away from 1"
    if config.top_p != 1.0:
        raise ValueError(f"top_p is {config.top_p}; expected 1.0 ({why}). Lower the temperature instead.")
    if config.top_k not in (0, None, -1):
        raise ValueError(f"top_k is {config.top_k}; expected 0 ({why}). Lower the temperature instead.")
    refused = sorted(set(config.generation_kwargs or {}) - SAMPLING_KWARGS)
    if refused:
        raise ValueError(
            f"generation_kwargs has {refused}; allowed are {sorted(SAMPLING_KWARGS)}. Others "
            f"change which tokens are sampled ({why}), or are for another decode loop. Lengths, stop tokens and the "
            "temperature have options of their own."
        )
    kind = (config.generation_kwargs or {}).get("cache_implementation")
    if "static" in str(kind):
        raise ValueError(
            f"generation_kwargs has cache_implementation={kind!r}: static caches serve compiled decode loops, and "
            "finished rows could not leave the batch. Leave it out, or use 'offloaded' or 'quantized'."
        )


_UNSUPPORTED = {
    "ignore_data_skip": (False, "a resumed run takes the prompts that come next anyway"),
    "auto_find_batch_size": (False, "set local_rollout_forward_batch_size and per_device_train_batch_size"),
    "include_num_input_tokens_seen": ("no", "time/tokens_per_second is logged"),
    "label_smoothing_factor": (0.0, "PPO has no labels"),
    "neftune_noise_alpha": (None, "the ratio would not start at 1"),
    "torch_compile": (False, "roles switch inside the model"),
    "use_liger_kernel": (False, "the output head is chunked already"),
}
"""Options of TrainingArguments that would do nothing or harm here: the value that leaves them off, and why."""


def _check_unsupported(config: Any) -> None:
    for name, (off, why) in _UNSUPPORTED.items():
        given = getattr(config, name, off)
        if given not in (off, None, False):
            raise ValueError(f"{name} is {given!r}; expected {off!r}: PPO does not use it ({why}).")


_CONTRADICTIONS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "kl_horizon",
        lambda c: c.kl_target is None and c.kl_horizon != _default(c, "kl_horizon"),
        "kl_coef follows nothing without a kl_target; set that too, or leave kl_horizon out",
    ),
    (
        "kl_horizon",
        lambda c: c.kl_target is not None and LARGEST_ERROR * c.batch_size >= c.kl_horizon,
        "an iteration has so many responses that one update could take kl_coef below 0; expected more than a fifth of "
        "the responses of an iteration, better many times them",
    ),
    (
        "kl_target",
        lambda c: c.kl_target is not None and c.kl_coef == 0,
        "kl_coef=0 stays 0, since it is adapted by factors; start above 0",
    ),
    (
        "kl_warning",
        lambda c: not c.health_warnings and c.kl_warning != _default(c, "kl_warning"),
        "health_warnings=False says nothing; leave one of them out",
    ),
    (
        "kl_in",
        lambda c: c.kl_in == "loss" and c.kl_coef == 0,
        "kl_coef=0 takes the KL out of the loss again; set kl_coef, or leave kl_in out",
    ),
    (
        "kl_estimator",
        lambda c: c.kl_estimator != _default(c, "kl_estimator") and c.kl_coef == 0,
        "kl_coef=0 leaves nothing to estimate; set kl_coef, or leave kl_estimator out",
    ),
    (
        "normalize_kl_by_length",
        lambda c: c.normalize_kl_by_length and c.kl_in == "loss",
        "with kl_in='loss' tokens count as loss_aggregation says; for a mean a response set that to sequence_mean",
    ),
    (
        "normalize_kl_by_length",
        lambda c: c.normalize_kl_by_length and c.kl_coef == 0,
        "kl_coef=0 has no penalty to normalize; set kl_coef, or leave normalize_kl_by_length out",
    ),
    (
        "value_warmup_iterations",
        lambda c: c.value_warmup_iterations > 0 and c.vf_coef == 0,
        "vf_coef=0 trains no value, so these iterations would train nothing; set vf_coef, or leave the warm-up out",
    ),
    (
        "value_learning_rate",
        lambda c: c.value_learning_rate is not None and c.vf_coef == 0,
        "vf_coef=0 trains no value; set vf_coef, or leave value_learning_rate out",
    ),
    (
        "ptx_max_length",
        lambda c: c.ptx_max_length != _default(c, "ptx_max_length") and not c.ptx_coef,
        "ptx_coef is 0, so there is no pretraining mix; set ptx_coef, or leave ptx_max_length out",
    ),
    (
        "overlong_penalty",
        lambda c: c.overlong_penalty is not None and c.overlong_buffer_length is None,
        "overlong_buffer_length is None; set that too, the tokens over which the penalty grows",
    ),
    (
        "overlong_buffer_length",
        lambda c: c.overlong_buffer_length is not None and c.overlong_penalty is None,
        "overlong_penalty is None; set that too, what the longest response loses",
    ),
    (
        "overlong_buffer_length",
        lambda c: (c.overlong_buffer_length or 0) > c.max_completion_length,
        "no response is longer than max_completion_length; lower the buffer, or raise that",
    ),
)
"""Options that make no sense beside another: the option, when, and why."""


def _default(config: Any, name: str) -> Any:
    return type(config).__dataclass_fields__[name].default


def _check_contradictions(config: Any) -> None:
    for name, contradicted, why in _CONTRADICTIONS:
        if contradicted(config):
            raise ValueError(f"{name} is {getattr(config, name)!r}, but {why}.")


def _check_missing_eos(config: Any) -> None:
    if config.missing_eos_penalty is not None and config.missing_eos_score is not None:
        raise ValueError(
            f"Both missing_eos_penalty={config.missing_eos_penalty} (subtract) and "
            f"missing_eos_score={config.missing_eos_score} (replace) are given; set one of them."
        )


def _check_data(config: Any) -> None:
    if config.local_batch_size % config.num_generations:
        raise ValueError(
            f"num_generations is {config.num_generations}; expected a number that divides the "
            f"{config.local_batch_size} rows per process and iteration (per_device_train_batch_size "
            f"{config.per_device_train_batch_size} * "
            f"gradient_accumulation_steps {config.gradient_accumulation_steps} * num_mini_batches "
            f"{config.num_mini_batches}): all responses to a prompt are sampled in one process."
        )
    if config.ptx_batch_size is not None and not config.ptx_coef:
        raise ValueError(
            f"ptx_batch_size is {config.ptx_batch_size}, but ptx_coef is 0, so there is no pretraining mix. Set "
            "ptx_coef, or leave ptx_batch_size out."
        )
    if config.save_strategy == "best" and config.eval_strategy == "no":
        raise ValueError(
            "save_strategy is 'best', but eval_strategy is 'no', so nothing would ever be saved. Set "
            "eval_strategy='steps' and eval_steps."
        )


def steps_of_episodes(config: Any) -> int:
    """The steps that ``total_episodes`` responses take.

    Raises:
        ValueError: ``max_steps`` is given too, and says otherwise.
    """
    episodes = config.total_episodes
    steps: int = math.ceil(episodes / config.batch_size) * config.steps_per_iteration
    if config.max_steps not in (-1, steps):
        raise ValueError(
            f"Both total_episodes={episodes} (that is {steps} steps) and max_steps={config.max_steps} "
            "are given; set one of them."
        )
    return steps


def check_steps(config: Any) -> None:
    """Refuse a number of steps that ends inside an iteration, or before the policy is trained."""
    if config.max_steps > 0 and config.max_steps % config.steps_per_iteration:
        per = config.steps_per_iteration
        raise ValueError(
            f"max_steps={config.max_steps} is not a whole number of iterations: one takes num_ppo_epochs * "
            f"num_mini_batches = {per} steps. Use {-(-config.max_steps // per) * per}, or total_episodes."
        )
    warmup = config.value_warmup_iterations
    if 0 < config.max_steps <= warmup * config.steps_per_iteration:
        raise ValueError(
            f"value_warmup_iterations is {warmup}, but the run has {config.max_steps // config.steps_per_iteration} "
            "iterations: the policy would never be trained. Lower it, or raise total_episodes or max_steps."
        )
