"""Files from a local folder or the Hub, and what goes wrong on the way there, in one line each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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

_TransferError = HfHubHTTPError.__bases__[0]
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
        """Take a folder, or ``id[@revision][:subfolder]``; ``folder:subfolder`` too."""
        if isinstance(source, AdapterSource):
            return source
        text = os.path.expanduser(str(source))
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

    def has(self, name: str) -> bool:
        """Whether it holds a file, without downloading it."""
        if self.is_folder:
            return (self._folder / name).is_file()
        name = f"{self.subfolder}/{name}" if self.subfolder else name
        if isinstance(try_to_load_from_cache(self.location, name, revision=self.revision), str):
            return True
        try:
            return file_exists(self.location, name, revision=self.revision)
        except (HfHubHTTPError, OSError):  # offline, without this file in the cache
            return False

    def file(self, name: str) -> Path:
        """Local path of one of its files, downloaded where needed.

        Raises:
            FileNotFoundError: it has no such file.
            HubError: the Hub does not give it.
        """
        if self.is_folder:
            path = self._folder / name
            if not path.is_file():
                raise FileNotFoundError(path)
            return path
        with hub_errors("adapter", self.location, self.revision):
            try:
                return Path(hf_hub_download(self.location, name, revision=self.revision, subfolder=self.subfolder))
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError as error:
                raise FileNotFoundError(f"{self}/{name}") from error

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
        HubError: the Hub does not give it.
    """
    place = AdapterSource(name, revision)
    try:
        place.file("config.json")
    except FileNotFoundError:
        return  # not a model: transformers says what it expects
    if any(place.has(f"model.safetensors{index}") for index in ("", ".index.json")):
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
            return f"The Hub answered {cause.response.status_code} for the {what}. Try again later."
        if isinstance(cause, _TransferError) and not isinstance(cause, HfHubHTTPError):
            return f"The connection broke while the {what} was loaded ({cause}). Run it again: the download goes on."
    return None


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
