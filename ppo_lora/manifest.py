"""`ppo_lora.json`: what a saved adapter holds and what it stands on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .identity import BaseIdentity

MANIFEST_NAME = "ppo_lora.json"
FORMAT = 2
_PACKAGES = ("ppo_lora", "torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")


def package_versions() -> dict[str, str]:
    """Versions of ppo_lora and of what it stands on."""
    return {name: metadata.version(name) for name in _PACKAGES}


@dataclass(frozen=True)
class Origin:
    """Where a role's adapter came from.

    Attributes:
        source: folder or Hub id, as it was given.
        revision: the commit that was loaded, on the Hub.
        sha256: of its contents; None where it has none of its own.
    """

    source: str
    revision: str | None = None
    sha256: str | None = None

    @classmethod
    def of_manifest(cls, entry: Mapping[str, Any]) -> Origin:
        """Read one back.

        Raises:
            TypeError: an entry is no text.
        """
        for name, value in entry.items():
            if not isinstance(value, str) and (value is not None or name == "source"):
                raise TypeError(f"roles.{name} is {value!r}; expected a text")
        return cls(**entry)


@dataclass(frozen=True)
class Manifest:
    """What is written beside an adapter.

    Attributes:
        role: of the adapter in this folder.
        sha256: of its contents.
        base: what it was trained on.
        roles: by role, where its adapter came from; None for a fresh adapter, or for the base itself.
        reward: how scores were made: weights by source, normalisation, penalties.
        schedule: what has to stay as it is for the run to be resumed.
        versions: of the packages.
    """

    role: str
    sha256: str
    base: BaseIdentity
    roles: Mapping[str, Origin | None]
    reward: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=package_versions)

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        entries = {
            "format": FORMAT,
            "role": self.role,
            "sha256": self.sha256,
            "base": self.base.entry(),
            "roles": {role: None if origin is None else asdict(origin) for role, origin in self.roles.items()},
            "reward": dict(self.reward),
            "schedule": dict(self.schedule),
            "versions": dict(self.versions),
        }
        (folder / MANIFEST_NAME).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")

    @classmethod
    def read(cls, path: Path, place: str) -> Manifest:
        """Read one back. Nothing in it is used as a path.

        Args:
            path: of the file.
            place: names the folder in messages.

        Raises:
            ValueError: it is broken, or of another format.
        """
        broken = f"The manifest {MANIFEST_NAME} of {place} is broken ({{}}). Save or download the folder again."
        try:
            entries = json.loads(path.read_text())
        except (RecursionError, ValueError) as error:
            raise ValueError(broken.format(error)) from error
        try:
            if entries["format"] != FORMAT:
                raise ValueError(
                    f"The manifest {MANIFEST_NAME} of {place} has format {entries['format']!r}; this ppo_lora reads "
                    f"format {FORMAT}. Use the version of ppo_lora that wrote it, or delete the manifest."
                )
            return cls._of_entries(entries)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(broken.format(f"{type(error).__name__}: {error}")) from error

    @classmethod
    def _of_entries(cls, entries: Mapping[str, Any]) -> Manifest:
        return cls(
            role=_typed(entries, "role", str),
            sha256=_typed(entries, "sha256", str),
            base=BaseIdentity.of_manifest(entries["base"]),
            roles={
                role: None if origin is None else Origin.of_manifest(origin)
                for role, origin in _typed(entries, "roles", dict).items()
            },
            **{name: _typed(entries, name, dict) for name in ("reward", "schedule", "versions")},
        )


def _typed(entries: Mapping[str, Any], name: str, kind: type) -> Any:
    value = entries[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; expected a {kind.__name__}")
    return value
