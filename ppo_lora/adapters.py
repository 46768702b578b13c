"""LoRA adapters and scalar heads: reading them from a folder or the Hub, and writing them back.

Every adapter folder here is a plain PEFT folder. A value or reward adapter is a ``SEQ_CLS`` adapter with its head
(``score.weight``) beside the LoRA tensors, as TRL's RewardTrainer writes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .fitting import plain_names
from .heads import ScalarHead
from .hub import AdapterSource, hub_errors, snapshot_commit
from .identity import BaseIdentity
from .manifest import MANIFEST_NAME, Manifest, Origin

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
CONFIG_NAME = "adapter_config.json"
HEAD_NAMES = ("score", "classifier")
_PREFIX = "base_model.model."
_FUNCTION = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Options that change what an adapter computes with the same tensors."""


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_pattern(text: Any) -> bool:
    try:
        return isinstance(text, str) and bool(re.compile(text))
    except re.error:
        return False


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_patterns_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(_is_pattern(key) and holds(each) for key, each in value.items())
    )


def _is_modules(value: Any) -> bool:
    several = isinstance(value, list | tuple | set) and all(isinstance(name, str) for name in value)
    return value is None or _is_pattern(value) or several


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a positive integer"),
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (_is_number, "a number"),
    "rank_pattern": (_is_patterns_of(_is_rank), "a positive integer by pattern"),
    "alpha_pattern": (_is_patterns_of(_is_number), "a number by pattern"),
    "target_modules": (_is_modules, "names of modules, or a pattern"),
    "exclude_modules": (_is_modules, "names of modules, or a pattern"),
    "base_model_name_or_path": (_is_text, "a name"),
    "revision": (_is_text, "a name"),
}
"""What has to hold for options that PEFT takes from a file as they are, and what was expected where it does not."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's configuration and tensors, PEFT's key names, and the scalar head that came with it, if any.

    Attributes:
        config: with the head taken out of ``modules_to_save``.
        tensors: by PEFT's names, without the head's.
        head: ``weight`` and, where there is one, ``bias``.
        source: where it was read; None if it was made in memory.
        revision: the commit it was read at, on the Hub.
        trained_on: the base, as far as the adapter's files tell.
        manifest: what ppo_lora wrote beside it.
    """

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    head: Mapping[str, Tensor] | None = None
    source: str | None = None
    revision: str | None = None
    trained_on: BaseIdentity = BaseIdentity()
    manifest: Manifest | None = None

    def sha256(self) -> str:
        """A hash of what the adapter computes: tensors, head, ranks and scalings, whatever file they are in."""
        digest = hashlib.sha256()
        digest.update(json.dumps(self.scaling(), sort_keys=True).encode())
        head = {f"{HEAD_NAMES[0]}.{part}": tensor for part, tensor in (self.head or {}).items()}
        for key, tensor in sorted({**self.tensors, **head}.items()):
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def scaling(self) -> dict[str, Any]:
        """The options that change what the same tensors compute."""
        return {name: getattr(self.config, name) for name in _FUNCTION}

    def origin(self) -> Origin:
        """For the manifest of what becomes of it."""
        return Origin(self.source or "memory", self.revision, self.sha256())

    def scalar_head(self, hidden_size: int) -> ScalarHead:
        """The head as a module.

        Raises:
            ValueError: there is none, it has more than one output, or another hidden size.
        """
        if self.head is None:
            raise ValueError(
                f"The adapter {self.source} has no head weights ({' or '.join(HEAD_NAMES)}), so it cannot score. "
                "Expected a SEQ_CLS adapter whose file holds its head, as `trl reward` writes with "
                "`lora_task_type: SEQ_CLS` and `lora_modules_to_save: [score]`; a head made up at random would give "
                "meaningless scores."
            )
        if not {"weight"} <= self.head.keys() <= {"weight", "bias"}:
            raise ValueError(
                f"The head of {self.source} has the tensors {sorted(self.head)}; expected one linear layer (weight "
                "and perhaps bias), as transformers' sequence classifiers have. Heads of several layers are not known."
            )
        weight, bias = self.head["weight"], self.head.get("bias")
        if bias is not None and list(bias.shape) != [1]:
            raise ValueError(f"The head of {self.source} has a bias of shape {list(bias.shape)}; expected [1].")
        if weight.shape[0] != 1:
            raise ValueError(
                f"The head of {self.source} has {weight.shape[0]} outputs; expected 1. Train the reward model with "
                "num_labels=1."
            )
        if weight.shape[1] != hidden_size:
            raise ValueError(
                f"The head of {self.source} is for hidden size {weight.shape[1]}; the base's is {hidden_size}. "
                "Load the base that the adapter was trained on."
            )
        return ScalarHead(weight, bias)


