"""A saved folder: the policy as plain PEFT at its top, the value role below, and a manifest beside each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .adapters import CONFIG_NAME, SEPARATE, SHARED, WEIGHTS_NAME, Adapter, read_adapter, write_adapter
from .identity import check_belongs
from .manifest import MANIFEST_NAME, Manifest, Origin
from .roles import Role, label
from .shared_base import SharedBase

VALUE_FOLDER = "value"
STATE_FILE = "ppo_state.json"
LOGS = "logs"
"""The state of what was measured since the last log. There is none right after one, nor in 0.1.0's checkpoints."""


class Stateful(Protocol):
    """Something that a run carries from iteration to iteration: a coefficient, running moments."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values; empty where there is nothing to carry."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


def save_roles(
    folder: str | Path,
    base: SharedBase,
    schedule: Mapping[str, int],
    reward: Mapping[str, Any] | None = None,
    value: bool = True,
) -> None:
    """Write the two trained roles, each with a manifest.

    Args:
        folder: made where it does not exist.
        base: whose policy and value are saved.
        schedule: what has to stay as it is for the run to be resumed.
        reward: how scores were made.
        value: whether the value role is saved too. If not, one that an earlier save left there is deleted.
    """
    folders = {Role.POLICY: Path(folder), **({Role.VALUE: Path(folder) / VALUE_FOLDER} if value else {})}
    if not value:
        _delete_value(Path(folder) / VALUE_FOLDER)
    for role, place in folders.items():
        adapter = base.adapter(role)
        write_adapter(place, adapter)
        Manifest(
            role=role.value,
            sha256=adapter.sha256(),
            base=base.identity,
            roles={label(name): base.adapters.origins[name] for name in base.roles},
            reward=dict(reward or {}),
            schedule=dict(schedule),
        ).write(place)


def _delete_value(folder: Path) -> None:
    """Of an earlier run, which would be taken for this policy's, and be pushed with it."""
    if (folder / MANIFEST_NAME).is_file():
        for name in (CONFIG_NAME, WEIGHTS_NAME, MANIFEST_NAME):
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def load_roles(folder: str | Path, base: SharedBase, schedule: Mapping[str, int]) -> None:
    """Copy the two trained roles into the base's parameters, in place.

    Warns:
        UserWarning: they were trained on another base, revision or quantization.

    Raises:
        ValueError: the folder is no checkpoint, or of a run with iterations of another size, another reward adapter,
            another reference or another kind of value role.
    """
    check_checkpoint(folder)
    folder = Path(folder)
    adapters = {Role.POLICY: read_adapter(folder), Role.VALUE: read_adapter(folder / VALUE_FOLDER)}
    for adapter in adapters.values():
        _check_same_run(adapter, folder, base, schedule)
    for trained_on in {adapter.trained_on for adapter in adapters.values()}:
        check_belongs(trained_on, base.identity, f"checkpoint {folder}")
    for role, adapter in adapters.items():
        base.load_adapter(role, adapter)


def save_states(folder: str | Path, states: Mapping[str, Stateful]) -> None:
    """Write the state of each of ``states``; a number in JSON is read back to the last bit."""
    path = Path(folder) / STATE_FILE
    path.write_text(json.dumps(_filled(states), indent=2) + "\n", encoding="utf-8")


def load_states(folder: str | Path, states: Mapping[str, Stateful]) -> None:
    """Bring each of ``states`` to where it was when the checkpoint was written.

    Raises:
        ValueError: the checkpoint has the states of other options.
    """
    path = Path(folder) / STATE_FILE
    saved = _read_json(path) if path.is_file() else {}
    wanted = _filled(states)
    if saved.keys() | {LOGS} != wanted.keys() | {LOGS}:
        raise ValueError(
            f"The checkpoint {folder} has the state of {sorted(saved) or 'nothing'}, this run needs that of "
            f"{sorted(wanted) or 'nothing'}; a run resumes with the options it began with."
        )
    for name, state in saved.items():
        states[name].load_state_dict(state)


def _filled(states: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    return {name: state for name, each in states.items() if (state := each.state_dict())}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}). Resume from another checkpoint.") from error


def check_checkpoint(folder: str | Path, *files: str) -> None:
    """Refuse what is no checkpoint's folder.

    Args:
        folder: to resume from.
        files: that it has to hold besides both roles.

    Raises:
        ValueError: it is none; the message says what it lacks.
    """
    expected = f"resume_from_checkpoint is {str(folder)!r}"
    if not str(folder) or not Path(folder).is_dir():
        raise ValueError(f"{expected}; expected a checkpoint folder of an earlier run.")
    has_value = (Path(folder) / VALUE_FOLDER).is_dir()
    missing = [] if has_value else [f"folder {VALUE_FOLDER}/"]
    missing += [name for name in files if not (Path(folder) / name).is_file()]
    if missing:
        raise ValueError(
            f"{expected}, which has no {missing[0]}; expected a folder checkpoint-N that a run saved (save_strategy, "
            "without save_only_model). To start a new run from an adapter, give it as policy_adapter."
        )
    for name in files:
        if name.endswith(".json"):
            _read_json(Path(folder) / name)


def _check_same_run(adapter: Adapter, folder: Path, base: SharedBase, schedule: Mapping[str, int]) -> None:
    saved = adapter.manifest
    if saved is None:
        return
    if dict(saved.schedule) != dict(schedule):
        raise ValueError(
            f"The checkpoint {folder} was made with {dict(saved.schedule)}, this run has {dict(schedule)}; a run "
            "resumes with the iterations it began with. Keep num_ppo_epochs, num_mini_batches, the batch sizes and "
            "the number of processes."
        )
    for role in (Role.REWARD, Role.REFERENCE):
        then, now = saved.roles.get(role.value), base.adapters.origins.get(role)
        if _contents(then) != _contents(now):
            raise ValueError(
                f"The checkpoint {folder} was made with the {role.value} adapter {_name(then)}, this run has "
                f"{_name(now)}, whose contents differ; a run resumes with the roles it began with."
            )

    value, own = _kind(saved.roles.get("value")), SHARED if base.shares_value_adapter else SEPARATE
    if value != own:
        raise ValueError(
            f"The checkpoint {folder} was made with value_adapter={value}, this run has {own}; a run resumes with the "
            "roles it began with."
        )


def _kind(value: Origin | None) -> str:
    """Whether a value role was on the policy's adapter, which has no contents of its own, or on another."""
    return SHARED if value is not None and value.sha256 is None else SEPARATE


def _contents(origin: Origin | None) -> str | None:
    return None if origin is None else origin.sha256


def _name(origin: Origin | None) -> str:
    return "none" if origin is None else origin.source
