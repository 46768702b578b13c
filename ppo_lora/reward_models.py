"""Reward models that are models of their own: a reward function around a sequence-classification model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .adapters import HEAD_NAMES
from .config import PPOConfig
from .function_names import URL_SCHEMES
from .hub import check_safetensors, hub_errors
from .reward_calls import RewardFunction

RewardSource = RewardFunction | str | PreTrainedModel

_QUANTIZATION = ("load_in_", "bnb_4bit_", "llm_int8_")
_OF_TOKENIZERS = ("trust_remote_code", "revision", "token", "subfolder", "cache_dir", "local_files_only")


class ModelReward:
    """Scores prompt and completion, as text, with a model that has one output.

    Args:
        model: a sequence-classification model.
        tokenizer: the model's own; texts are padded on the right.
        batch_size: rows per pass.

    Raises:
        ValueError: the model has more than one output, or the tokenizer no pad token for batches.
    """

    is_model = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int):
        name = model.config.name_or_path or type(model).__name__
        if model.config.num_labels != 1:
            raise ValueError(f"The reward model {name} has {model.config.num_labels} outputs; expected num_labels=1.")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token is None:
            raise ValueError(f"The tokenizer of the reward model {name} has neither a pad nor an EOS token.")
        model.config.pad_token_id = tokenizer.pad_token_id
        self.__name__ = str(name).rstrip("/").split("/")[-1]
        self._model = model.eval().requires_grad_(False)
        self._tokenizer, self._batch_size = tokenizer, batch_size

    def to(self, device: torch.device) -> None:
        """Move the model, unless it is quantized and so placed already."""
        if getattr(self._model, "quantization_method", None) is None:
            self._model.to(device)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """One score for each completion."""
        texts = [self._text(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for first in range(0, len(texts), self._batch_size):
            batch = self._tokenizer(
                texts[first : first + self._batch_size],
                padding=True,
                padding_side="right",
                add_special_tokens=isinstance(prompts[0], str),
                return_tensors="pt",
            ).to(self._model.device)
            scores += self._model(**batch).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return str(self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))


def reward_functions(given: Any, tokenizers: Any, config: PPOConfig) -> list[RewardFunction]:
    """The reward functions, with models made into functions.

    Args:
        given: one or several functions, URLs of reward servers, model names or models; None for none.
        tokenizers: one for each of them, or None; those of functions are not used.
        config: how models are loaded and how many rows go through at once.

    Raises:
        ValueError: another number of tokenizers than of reward functions.
    """
    sources = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    classes = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(sources)
    if len(classes) != len(sources):
        raise ValueError(
            f"reward_processing_classes has {len(classes)} entries; expected {len(sources)}, one for each of "
            "reward_funcs (None for functions)."
        )
    return [_function(source, tokenizer, config) for source, tokenizer in zip(sources, classes, strict=True)]


def _function(source: Any, tokenizer: Any, config: PPOConfig) -> RewardFunction:
    if isinstance(source, str) and source.startswith(URL_SCHEMES):
        return _server(source, config)
    options = reward_model_options(config)
    if isinstance(source, str):
        with hub_errors("reward model", source):
            if not config.allow_pickle:
                check_safetensors(source, options.get("revision"))
            source = _with_one_output(source, options)
    if not isinstance(source, PreTrainedModel):
        return source
    if tokenizer is None:
        its_own = {name: options[name] for name in _OF_TOKENIZERS if name in options}
        tokenizer = AutoTokenizer.from_pretrained(source.config.name_or_path, **its_own)
    return ModelReward(source, tokenizer, config.local_rollout_forward_batch_size)


def _with_one_output(name: str, options: dict[str, Any]) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **options)
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ValueError(
            f"The reward model {name} has weights of other sizes than a model with one output; expected num_labels=1. "
            "A classifier's outputs become a score in a reward function of your own."
        ) from error
    return model


def _server(url: str, config: PPOConfig) -> RewardFunction:
    from .reward_server import RewardServer  # nobody else has to wait for an HTTP client

    return RewardServer(
        url,
        timeout=config.reward_server_timeout,
        retries=config.reward_server_retries,
        concurrency=config.reward_server_concurrency,
        batch_size=config.reward_server_batch_size,
    )


def reward_model_options(config: PPOConfig) -> dict[str, Any]:
    """Keyword arguments for loading a reward model, from ``reward_model_init_kwargs``.

    ``load_in_4bit``, ``load_in_8bit``, ``llm_int8_...`` and ``bnb_4bit_...`` become a BitsAndBytesConfig, which leaves
    the head as it is.

    Raises:
        ValueError: options of quantization without ``load_in_4bit`` or ``load_in_8bit``, or beside a
            ``quantization_config``.
    """
    given = dict(cast("dict[str, Any]", config.reward_model_init_kwargs or {}))
    quantization = {name: given.pop(name) for name in list(given) if name.startswith(_QUANTIZATION)}
    options = {"trust_remote_code": config.trust_remote_code, **given}
    if not quantization:
        return options
    wanted = any(quantization.get(name) for name in ("load_in_4bit", "load_in_8bit"))
    if not wanted or "quantization_config" in options:
        raise ValueError(
            f"reward_model_init_kwargs has {sorted(quantization)}"
            f"{' beside quantization_config' if wanted else ' without load_in_4bit or load_in_8bit'}; expected one of "
            "load_in_4bit=true and load_in_8bit=true with further fields of BitsAndBytesConfig, or none of them."
        )
    quantization.setdefault("llm_int8_skip_modules", list(HEAD_NAMES))
    return {**options, "quantization_config": BitsAndBytesConfig(**quantization)}
