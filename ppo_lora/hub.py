"""Files from a local folder or the Hub, and what goes wrong on the way there, in one line each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import file_exists, hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

_TransferError: type[Exception] = HfHubHTTPError.__bases__[0]
"""The base class of the HTTP library's errors: which library that is differs among the client's versions."""


class HubError(OSError):
    """Something could not be had from the Hub; the message is one line and says what to do."""


@dataclass(frozen=True)
class AdapterSource:
    """Where an adapter comes from: a local folder, or a Hub id with a revision; and a folder inside of it.

    Attributes:
        location: a folder, or an id such as ``owner/name``.
        revision: branch, tag or commit on the Hub; the default branch if None.
        subfolder: folder of the adapter inside the location, such as ``value``.
    """

    location: str
    revision: str | None = None
    subfolder: str | None = None

    @classmethod
    def parse(cls, source: str | Path | AdapterSource) -> AdapterSource:
        """Take a folder, or ``id[@revision][:subfolder]``; ``folder:subfolder`` too.

        Raises:
            ValueError: there is nothing before the revision and the subfolder.
        """
        if isinstance(source, AdapterSource):
            return source
        text = os.path.expanduser(str(source))
        if not text.strip() or text[0] in "@:":  # not the working directory, which Path takes them for
            raise ValueError(
                f"An adapter is named {text!r}; expected a folder or a Hub id, as id[@revision][:subfolder]. Leave "
                "the option out for none."
            )
        if Path(text).is_dir():
            return cls(text)
        location, _, subfolder = text.partition(":")
        if Path(location).is_dir():
            return cls(location, None, subfolder or None)
        location, _, revision = location.rpartition("@") if "@" in location else (location, "", "")
        return cls(location, revision or None, subfolder or None)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine."""
        return Path(self.location).is_dir()

    def find(self, name: str) -> Path | None:
        """Local path of one of its files, downloaded where needed; None if it has no such file.

        The Hub client's own errors come through: see :func:`hub_errors`.
        """
        if self.is_folder:
            path = self._folder / name
            return path if path.is_file() else None
        if self._known_absent(name):
            return None
        try:
            return Path(hf_hub_download(self.location, name, revision=self.revision, subfolder=self.subfolder))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Whether it holds a file, without downloading it; False too where the Hub cannot be asked."""
        if self.is_folder:
            return (self._folder / name).is_file()
        if isinstance(self._cached(name), str):
            return True
        try:
            return file_exists(self.location, self._inside(name), revision=self.revision)
        except (_TransferError, OSError, RuntimeError):
            return False

    def is_cached(self, name: str) -> bool:
        """Whether a file is on this machine already."""
        return self.has(name) if self.is_folder else isinstance(self._cached(name), str)

    def _cached(self, name: str) -> Any:
        return try_to_load_from_cache(self.location, self._inside(name), revision=self.revision)

    def _known_absent(self, name: str) -> bool:
        """The cache notes, by commit, which files a repository does not have."""
        return self.revision is not None and not isinstance(self._cached(name), str | None)

    def _inside(self, name: str) -> str:
        return f"{self.subfolder}/{name}" if self.subfolder else name

    @property
    def _folder(self) -> Path:
        return Path(self.location) / (self.subfolder or "")

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.location}{revision}{f':{self.subfolder}' if self.subfolder else ''}"


def check_safetensors(name: str, revision: str | None = None) -> None:
    """Refuse a model without safetensors before its weights are looked for.

    transformers would otherwise read a pickle, or ask a service on the Hub to convert it.

    Raises:
        ValueError: it has no ``model.safetensors``.
    """
    place = AdapterSource(name, revision)
    weights = [f"model.safetensors{index}" for index in ("", ".index.json")]
    if any(place.is_cached(file) for file in weights) or place.find("config.json") is None:
        return  # without a configuration it is no model, and transformers says what it expects
    if any(place.has(file) for file in weights):
        return
    if any(place.has(f"pytorch_model.bin{index}") for index in ("", ".index.json")):
        raise ValueError(
            f"{name} has its weights in pytorch_model.bin and not in safetensors. A pickle can run code when it is "
            "read, so it is refused. Convert it (load it and save_pretrained), or set allow_pickle=True "
            "(--allow_pickle) if you trust where it comes from."
        )
    raise ValueError(f"{name} has no weights: no model.safetensors and no model.safetensors.index.json.")


def snapshot_commit(path: Path) -> str | None:
    """The commit that a downloaded file belongs to; None for a file that is not in the Hub's cache.

    The cache keeps files as ``models--owner--name/snapshots/COMMIT/file`` (documented in huggingface_hub's guide).
    """
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-2] else None


@contextmanager
def hub_errors(what: str, name: str, revision: str | None = None) -> Iterator[None]:
    """Turn the Hub client's errors, wherever they hide in an exception's causes, into one line.

    Args:
        what: what was asked for: "base", "adapter", "data set".
        name: its id.
        revision: branch, tag or commit; None for the default branch.

    Raises:
        HubError: the Hub does not have it, does not give it, or cannot be reached. Other errors pass through.
    """
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        message = _explanation(error, f"{what} {name}", name, revision)
        if message is None:
            raise
        raise HubError(message) from error


def _explanation(error: Exception, what: str, name: str, revision: str | None) -> str | None:
    for cause in _causes(error):
        # datasets drops the client's exception and keeps its words.
        gated = isinstance(cause, DatasetNotFoundError) and "is a gated dataset" in str(cause)
        if gated or isinstance(cause, GatedRepoError):
            return (
                f"The {what} is gated. Ask for access on its Hub page, then log in with `hf auth login` or set "
                "HF_TOKEN to a token of the account that got it."
            )
        if isinstance(cause, RevisionNotFoundError):
            return (
                f"The {what} has no revision {revision!r}. Give a branch, tag or commit that its Hub page lists, or "
                "none for the default branch."
            )
        if isinstance(cause, (RepositoryNotFoundError, HFValidationError, DatasetNotFoundError)):
            return _not_found(what, name)
        if isinstance(cause, (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError)):
            return _unreachable(error, what)
        if isinstance(cause, HfHubHTTPError) and not isinstance(cause, EntryNotFoundError):
            return _refused(cause.response.status_code, what)
        if isinstance(cause, RuntimeError) and "client has been closed" in str(cause):
            return _unreachable(error, what)  # what huggingface_hub before 2.0 says of a refused connection
        if isinstance(cause, _TransferError) and not isinstance(cause, HfHubHTTPError):
            return f"The connection broke while the {what} was loaded ({cause}). Run it again: the download goes on."
    return None


def _refused(status: int, what: str) -> str:
    if status in (401, 403):
        return (
            f"The Hub answered {status} for the {what}: the token is not valid for it. Log in again with "
            "`hf auth login`, or set HF_TOKEN."
        )
    return f"The Hub answered {status} for the {what}. Try again later."


def _not_found(what: str, name: str) -> str:
    folder = "" if Path(name).exists() else f", and there is no folder {name!r} here"
    return (
        f"The {what} is not on the Hub, or is private{folder}. Check the spelling; for a private one log in with "
        "`hf auth login` or set HF_TOKEN."
    )


def _unreachable(error: Exception, what: str) -> str:
    answers = [cause.response.status_code for cause in _causes(error) if isinstance(cause, HfHubHTTPError)]
    if is_offline_mode():
        why, remedy = "offline mode is on (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE to download it"
    else:
        why = f"the Hub answered {answers[-1]}" if answers else "the Hub cannot be reached"
        remedy = "try again when it answers"
    return f"The {what} is not in the local cache, and {why}; {remedy}, or give a local folder."


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, what it was raised from, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