SHARED, SEPARATE, ZERO = "shared", "separate", "zero"
"""What the value adapter can be besides an adapter: the policy's; one of its own, started from the reward adapter if
there is one; or one of its own that starts fresh, with a head of zeros."""

AdapterLike = str | Path | AdapterSource | Adapter


def read_adapter(source: str | Path | AdapterSource, allow_pickle: bool = False) -> Adapter:
    """Read a LoRA adapter, its head taken apart from its other tensors.

    Args:
        source: a local folder, or a Hub id, as ``id[@revision][:subfolder]``.
        allow_pickle: read ``adapter_model.bin`` where there are no safetensors.

    Raises:
        ValueError: files are missing, broken or changed since they were saved, or it is not a LoRA adapter.
        HubError: the Hub does not give it.
    """
    place = AdapterSource.parse(source)
    with hub_errors("adapter", place.location, place.revision):
        adapter = _read(place, allow_pickle)
    if adapter.manifest is not None and adapter.manifest.sha256 != adapter.sha256():
        raise ValueError(
            f"The adapter {place} is not what {MANIFEST_NAME} beside it says: its contents have another sha256. It "
            f"was changed or cut after it was saved; get it again, or delete {MANIFEST_NAME} to take it as it is."
        )
    return adapter


def read_adapter_config(source: str | Path | AdapterSource) -> LoraConfig:
    """The configuration of a LoRA adapter, without its weights, which need not be there.

    Raises:
        ValueError: it is missing or broken, or of another kind of adapter.
        HubError: the Hub does not give it.
    """
    place = AdapterSource.parse(source)
    with hub_errors("adapter", place.location, place.revision):
        return role_config(_read_config(_required(place, CONFIG_NAME), place))


def _read(place: AdapterSource, allow_pickle: bool) -> Adapter:
    config_path = _required(place, CONFIG_NAME)
    # Everything of one commit, also if the repository changes meanwhile.
    commit = None if place.is_folder else snapshot_commit(config_path)
    pinned = replace(place, revision=commit or place.revision)
    config = _read_config(config_path, place)
    manifest_path = pinned.find(MANIFEST_NAME)
    manifest = None if manifest_path is None else Manifest.read(manifest_path, str(place))
    stored = _read_tensors(pinned, place, allow_pickle)
    _check_tensors(stored, place)
    tensors, head = _without_head(plain_names(stored))
    named = BaseIdentity(config.base_model_name_or_path, config.revision)
    return Adapter(
        config=role_config(config),
        tensors=tensors,
        head=head,
        source=str(place),
        revision=commit,
        trained_on=manifest.base if manifest is not None else named,
        manifest=manifest,
    )


def _required(place: AdapterSource, name: str) -> Path:
    path = place.find(name)
    if path is not None:
        return path
    where, found = str(place), ""
    if place.is_folder:
        folder = Path(place.location) / (place.subfolder or "")
        names = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "nothing"
        where, found = str(folder), f" (found: {names})"
    raise ValueError(
        f"No {name} in {where}{found}. An adapter is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}, as PEFT's "
        "save_pretrained or `trl sft` and `trl reward` write it."
    )


def _read_config(path: Path, place: AdapterSource) -> LoraConfig:
    try:
        kind = json.loads(path.read_text()).get("peft_type")
        config = PeftConfig.from_pretrained(str(path.parent))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"The {CONFIG_NAME} of {place} is broken ({type(error).__name__}: {error}).") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{place} is a {kind} adapter; only LoRA adapters can share the base.")
    for option, (holds, expected) in _EXPECTED.items():
        if not holds(value := getattr(config, option)):
            raise ValueError(f"The {CONFIG_NAME} of {place} is broken ({option} is {value!r}; expected {expected}).")
    return config


