"""The manifest beside a saved adapter: what it says, and what happens when it does not agree with what is there."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from bases import lora_config, make_base, model_folder, policy_adapter, reward_adapter
from builders import nf4_config, randomize
from ppo_lora import Adapter, Role, SharedBase, read_adapter
from ppo_lora.checkpoint import load_roles, save_roles
from ppo_lora.identity import BaseIdentity, check_belongs, quantization_name
from ppo_lora.manifest import Manifest, Origin

SCHEDULE = {"steps_per_iteration": 4, "batch_size": 16}


@pytest.fixture
def saved(tmp_path):
    base = make_base(policy=policy_adapter(), reward=reward_adapter())
    for seed, parameters in enumerate(base.trainable_parameters().values()):
        randomize(parameters, seed)
    save_roles(tmp_path / "run", base, SCHEDULE, {"weights": {"reward_adapter": 1.0}, "normalisation": "none"})
    return tmp_path / "run"


def _entries(folder: Path) -> dict:
    return json.loads((folder / "ppo_lora.json").read_text())


def _write(folder: Path, **changes) -> None:
    (folder / "ppo_lora.json").write_text(json.dumps({**_entries(folder), **changes}))


# What it says


def test_each_saved_folder_says_what_it_holds_and_stands_on(saved):
    for folder, role in ((saved, "policy"), (saved / "value", "value")):
        entries = _entries(folder)
        assert entries["role"] == role and entries["schedule"] == SCHEDULE
        assert entries["base"] == {
            "name": model_folder("llama"),
            "revision": None,
            "commit": None,
            "quantization": "none",
            "vocab_size": 50,
            "hidden_size": 64,
        }
        policy, reward = read_adapter(policy_adapter()).origin(), read_adapter(reward_adapter()).origin()
        origins = {name: origin and Origin(**origin) for name, origin in entries["roles"].items()}
        assert origins == {"policy": policy, "reference": policy, "value": reward, "reward": reward}
        assert policy.source == policy_adapter() and reward.source == reward_adapter()
        assert entries["reward"] == {"weights": {"reward_adapter": 1.0}, "normalisation": "none"}
        assert entries["versions"]["ppo_lora"] and entries["sha256"] == read_adapter(folder).sha256()


def test_a_written_manifest_is_read_as_it_was(saved):
    manifest = Manifest.read(saved / "ppo_lora.json", "run")
    assert manifest.write(saved / "value") is None
    assert Manifest.read(saved / "value" / "ppo_lora.json", "run") == manifest


def test_the_value_can_be_left_out(tmp_path):
    save_roles(tmp_path, make_base(), SCHEDULE, value=False)
    assert not (tmp_path / "value").exists() and _entries(tmp_path)["role"] == "policy"


# The content hash


def test_a_value_role_that_is_left_out_is_not_left_over(saved):
    (saved / "value" / "notes.txt").touch()
    save_roles(saved, make_base(), SCHEDULE, value=False)
    assert [path.name for path in (saved / "value").iterdir()] == ["notes.txt"]
    save_roles(saved, make_base(), SCHEDULE)
    (saved / "value" / "notes.txt").unlink()
    save_roles(saved, make_base(), SCHEDULE, value=False)
    assert not (saved / "value").exists()


def test_the_hash_is_of_contents_and_not_of_files(tmp_path):
    adapter = read_adapter(reward_adapter())
    turned = dict(reversed(adapter.tensors.items()))
    assert Adapter(adapter.config, turned, adapter.head, "elsewhere").sha256() == adapter.sha256()
    shutil.copytree(reward_adapter(), tmp_path / "copy")
    assert read_adapter(tmp_path / "copy").sha256() == adapter.sha256()


def _changed(adapter: Adapter):
    first, tensor = next(iter(adapter.tensors.items()))
    rest = {key: t for key, t in adapter.tensors.items() if key != first}
    shifted = tensor.clone()
    shifted.view(-1)[0] += 1e-6
    yield "a value", Adapter(adapter.config, {**rest, first: shifted}, adapter.head)
    yield "a name", Adapter(adapter.config, {**rest, first + "x": tensor}, adapter.head)
    yield "a dtype", Adapter(adapter.config, {**rest, first: tensor.double()}, adapter.head)
    yield "a shape", Adapter(adapter.config, {**rest, first: tensor.reshape(-1)}, adapter.head)
    yield "no head", Adapter(adapter.config, adapter.tensors)
    yield "another head", Adapter(adapter.config, adapter.tensors, {"weight": adapter.head["weight"] + 1})
    for option, value in (("lora_alpha", 9), ("use_rslora", True), ("rank_pattern", {"q": 1}), ("use_dora", True)):
        config = read_adapter(reward_adapter()).config
        setattr(config, option, value)
        yield option, Adapter(config, adapter.tensors, adapter.head)


def test_every_change_of_what_is_computed_changes_the_hash():
    adapter = read_adapter(reward_adapter())
    hashes = {name: other.sha256() for name, other in _changed(adapter)}
    assert len({*hashes.values(), adapter.sha256()}) == len(hashes) + 1


def test_a_changed_adapter_is_refused(saved):
    policy = (saved / "adapter_model.safetensors").read_bytes()
    shutil.copy(saved / "value" / "adapter_config.json", saved / "adapter_config.json")
    shutil.copy(saved / "value" / "adapter_model.safetensors", saved / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"adapter {saved} is not what ppo_lora.json beside it says"):
        read_adapter(saved)
    (saved / "ppo_lora.json").unlink()
    assert read_adapter(saved).head is not None and policy


# Broken, newer and hostile ones


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"format": 2}', '{"format": 2, "role": "policy", "sha256": "x", "base": 3}']
)
def test_a_broken_manifest_is_named(saved, text):
    (saved / "ppo_lora.json").write_text(text)
    with pytest.raises(ValueError, match=f"The manifest ppo_lora.json of {saved} is broken"):
        read_adapter(saved)


HOSTILE = {
    "versions": "abc",
    "schedule": ["abc"],
    "reward": "abc",
    "roles": {"policy": {"source": 5}},
    "role": 5,
    "sha256": None,
}
HOSTILE_BASE = {
    "name": 5,
    "commit": 5,
    "revision": {"a": 1},
    "quantization": {},
    "vocab_size": "50",
    "hidden_size": [64],
}


@pytest.mark.parametrize(
    "changes",
    [{name: value} for name, value in HOSTILE.items()]
    + [{"base": {name: value}} for name, value in (HOSTILE_BASE | {"name": "a\0b"}).items()]
    + [{"base": {"vocab_size": value}} for value in (float("nan"), True, 50.0)],
    ids=str,
)
def test_entries_of_another_type_are_broken(saved, changes):
    base = {"base": {**_entries(saved)["base"], **changes["base"]}} if "base" in changes else {}
    _write(saved, **{**changes, **base})
    with pytest.raises(ValueError, match=f"The manifest ppo_lora.json of {saved} is broken"):
        read_adapter(saved)


def test_a_bottomless_manifest_is_broken(saved):
    (saved / "ppo_lora.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"The manifest ppo_lora.json of {saved} is broken"):
        read_adapter(saved)


def test_a_manifest_of_another_format_is_refused(saved):
    _write(saved, format=99)
    with pytest.raises(ValueError, match="has format 99; this ppo_lora reads format 2"):
        read_adapter(saved)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "value/../../x"])
def test_names_in_a_manifest_lead_nowhere(saved, name, tmp_path):
    """Nothing outside of the folder is read or written for what a downloaded manifest says."""
    outside = {path for path in tmp_path.rglob("*") if saved not in path.parents}
    _write(saved, role=name, roles={name: {"source": name}, "policy": {"source": name}}, versions={name: name})
    _write(saved, base={"name": name, "quantization": "none"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        base = make_base(policy=saved)
    save_roles(tmp_path / "again", base, SCHEDULE)
    added = {path for path in tmp_path.rglob("*") if saved not in path.parents} - outside
    assert all((tmp_path / "again") in (path, *path.parents) for path in added)


# Checked on loading


def test_quantization_is_compared(saved):
    quantized = dict(quantization_config=nf4_config(), peft_config=lora_config())
    with pytest.warns(UserWarning, match="trained on a base with quantization none, this one has nf4"):
        SharedBase.from_pretrained(model_folder("llama"), policy=saved, **quantized)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_base(policy=saved, value=saved / "value")


@pytest.mark.parametrize("role", [Role.REWARD, Role.REFERENCE])
def test_a_run_does_not_resume_with_other_roles(saved, role):
    changed = {"reward": reward_adapter(seed=8)} if role is Role.REWARD else {"reference": policy_adapter(seed=8)}
    roles = {"policy": policy_adapter(), "reward": reward_adapter(), "value": reward_adapter(), **changed}
    base = make_base(**roles)
    before = [parameter.detach().clone() for parameter in base.parameters()]
    text = f"was made with the {role.value} adapter .*, this run has {roles[role.value]}, whose contents differ"
    with pytest.raises(ValueError, match=text):
        load_roles(saved, base, SCHEDULE)
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), before, strict=True))


@pytest.mark.parametrize("folder", ["", "value"])
def test_a_value_role_of_another_run_is_refused(saved, folder):
    base = make_base(policy=policy_adapter(), reward=reward_adapter())
    load_roles(saved, base, SCHEDULE)
    _write(saved / folder, schedule={**SCHEDULE, "batch_size": 17})
    with pytest.raises(ValueError, match="was made with .*17.*, this run has .*16"):
        load_roles(saved, base, SCHEDULE)


def test_a_run_without_its_reward_adapter_is_told(saved):
    base = make_base(policy=policy_adapter())
    with pytest.raises(ValueError, match="reward adapter .*, this run has none, whose"):
        load_roles(saved, base, SCHEDULE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "nf4"}, "a base with quantization none, this one has nf4"),
        ({"model": "other"}, "the base .*, this is "),
    ],
)
def test_a_run_resumed_on_another_base_is_warned_of_once(saved, options, text, monkeypatch):
    if options.pop("model", None):
        other = model_folder(seed=9)
        monkeypatch.setattr("bases.model_folder", lambda *args: other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        base = make_base(policy=policy_adapter(), reward=reward_adapter(), **options)
    with pytest.warns(UserWarning, match=f"The checkpoint {saved} was trained on {text}") as seen:
        load_roles(saved, base, SCHEDULE)
    assert len(seen) == 1


@pytest.mark.parametrize(("then", "now"), [("shared", "separate"), ("separate", "shared")])
def test_a_run_does_not_resume_with_another_kind_of_value_role(tmp_path, then, now):
    save_roles(tmp_path, make_base(value=then), SCHEDULE)
    base = make_base(value=now)
    randomize(base.trainable_parameters()[Role.POLICY], 3)
    before = [parameter.detach().clone() for parameter in base.parameters()]
    with pytest.raises(ValueError, match=rf"made with value_adapter={then}, this run has {now}; a run resumes with"):
        load_roles(tmp_path, base, SCHEDULE)
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), before, strict=True))


# Which base


def test_quantization_names():
    assert quantization_name(None) == "none"
    assert quantization_name(nf4_config()) == "nf4" and quantization_name(nf4_config(True)) == "nf4-double"
    assert quantization_name({"load_in_8bit": True}) == "int8"
    assert quantization_name({"quant_method": "gptq", "bits": 4}) == "gptq"


LOADED = BaseIdentity("org/base", "v2", "c" * 40, "nf4", 50, 64)


@pytest.mark.parametrize(
    ("trained_on", "text"),
    [
        (BaseIdentity("org/base", "v1"), "revision v1 of org/base, this is c{40}"),
        (BaseIdentity("org/base", None, "d" * 40), "revision d{40} of org/base, this is c{40}"),
        (BaseIdentity("org/base", "v2", "d" * 40), "revision d{40} of org/base, this is c{40}"),
        (BaseIdentity("org/base", "d" * 40), "revision d{40} of org/base, this is c{40}"),
        (BaseIdentity("org/base", "v1", "c" * 40), None),
        (BaseIdentity("org/base", "v2"), None),
        (BaseIdentity("org/base", "c" * 40), None),
        (BaseIdentity("org/base"), None),
        (BaseIdentity(), None),
        (BaseIdentity("org/base", quantization="int8"), "quantization int8, this one has nf4"),
        (BaseIdentity("org/other", vocab_size=50), "the base org/other, this is org/base"),
    ],
)
def test_what_differs_is_warned_of(trained_on, text):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check_belongs(trained_on, LOADED, "reward adapter x")
    assert len(seen) == (text is not None)
    if text is not None:
        with pytest.warns(UserWarning, match=f"The reward adapter x was trained on .*{text}"):
            check_belongs(trained_on, LOADED, "reward adapter x")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit"},
        {"model_type": "llama", "vocab_size": "x"},
        {"model_type": "llama", "quantization_config": 5},
        {"model_type": "no such"},
        5,
    ],
    ids=str,
)
def test_a_base_whose_configuration_says_nothing_is_known_by_name(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert BaseIdentity.named(str(tmp_path), "main") == BaseIdentity(str(tmp_path), "main")


@pytest.mark.parametrize(("size", "word"), [("vocab_size", "vocabulary"), ("hidden_size", "hidden size")])
def test_sizes_that_differ_are_refused(size, word):
    other = BaseIdentity(**{"name": "org/base", "vocab_size": 50, "hidden_size": 64, size: 7})
    with pytest.raises(ValueError, match=f"org/base, whose {word} is 7; here it is {getattr(LOADED, size)}"):
        check_belongs(other, LOADED, "reward adapter x")
