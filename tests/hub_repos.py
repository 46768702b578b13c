"""Repositories as the Hugging Face Hub keeps them: files by content, commits, branches and tags. No HTTP here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

DATE = "2024-01-01T00:00:00.000Z"
# Of these a new repository's .gitattributes says that they are large files, whatever their size.
LARGE_SUFFIXES = (".arrow", ".bin", ".gz", ".model", ".npy", ".parquet", ".pt", ".pth", ".safetensors", ".zip")
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE_SUFFIXES).encode()


class HubError(Exception):
    """A refusal as the Hub words it: status, `X-Error-Code` (if it has one), message and further headers."""

    def __init__(self, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class Blob:
    """The content of a file, in git itself or, if `lfs`, in the store for large files with a pointer in git."""

    data: bytes
    lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git holds of a large file."""
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        ).encode()

    @cached_property
    def git_id(self) -> str:
        kept = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest()

    @property
    def etag(self) -> str:
        """By which clients know the content: they name the file in their cache after it."""
        return self.sha256 if self.lfs else self.git_id

    def describe(self, path: str) -> dict[str, Any]:
        """The file's entry in a listing."""
        entry = {"type": "file", "path": path, "size": len(self.data), "oid": self.git_id}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": len(self.pointer)}
        return entry


@dataclass(frozen=True)
class Commit:
    """All files of a repository at one time, by path."""

    id: str
    files: Mapping[str, Blob]
    title: str

    def file(self, path: str) -> Blob:
        if path not in self.files:
            # With the commit named, clients remember that it has no such file.
            raise HubError(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": self.id})
        return self.files[path]

    def listing(self, folder: str = "", recursive: bool = False) -> list[dict[str, Any]]:
        """Entries of the files and folders in `folder`, and if `recursive` in the folders in it."""
        start = PurePosixPath(folder)
        entries: dict[str, dict[str, Any]] = {}
        for path, blob in sorted(self.files.items()):
            above = [parent for parent in PurePosixPath(path).parents if start in parent.parents]
            if start in PurePosixPath(path).parents:
                entries |= {str(parent): self._describe_folder(str(parent)) for parent in reversed(above)}
                entries[path] = blob.describe(path)
        if folder and not entries:
            raise HubError(404, "EntryNotFound", f"{folder} does not exist on revision {self.id}")
        return [entry for path, entry in entries.items() if recursive or PurePosixPath(path).parent == start]

    def describe(self, path: str) -> dict[str, Any] | None:
        """The entry of one file or folder, None if there is neither."""
        if path in self.files:
            return self.files[path].describe(path)
        return self._describe_folder(path) if any(file.startswith(f"{path}/") for file in self.files) else None

    def _describe_folder(self, path: str) -> dict[str, Any]:
        inside = sorted((file, blob.git_id) for file, blob in self.files.items() if file.startswith(f"{path}/"))
        return {"type": "directory", "path": path, "size": 0, "oid": _digest(inside)}


class Repository:
    """A model or data set: commits by id, branches and tags that name them.

    Args:
        kind: "model" or "dataset".
        id: "namespace/name".
        private: Whether others are told that it does not exist.
        gated: Whether others see what is in it, but not its files.
    """

    def __init__(self, kind: str, id: str, private: bool = False, gated: bool = False):
        self.kind = kind
        self.id = id
        self.private = private
        self.gated = gated
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}

    @property
    def namespace(self) -> str:
        return self.id.split("/")[0]

    @property
    def url_path(self) -> str:
        return self.id if self.kind == "model" else f"{self.kind}s/{self.id}"

    def commit(self, branch: str, files: Mapping[str, Blob], title: str) -> Commit:
        """Put a commit of exactly `files` on a branch, a new one where it has no such branch."""
        contents = sorted((path, blob.git_id) for path, blob in files.items())
        commit = Commit(_digest([self.id, self.branches.get(branch), title, contents]), dict(files), title)
        self.commits[commit.id] = commit
        self.branches[branch] = commit.id
        return commit

    def at(self, revision: str) -> Commit:
        """The commit that a branch, a tag or a full commit id names."""
        commit_id = self.branches.get(revision) or self.tags.get(revision) or revision
        if commit_id not in self.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[commit_id]


def is_large(path: str, size: int, threshold: int) -> bool:
    """Whether a file goes to the store for large files: from `threshold` bytes on, or by its name."""
    return size >= threshold or path.endswith(LARGE_SUFFIXES)


def read_folder(folder: str | Path, threshold: int) -> dict[str, Blob]:
    """The files of a local folder by path."""
    files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
    contents = {name: path.read_bytes() for name, path in files.items()}
    return {name: Blob(data, is_large(name, len(data), threshold)) for name, data in contents.items()}


def _digest(value: Any) -> str:
    """40 hexadecimal digits that are the same for the same value."""
    return hashlib.sha1(json.dumps(value).encode()).hexdigest()
