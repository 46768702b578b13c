"""Making an adapter's tensor names and a base's meet, and saying why when they do not."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import Tensor

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_NAMED_AFTER_ADAPTER = re.compile(r"\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.(?!weight$|bias$)[^.]+")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+\.")


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop from the names what PEFT's files do not have: wrappers (DDP, torch.compile, FSDP) and the adapter's name.

    ``_orig_mod.base_model.model.q.lora_A.default.weight`` becomes ``base_model.model.q.lora_A.weight``.
    """
    return {_plain_name(name): tensor for name, tensor in tensors.items()}


def _plain_name(name: str) -> str:
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    name = _SAVED_MODULE.sub(".", _NAMED_AFTER_ADAPTER.sub(r".\1", name))
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def is_lora(name: str) -> bool:
    """Whether a tensor belongs to LoRA's own parts and not to a module that was saved whole."""
    return any(part.startswith("lora_") for part in name.split("."))


def new_prefix(given: Collection[str], expected: Collection[str]) -> tuple[str, str] | None:
    """The prefix that makes one set of names the other when it is exchanged, as ``(old, new)``.

    An adapter that was trained on a bare backbone has ``base_model.model.layers...`` where a causal language model
    has ``base_model.model.model.layers...``. What is exchanged ends before the list of layers, so that a layer never
    becomes another one.

    Returns:
        None if no exchange makes the two sets equal.
    """
    if not given or len(given) != len(expected):
        return None
    first, wanted = min(given), set(expected)
    parts = first.split(".")
    for start in range(_first_that_stays(parts) + 1):
        suffix = ".".join(parts[start:])
        old = first.removesuffix(suffix)
        for new in sorted(name.removesuffix(suffix) for name in wanted if name.endswith(suffix)):
            if all(name.startswith(old) for name in given) and {new + name[len(old) :] for name in given} == wanted:
                return old, new
    return None


def _first_that_stays(parts: list[str]) -> int:
    """Index of the list of layers (``layers`` in ``layers.0``), or of the module where there is no such list."""
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    own = next((i for i, part in enumerate(parts) if part.startswith("lora_")), len(parts))
    return max((own if numbered is None else numbered) - 1, 0)


def fitted(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, base: str) -> dict[str, Tensor]:
    """The tensors under the base's names.

    Args:
        tensors: of the adapter, LoRA's own parts.
        expected: what the role has on the base.
        what: names the adapter in messages.
        base: names the base in messages.

    Raises:
        ValueError: names or shapes differ; the message shows the first difference.
    """
    exchange = None if tensors.keys() == expected.keys() else new_prefix(tensors.keys(), expected.keys())
    if exchange is not None:
        old, new = exchange
        tensors = {new + name[len(old) :]: tensor for name, tensor in tensors.items()}
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        raise ValueError(
            f"The {what} does not fit {base}: {len(missing)} tensors are missing"
            f"{f' (the first: {missing[0]})' if missing else ''} and {len(extra)} have no place"
            f"{f' (the first: {extra[0]})' if extra else ''}. Load the base that the adapter was trained on."
        )
    for name, tensor in expected.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(
                f"The {what} does not fit {base}: {name} is {list(tensors[name].shape)} in the adapter and "
                f"{list(tensor.shape)} on the base. Load the base that the adapter was trained on (hidden and "
                "vocabulary sizes must agree)."
            )
    return dict(tensors)


def check_saved_modules(
    tensors: Mapping[str, Tensor], base_tensors: Mapping[str, Tensor], what: str, base: str
) -> None:
    """Modules that an adapter's file holds whole: fine where they are the base's own, refused where they differ.

    PEFT saves embeddings and ``modules_to_save`` beside the LoRA tensors. Four roles share the base's.

    Args:
        tensors: of the adapter, without LoRA's own parts.
        base_tensors: the base's parameters by name.
        what: names the adapter in messages.
        base: names the base in messages.

    Raises:
        ValueError: a tensor has no place on the base, another size, or other values.
    """
    for name, given in tensors.items():
        own = _counterpart(name, base_tensors)
        if own is None:
            raise ValueError(
                f"The {what} does not fit {base}: its file holds {name}, which the base does not have, so what it was "
                "trained for cannot be computed here. Load the base that the adapter was trained on."
            )
        if own.shape != given.shape:
            vocabulary = " (vocabulary and hidden size)" if given.dim() == 2 and "embed" in name else ""
            raise ValueError(
                f"The {what} does not fit {base}: {name} is {list(given.shape)} in the adapter and {list(own.shape)} "
                f"on the base{vocabulary}. Load the base that the adapter was trained on, resized as it was."
            )
        if not bool((given.to(own.device, own.dtype) == own).all()):
            raise ValueError(
                f"The {what} comes with trained weights of its own for {name} (modules_to_save, or embeddings that "
                "were trained), and four roles share the base's. Merge the adapter into the base "
                "(scripts/merge.py) and train the other adapters on that, or train it without them."
            )


def _counterpart(name: str, base_tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The base's tensor whose name ends as the adapter's does: prefixes and PEFT's wrappers are not looked at."""
    parts = [part for part in name.split(".") if part != "base_layer"]
    plain = {key.replace(".base_layer.", "."): key for key in base_tensors}
    for start in range(len(parts) - 1):
        if (key := plain.get(".".join(parts[start:]))) is not None:
            return base_tensors[key]
    endings = [key for name, key in plain.items() if name.endswith("." + ".".join(parts[-2:]))]
    return base_tensors[endings[0]] if len(endings) == 1 else None
