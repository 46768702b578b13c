"""Tensor names of adapters and of bases: what counts as the same, and what is said when it is not."""

from __future__ import annotations

import pytest
import torch

from ppo_lora.fitting import check_saved_modules, fitted, is_lora, new_prefix, plain_names

ZERO = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_A.weight"),
        ("_orig_mod.base_model.model.q.lora_A.default.weight", "base_model.model.q.lora_A.weight"),
        ("module.base_model.model.q.lora_B.my-name.bias", "base_model.model.q.lora_B.bias"),
        ("base_model.model.e.lora_embedding_A.default", "base_model.model.e.lora_embedding_A"),
        ("base_model.model.e.lora_embedding_A", "base_model.model.e.lora_embedding_A"),
        ("base_model.model.q.lora_magnitude_vector.default.weight", "base_model.model.q.lora_magnitude_vector"),
        ("base_model.model.q.lora_magnitude_vector", "base_model.model.q.lora_magnitude_vector"),
        ("base_model.model.score.modules_to_save.default.weight", "base_model.model.score.weight"),
        ("base_model.model._fsdp_wrapped_module.l.lora_A.weight", "base_model.model.l.lora_A.weight"),
        ("a.modulex.lora_A.weight", "a.modulex.lora_A.weight"),
    ],
)
def test_names_as_in_pefts_files(name, plain):
    assert list(plain_names({name: ZERO})) == [plain]


@pytest.mark.parametrize(
    ("name", "lora"),
    [("a.lora_A.weight", True), ("a.lora_magnitude_vector", True), ("a.embed.weight", False), ("explora_.b", False)],
)
def test_loras_own_parts(name, lora):
    assert is_lora(name) is lora


EXPECTED = {"m.model.layers.0.q.lora_A", "m.model.layers.0.q.lora_B", "m.model.layers.1.q.lora_A"}


def _given(old: str) -> set[str]:
    return {name.replace("m.model.", old) for name in EXPECTED}


@pytest.mark.parametrize(
    ("given", "exchange"),
    [
        (_given("m."), ("m.", "m.model.")),
        (_given(""), ("", "m.model.")),
        (_given("x.y.z."), ("x.y.z.", "m.model.")),
        (_given("m.model."), ("", "")),
        ({name.replace("layers.0", "layers.2") for name in EXPECTED}, None),
        ({name.replace(".q.", ".k.") for name in EXPECTED}, None),
        (EXPECTED | {"m.model.layers.1.q.lora_B"}, None),
        (_given("m.") - {"m.layers.1.q.lora_A"} | {"m.model.layers.1.q.lora_A"}, None),
        (set(), None),
    ],
)
def test_one_prefix_exchanged_or_none(given, exchange):
    found = new_prefix(given, EXPECTED)
    if exchange is None:
        assert found is None
    else:
        old, new = found
        assert {new + name[len(old) :] for name in given} == EXPECTED


def test_layers_are_never_shifted():
    """Layers 1 and 2 of an adapter are not layers 0 and 1 of a base, though a digit could be called a prefix."""
    expected = {f"l.{i}.q.lora_A" for i in (0, 1)}
    assert new_prefix({f"l.{i}.q.lora_A" for i in (1, 2)}, expected) is None
    assert new_prefix({"l.1.q.lora_A"}, {"l.0.q.lora_A"}) is None


def test_a_single_layer_keeps_its_number():
    assert new_prefix({"x.layers.1.q.lora_A", "x.layers.1.q.lora_B"}, {"y.layers.1.q.lora_A", "y.layers.1.q.lora_B"})
    with pytest.raises(ValueError, match="1 tensors are missing"):
        fitted({"m.layers.1.q.lora_A": ZERO}, {"m.layers.0.q.lora_A": ZERO}, "adapter", "Base")


def test_fitted_exchanges_and_checks():
    given = {"layers.0.lora_A": torch.ones(2, 3), "layers.1.lora_A": 2 * torch.ones(2, 3)}
    expected = {"m.layers.0.lora_A": ZERO, "m.layers.1.lora_A": ZERO}
    assert fitted(given, expected, "adapter", "Base")["m.layers.1.lora_A"] is given["layers.1.lora_A"]
    with pytest.raises(ValueError, match=r"^The adapter does not fit Base: m.layers.0.lora_A is \[2, 3\] .* \[3, 2\]"):
        fitted(given, {name: ZERO.T for name in expected}, "adapter", "Base")


BASE = {"model.embed.weight": torch.arange(6.0).reshape(2, 3), "model.q.base_layer.weight": torch.ones(2, 2)}


@pytest.mark.parametrize(
    "name",
    ["base_model.model.model.embed.weight", "embed.weight", "base_model.model.other.embed.weight"],
)
def test_a_whole_module_is_compared_with_the_bases_own(name):
    own = BASE["model.embed.weight"]
    check_saved_modules({name: own.clone()}, BASE, "adapter", "Base")
    check_saved_modules({name: own.double()}, BASE, "adapter", "Base")
    with pytest.raises(ValueError, match="comes with trained weights of its own for .*embed.weight"):
        check_saved_modules({name: own + 1e-3}, BASE, "adapter", "Base")
    with pytest.raises(ValueError, match=r"\[3, 3\] in the adapter and \[2, 3\] on the base .vocabulary"):
        check_saved_modules({name: torch.zeros(3, 3)}, BASE, "adapter", "Base")


def test_a_wrapped_module_is_found():
    check_saved_modules({"base_model.model.model.q.base_layer.weight": torch.ones(2, 2)}, BASE, "adapter", "Base")
    check_saved_modules({"base_model.model.model.q.weight": torch.ones(2, 2)}, BASE, "adapter", "Base")
    with pytest.raises(ValueError, match="which the base does not have"):
        check_saved_modules({"base_model.model.model.k.weight": torch.ones(2, 2)}, BASE, "adapter", "Base")
