"""Options as they are given, made into what PPOConfig holds; and as they may be shown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def json_object(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A dict as it is, or read from the JSON that a command line gives."""
    if not isinstance(value, str):
        return value
    message = f"{name} is {value!r}; expected a JSON object such as '{{\"key\": 1}}'."
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ValueError(message) from error
    if not isinstance(parsed, dict):
        raise ValueError(message)
    return parsed


def take_new_names(config: Any) -> None:
    """transformers 5.2x renamed gradient_checkpointing; TRL's users keep its name here, without a warning."""
    for suffix in ("", "_kwargs"):
        new = f"activation_checkpointing{suffix}"
        if getattr(config, new, False) is None:
            setattr(config, new, getattr(config, f"gradient_checkpointing{suffix}"))


def more_is_better(metric: str) -> bool:
    """Whether a metric is better the larger it is: all are but for a KL or a loss. A reward's name means nothing."""
    own_name = re.split("(?:objective|completions|policy|val)/", metric)[-1]  # after the evaluation set's
    return "rewards/" in metric or not {"kl", "loss"} & set(re.split("[^a-z]+", own_name.lower()))


def without_tokens(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with every access token in them, dicts in dicts included, replaced by None."""
    return {
        name: None if _is_token(name) else without_tokens(value) if isinstance(value, dict) else value
        for name, value in options.items()
    }


def _is_token(name: str) -> bool:
    return isinstance(name, str) and (name in ("token", "use_auth_token") or name.endswith("_token"))
