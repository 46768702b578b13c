"""The README.md of a saved policy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import resources
from inspect import get_annotations
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig

from .curves import draw_curves
from .identity import BaseIdentity
from .manifest import Origin

CURVE_NAME = "curves.png"
_OPTIONS = (
    "learning_rate", "value_learning_rate", "kl_coef", "kl_estimator", "num_ppo_epochs", "num_mini_batches",
    "per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "cliprange", "cliprange_value",
    "vf_coef", "entropy_coef", "gamma", "lam", "whiten_rewards", "whiten_advantages", "temperature",
    "max_completion_length", "missing_eos_penalty", "missing_eos_score", "lr_scheduler_type", "bf16", "seed",
)  # fmt: skip
_HIDDEN = ("memory/", "time/")
_SCORES = "objective/scores"


@dataclass(frozen=True)
class CardFacts:
    """What a model card says of a run.

    Attributes:
        name: heading.
        location: what a reader loads: the Hub id, or the folder's name.
        base: which base.
        lora: the policy adapter's configuration.
        roles: by role, where its adapter came from; None for a fresh one.
        reward_weights: by reward source.
        config: the PPOConfig.
        history: the trainer's log.
        dataset: id or folder of the prompts.
        value: whether the value role is there too.
        tags: for the Hub.
        versions: of packages.
    """

    name: str
    location: str
    base: BaseIdentity
    lora: LoraConfig
    roles: Mapping[str, Origin | None]
    reward_weights: Mapping[str, float]
    config: Any
    history: Sequence[Mapping[str, float]] = ()
    dataset: str | None = None
    value: bool = True
    tags: Iterable[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def write_card(folder: str | Path, facts: CardFacts) -> None:
    """Write ``README.md`` and the curve: what a reader needs to load and to judge the policy.

    Folders of the machine it was trained on are called "a local folder": a card is made to be published.
    """
    folder = Path(folder)
    base_id, dataset = _published(facts.base.name), _published(facts.dataset)
    evaluations, metrics = _last_metrics(facts.history)
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_id,
            library_name="peft",
            pipeline_tag="text-generation",
            datasets=dataset,
            tags=sorted(facts.tags),
        ),
        template_str=resources.files("ppo_lora").joinpath("templates/model_card.md").read_text(),
        name=facts.name,
        location=facts.location,
        base=_linked(base_id, facts.base.commit or facts.base.revision) if base_id else "a local base",
        base_id=base_id,
        quantization=facts.base.quantization or "none",
        dataset=dataset,
        value=facts.value,
        roles={role: _start(role, origin) for role, origin in facts.roles.items()},
        reward_weights=facts.reward_weights,
        lora=facts.lora,
        options=_options(facts.config),
        evaluations=evaluations,
        metrics=metrics,
        curve=CURVE_NAME if draw_curves(facts.history, folder / CURVE_NAME) else None,
        versions=facts.versions,
    )
    card.save(folder / "README.md")


def _published(name: str | None) -> str | None:
    """A Hub id as it is; None for a folder of this machine."""
    if name is None or Path(name).exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return None
    return name


def _linked(name: str, revision: str | None) -> str:
    return f"[`{name}`](https://huggingface.co/{name}){f' at `{revision}`' if revision else ''}"


def _start(role: str, origin: Origin | None) -> str:
    if origin is None:
        return "the base itself" if role == "reference" else "a fresh adapter"
    if origin.sha256 is None:
        return origin.source
    name = origin.source.partition("@")[0].partition(":")[0]
    told = _published(name)
    content = f" (sha256 `{origin.sha256[:12]}`)"
    return (_linked(told, origin.revision) if told else "an adapter in a local folder") + content


def _options(config: Any) -> dict[str, Any]:
    """The options that matter in any run, and every other of PPO's own whose number or word is not the default."""
    own = {name: config.__dataclass_fields__[name].default for name in get_annotations(type(config))}
    changed = [
        name
        for name, default in own.items()
        if isinstance(getattr(config, name), (bool, int, float, str)) and getattr(config, name) != default
    ]
    return {name: _shown(getattr(config, name)) for name in dict.fromkeys((*_OPTIONS, *changed))}


def _shown(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _last_metrics(history: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, list[str]]]:
    """The last logged numbers: names of the evaluations, and by metric the training's number and each evaluation's."""
    training: Mapping[str, Any] = next((entry for entry in reversed(history) if _SCORES in entry), {})
    columns = {"": training, **_last_evaluations(history)}
    metrics = dict.fromkeys(key for column in columns.values() for key in column)
    shown = [key for key in metrics if "/" in key and not key.startswith(_HIDDEN)]
    rows = {key: [f"{column[key]:.4g}" if key in column else "" for column in columns.values()] for key in shown}
    return list(columns)[1:], rows


def _last_evaluations(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By evaluation ("eval", or "eval_name" where there are several), its last numbers under training's names."""
    found: dict[str, dict[str, Any]] = {}
    for entry in history:
        prefix = next((key[: -len(_SCORES) - 1] for key in entry if key.endswith("_" + _SCORES)), None)
        if prefix is not None:
            start = prefix + "_"
            found[prefix] = {key[len(start) :]: value for key, value in entry.items() if key.startswith(start)}
    return found