def _read_tensors(pinned: AdapterSource, place: AdapterSource, allow_pickle: bool) -> dict[str, Tensor]:
    path = pinned.find(WEIGHTS_NAME)
    pickled = path is None and pinned.has(PICKLE_NAME)
    if pickled and not allow_pickle:
        raise ValueError(
            f"The adapter {place} has {PICKLE_NAME} and no {WEIGHTS_NAME}. A pickle can run code when it is read, so "
            "it is refused. Save the adapter with safetensors (PEFT's default), or set allow_pickle=True "
            "(--allow_pickle) if you trust where it comes from."
        )
    path = path or _required(pinned, PICKLE_NAME if pickled else WEIGHTS_NAME)
    try:
        return torch.load(path, map_location="cpu", weights_only=True) if pickled else load_file(path)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(f"{path.name} of {place} is broken ({error}). Save or download it again.") from error


def _check_tensors(tensors: Mapping[str, Tensor], place: AdapterSource) -> None:
    """Refuse what would be read and then compute nothing of use, or only a part of what is in the file."""
    seen: set[str] = set()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"The adapter {place} has {tensor.dtype} numbers in {name}; expected floats.")
        if not bool(tensor.float().isfinite().all()):
            raise ValueError(
                f"The adapter {place} has numbers that are not finite in {name}: its training diverged, or the dtype "
                "it was saved in overflowed. Use an earlier checkpoint of it, or save it in float32."
            )
        (plain,) = plain_names({name: tensor})
        plain = f"the head's {_head_part(plain)}" if _head_part(plain) else plain
        if plain in seen:
            raise ValueError(f"The adapter {place} has {plain} twice; expected one adapter in a file, with one head.")
        seen.add(plain)


def _without_head(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    head = {key: part for key in tensors if (part := _head_part(key))}
    rest = {key: tensor for key, tensor in tensors.items() if key not in head}
    return rest, {part: tensors[key] for key, part in head.items()} or None


def read_roles(given: Mapping[str, AdapterLike | None], allow_pickle: bool = False) -> dict[str, Any]:
    """Adapters from whatever names them, by role; None and the value role's words stay as they are.

    Raises:
        ValueError: "shared", "separate" or "zero" for a role other than the value; see :func:`read_adapter`.
    """
    read: dict[str, Any] = {}
    for role, source in given.items():
        word = isinstance(source, str) and source in (SHARED, SEPARATE, ZERO)
        if word and role != "value":
            raise ValueError(f"The {role} adapter is {source!r}, which only the value adapter can be; give a folder.")
        if source is None or word or isinstance(source, Adapter):
            read[role] = source
        else:
            read[role] = read_adapter(source, allow_pickle)
    return read


def role_config(config: LoraConfig) -> LoraConfig:
    """The configuration under which an adapter lives on the shared causal base.

    Its head is kept outside PEFT; other modules that it saved whole have to be the base's own (see ``fitting``).
    """
    config = deepcopy(config)
    config.task_type = "CAUSAL_LM"
    config.inference_mode = False
    config.auto_mapping = None  # names the class that it was trained on, which the base need not be
    config.modules_to_save = None
    return config


def write_adapter(folder: str | Path, adapter: Adapter) -> None:
    """Write an adapter as PEFT does; with a head it becomes a ``SEQ_CLS`` adapter that plain PEFT loads.

    Args:
        folder: made where it does not exist.
        adapter: what to write.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(adapter.config)
    config.inference_mode = True
    tensors = dict(adapter.tensors)
    if adapter.head is not None:
        config.task_type = "SEQ_CLS"
        config.modules_to_save = sorted({*(config.modules_to_save or []), HEAD_NAMES[0]})
        tensors |= {f"{_PREFIX}{HEAD_NAMES[0]}.{part}": tensor for part, tensor in adapter.head.items()}
    config.save_pretrained(str(folder))
    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS_NAME, metadata={"format": "pt"})


def _head_part(key: str) -> str | None:
    """What follows the head's name in one of its keys (``base_model.model.score.weight``): "weight"; else None."""
    parts = key.split(".")
    name = next((part for part in parts if part in HEAD_NAMES), None)
    if name is None or any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(parts[parts.index(name) + 1 :])
