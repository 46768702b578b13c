"""Which base this is, and whether an adapter was trained on it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedModel

from .hub import snapshot_commit

_SIZES = (("vocab_size", "vocabulary"), ("hidden_size", "hidden size"))


@dataclass(frozen=True)
class BaseIdentity:
    """What tells one base from another; None where it is not known.

    Attributes:
        name: Hub id or folder.
        revision: branch, tag or commit that was asked for.
        commit: the commit that this was.
        quantization: "none", "nf4", "nf4-double", "int8", or another method's name.
        vocab_size: rows of the embedding.
        hidden_size: numbers in a hidden state.
    """

    name: str | None = None
    revision: str | None = None
    commit: str | None = None
    quantization: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, revision: str | None = None) -> BaseIdentity:
        """The identity of a loaded model.

        Args:
            model: the base.
            revision: that it was loaded with.
        """
        name = model.config.name_or_path or None
        published = name is not None and not Path(name).exists()
        return cls._described(
            model.config, name, revision, _cached_commit(name, revision) if published and name else None
        )

    @classmethod
    def named(cls, name: str, revision: str | None = None) -> BaseIdentity:
        """What can be told of a base by its name, from its configuration alone; nothing more if that cannot be had."""
        try:
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
            return cls._described(config, name, revision, None)
        except Exception:  # whatever an adapter's file names, in whatever way it is broken: it is only compared with
            return cls(name, revision)

    @classmethod
    def of_manifest(cls, entry: Mapping[str, Any]) -> BaseIdentity:
        """Read back what :meth:`entry` wrote; what is missing stays unknown.

        Raises:
            TypeError: a name is no text, or a size no integer.
        """
        read = {field.name: entry.get(field.name) for field in fields(cls)}
        sizes = [size for size, _ in _SIZES]
        for name, value in read.items():
            # A bool is an int in Python, and no path has a zero byte.
            fine = type(value) is int if name in sizes else isinstance(value, str) and "\0" not in value
            if value is not None and not fine:
                raise TypeError(f"base.{name} is {value!r}; expected {'an integer' if name in sizes else 'a text'}")
        return cls(**read)

    def entry(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    @classmethod
    def _described(cls, config: Any, name: str | None, revision: str | None, commit: str | None) -> BaseIdentity:
        text = config.get_text_config()
        quantization = quantization_name(getattr(config, "quantization_config", None))
        return cls(name, revision, commit, quantization, int(text.vocab_size), int(text.hidden_size))


def quantization_name(config: Any) -> str:
    """A short name of a quantization configuration, given as an object or a dict; "none" for None."""
    if config is None:
        return "none"
    options = config if isinstance(config, Mapping) else config.to_dict()
    if options.get("load_in_4bit"):
        double = "-double" if options.get("bnb_4bit_use_double_quant") else ""
        return f"{options.get('bnb_4bit_quant_type', '4bit')}{double}"
    return "int8" if options.get("load_in_8bit") else str(options.get("quant_method", "quantized"))


def check_belongs(trained_on: BaseIdentity, base: BaseIdentity, what: str) -> None:
    """Compare the base that an adapter was trained on with the one it is put on.

    Args:
        trained_on: what the adapter says of its base.
        base: the base that is loaded.
        what: names the adapter in messages.

    Warns:
        UserWarning: another name, revision or quantization. The scores or texts may not be what they were.

    Raises:
        ValueError: another vocabulary or hidden size.
    """
    if trained_on.name and trained_on.vocab_size is None and not _same_place(trained_on.name, base.name):
        known = BaseIdentity.named(trained_on.name, trained_on.revision)
        trained_on = BaseIdentity(**{**asdict(known), "quantization": trained_on.quantization or known.quantization})
    for size, word in _SIZES:
        theirs, ours = getattr(trained_on, size), getattr(base, size)
        if None not in (theirs, ours) and theirs != ours:
            raise ValueError(
                f"The {what} does not fit the base {base.name or 'in memory'}: it was trained on {trained_on.name}, "
                f"whose {word} is {theirs}; here it is {ours}. Load the base that the adapter was trained on."
            )
    for difference in _differences(trained_on, base):
        warnings.warn(
            f"The {what} was trained on {difference}. What it computes may differ from what it was trained to; load "
            "the base that it was trained on, or make sure that the two are alike.",
            UserWarning,
            stacklevel=2,
        )


def _differences(trained_on: BaseIdentity, base: BaseIdentity) -> list[str]:
    found = []
    same = _same_place(trained_on.name, base.name)
    if trained_on.name and base.name and not same:
        found.append(f"the base {trained_on.name}, this is {base.name}")
    published = same and base.name is not None and not Path(base.name).exists()
    if published and _other_revision(trained_on, base):
        theirs, ours = (one.commit or one.revision for one in (trained_on, base))
        found.append(f"revision {theirs} of {base.name}, this is {ours or 'main'}")
    if None not in (trained_on.quantization, base.quantization) and trained_on.quantization != base.quantization:
        found.append(f"a base with quantization {trained_on.quantization}, this one has {base.quantization}")
    return found


def _other_revision(one: BaseIdentity, other: BaseIdentity) -> bool:
    """Commits are compared where both are known, else names; nothing said is no difference."""
    commits = [each.commit or (each.revision if _is_commit(each.revision) else None) for each in (one, other)]
    if None not in commits:
        return commits[0] != commits[1]
    return one.revision is not None and one.revision not in (other.revision or "main", other.commit)


def _is_commit(revision: str | None) -> bool:
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def _same_place(one: str | None, other: str | None) -> bool:
    return one == other or (None not in (one, other) and Path(str(one)).resolve() == Path(str(other)).resolve())


def _cached_commit(name: str, revision: str | None) -> str | None:
    found = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    return snapshot_commit(Path(found)) if isinstance(found, str) else None
