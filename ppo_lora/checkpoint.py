"""A saved folder: the policy as plain PEFT at its top, the value role below, and a manifest of what they stand on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .adapters import read_adapter, write_adapter
from .roles import Role
from .shared_base import SharedBase

MANIFEST_NAME = "ppo_lora.json"
VALUE_FOLDER = "value"
_PACKAGES = ("ppo_lora", "torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")


def save_roles(folder: str | Path, base: SharedBase, schedule: Mapping[str, int]) -> None:
    """Write the two trained roles and the manifest.

    Args:
        folder: made where it does not exist.
        base: whose policy and value are saved.
        schedule: what has to stay as it is for the run to be resumed.
    """
    folder = Path(folder)
    write_adapter(folder, base.adapter(Role.POLICY))
    write_adapter(folder / VALUE_FOLDER, base.adapter(Role.VALUE))
    quantization: Any = getattr(base.config, "quantization_config", None)
    manifest = {
        "format": 1,
        "schedule": dict(schedule),
        "base": base.config.name_or_path,
        "quantization": quantization.to_dict() if hasattr(quantization, "to_dict") else quantization,
        "roles": {role.value: base.adapters.sources[role] for role in base.roles},
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def load_roles(folder: str | Path, base: SharedBase, schedule: Mapping[str, int]) -> None:
    """Copy the two trained roles into the base's parameters, in place.

    Raises:
        ValueError: the folder is no checkpoint, or of a run with iterations of another size.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint is {str(folder)!r}; expected a checkpoint folder of an earlier run.")
    manifest = folder / MANIFEST_NAME
    saved = json.loads(manifest.read_text()).get("schedule") if manifest.is_file() else None
    if saved not in (None, dict(schedule)):
        raise ValueError(
            f"The checkpoint {folder} was made with {saved}, this run has {dict(schedule)}; a run resumes with the "
            "iterations it began with. Keep num_ppo_epochs, num_mini_batches, the batch sizes and the number of "
            "processes."
        )
    base.load_adapter(Role.POLICY, read_adapter(folder))
    base.load_adapter(Role.VALUE, read_adapter(folder / VALUE_FOLDER))
