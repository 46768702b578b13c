"""What PPOTrainer's arguments become, checked before anything is written."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from peft import LoraConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .config import PPOConfig, SamplingOptions
from .hub import hub_errors
from .shared_base import SharedBase


class StartupError(ValueError):
    """Something is wrong that is seen before anything is trained."""


class HasLongest(Protocol):
    """Prompts, in memory or streamed.

    Attributes:
        longest: tokens of the longest of them.
    """

    longest: int


def model_name(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(model.config, "name_or_path", "") or "model"
    return str(name).rstrip("/").split("/")[-1]


def shared_base(
    model: Any, args: PPOConfig, adapters: dict[str, Any], peft_config: LoraConfig | None, quantization_config: Any
) -> SharedBase:
    if isinstance(model, SharedBase):
        given = sorted(name for name, adapter in adapters.items() if adapter is not None)
        if given or peft_config is not None or quantization_config is not None:
            raise ValueError(
                f"model is a SharedBase already, so {given or 'peft_config or quantization_config'} cannot be added; "
                "give them to SharedBase.from_pretrained."
            )
        return model
    if isinstance(model, str):
        # Passes are tried before Trainer moves the base, and some attention only works on a GPU.
        place = {"device_map": {"": args.device}} if args.device.type == "cuda" else {}
        return SharedBase.from_pretrained(
            model,
            **adapters,
            peft_config=peft_config,
            quantization_config=quantization_config,
            allow_pickle=args.allow_pickle,
            **{**place, **args.model_options},
        )
    return SharedBase(model, **adapters, peft_config=peft_config, allow_pickle=args.allow_pickle)


def tokenizer_for(given: Any, model: Any, base: SharedBase, args: SamplingOptions) -> PreTrainedTokenizerBase:
    """The tokenizer, checked; a missing pad token becomes EOS, with a warning."""
    if given is None:
        name = model if isinstance(model, str) else base.config.name_or_path
        revision = base.identity.commit or base.identity.revision
        with hub_errors("tokenizer", name, revision):
            given = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    if given.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no EOS token, so a response can never end. Set tokenizer.eos_token to the token that "
            "ends the model's answers."
        )
    if given.pad_token_id is None:
        warnings.warn(f"The tokenizer has no pad token; using EOS ({given.eos_token!r}) for padding.", stacklevel=3)
        given.pad_token = given.eos_token
    vocabulary = base.config.get_text_config().vocab_size
    if len(given) > vocabulary:
        raise ValueError(
            f"The tokenizer has {len(given)} tokens, the base's embedding {vocabulary}; use the base's own tokenizer, "
            "or resize the base's embeddings and save it first."
        )
    return given


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, base: SharedBase, args: SamplingOptions) -> list[int]:
    """Those that end a response: the tokenizer's, the model's, and ``stop_token_ids``.

    Raises:
        ValueError: the base has no token of one of the given ids.
    """
    vocabulary = base.config.get_text_config().vocab_size
    unknown = [token for token in args.stop_token_ids or [] if token >= vocabulary]
    if unknown:
        raise ValueError(
            f"stop_token_ids has {unknown}, the base {vocabulary} tokens; expected ids below that, as "
            "tokenizer.convert_tokens_to_ids gives them."
        )
    own = base.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own]), *(args.stop_token_ids or [])} - {None}
    return sorted(ids)


def check_lengths(datasets: Sequence[HasLongest], base: SharedBase, args: SamplingOptions) -> None:
    """Refuse sequences that the base has no positions for."""
    limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    longest = max(dataset.longest for dataset in datasets)
    if limit is not None and longest + args.max_completion_length > limit:
        raise ValueError(
            f"The longest prompt has {longest} tokens; with max_completion_length={args.max_completion_length} that "
            f"is over the base's {limit} positions. Lower max_completion_length or max_prompt_length."
        )


def check_one_device(args: PPOConfig) -> None:
    """Refuse torch's DataParallel, which transformers chooses where one process sees several GPUs."""
    if args.n_gpu > 1:
        raise ValueError(
            f"This process sees {args.n_gpu} GPUs. Start one process a GPU with `accelerate launch`, or show it one "
            "with CUDA_VISIBLE_DEVICES=0."
        )


def check_dtype(base: SharedBase) -> None:
    """Refuse float16 arithmetic: ratios overflow, and small gradients vanish without a loss scaler."""
    if base.compute_dtype == torch.float16:
        raise ValueError(
            "The base is float16. Load it with dtype='bfloat16' or 'float32' (--dtype), or set bf16=True to compute "
            "in bfloat16."
        )


def check_optimizer(optimizer: torch.optim.Optimizer | None, base: SharedBase) -> None:
    """Refuse an optimizer that was made for other parameters than the adapters and the value head."""
    if optimizer is None:
        return
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    wanted = {id(parameter) for parameters in base.trainable_parameters().values() for parameter in parameters}
    if given != wanted:
        raise ValueError(
            f"optimizers holds {len(given)} parameters, {len(given & wanted)} of the {len(wanted)} that PPO trains. "
            "Build a SharedBase first, make the optimizer from base.trainable_parameters(), and pass both."
        )


def check_best_metric(names: Sequence[str], args: PPOConfig, more_may_come: bool = False) -> bool:
    """Refuse a metric_for_best_model that no evaluation will report, before anything is trained.

    Args:
        names: what evaluations report, with ``eval_`` before it.
        args: where the metric is looked up at each evaluation.
        more_may_come: whether that is not all, since reward functions log what they like.

    Returns:
        Whether it is known that there is nothing to refuse.

    Raises:
        StartupError: with the names that there are.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no" or not names:
        return True
    wanted = metric if metric.startswith("eval_") else f"eval_{metric}"
    if wanted not in names and not more_may_come:
        raise StartupError(
            f"metric_for_best_model is {metric!r}; expected one of {[name.removeprefix('eval_') for name in names]}, "
            "with or without eval_ before it, or what a reward function with a parameter log_metric always logs."
        )
    return wanted in names
