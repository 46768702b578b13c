"""Adapters that are refused: broken folders, heads that do not score, other bases, loads that do not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import IA3Config, get_peft_model
from safetensors.torch import load_file, save_file

from bases import (
    assert_same_adapter,
    copied,
    full_base,
    lora_config,
    make_base,
    plain_model,
    policy_adapter,
    reward_adapter,
)
from builders import tiny_model
from ppo_lora import Adapter, AdapterSource, SharedBase, read_adapter

# Reading errors


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named_and_the_found_ones_listed(tmp_path, missing):
    shutil.copytree(policy_adapter(), tmp_path, dirs_exist_ok=True)
    (tmp_path / missing).unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=rf"No {missing} in {tmp_path} \(found: .*pytorch_model.bin.*`trl sft`"):
        read_adapter(tmp_path)
    with pytest.raises(ValueError, match=rf"No {missing}|No adapter_config.json in .*none \(found: nothing\)"):
        read_adapter(AdapterSource(str(tmp_path), subfolder="none"))


def test_an_adapter_that_is_not_lora_is_refused(tmp_path):
    get_peft_model(plain_model(), IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} is a IA3 adapter; only LoRA adapters can share the base"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("role", ["reward", "value"])
def test_an_adapter_without_a_head_is_refused_where_one_is_needed(role):
    text = f"{policy_adapter()} has no head weights .score or classifier., so it cannot score. Expected a SEQ_CLS"
    with pytest.raises(ValueError, match=text):
        make_base(**{role: policy_adapter()})


@pytest.mark.parametrize("role", ["reward", "value"])
def test_a_head_with_two_outputs_is_refused(role):
    adapter = reward_adapter(num_labels=2)
    with pytest.raises(ValueError, match=f"The head of {adapter} has 2 outputs; expected 1. Train the reward model"):
        make_base(**{role: adapter})


@pytest.mark.parametrize("role", ["reward", "value"])
def test_a_head_of_another_hidden_size_is_refused(role):
    good = read_adapter(reward_adapter())
    adapter = Adapter(good.config, good.tensors, {"weight": torch.zeros(1, 48)}, "the file")
    with pytest.raises(ValueError, match="The head of the file is for hidden size 48; the base's is 64"):
        make_base(**{role: adapter})


@pytest.mark.parametrize("name", ["policy", "reference"])
def test_a_head_on_a_text_role_is_left_out_with_a_warning(name):
    text = f"The {name} adapter {reward_adapter()} has a head, as reward and value adapters have; it is left out.*SFT"
    with pytest.warns(UserWarning, match=text) as seen:
        base = make_base(**{name: reward_adapter()})
    assert len(seen) == 1
    assert base.adapter(name).head is None
    assert_same_adapter(base.adapter(name), Adapter(lora_config(), read_adapter(reward_adapter()).tensors))


@pytest.mark.parametrize("role", ["policy", "reference", "value", "reward"])
@pytest.mark.parametrize(
    ("base", "text"),
    [
        (lambda: tiny_model("gpt2"), "GPT2LMHeadModel"),
        (lambda: tiny_model(hidden_size=32), "the base in memory: .*whose hidden size is 64; here it is 32"),
        (lambda: tiny_model(num_hidden_layers=1), "0 tensors are missing and 14 have no place"),
        (lambda: tiny_model(num_hidden_layers=3), r"14 tensors are missing \(the first: .*layers.2.* 0 have no place"),
        (lambda: tiny_model(intermediate_size=96), r"\[128, 4\] in the adapter and \[96, 4\] on the base"),
    ],
    ids=["another architecture", "hidden size", "fewer layers", "more layers", "another MLP"],
)
def test_an_adapter_of_another_base_is_refused(role, base, text):
    make = policy_adapter if role in ("policy", "reference") else reward_adapter
    adapter = make(target_modules=r".*\.(q|k|v|o|up|down|gate)_proj")
    with pytest.raises(
        ValueError, match=rf"(?s)The {role} adapter {adapter} does not fit .*{text}.*Load the base that"
    ):
        SharedBase(base(), **{role: adapter}, peft_config=lora_config("gpt2" if "GPT2" in text else "llama"))


@pytest.mark.parametrize("role", ["policy", "reference", "reward"])
@pytest.mark.parametrize("word", ["shared", "separate"])
def test_words_for_the_value_adapter_are_refused_for_other_roles(role, word):
    with pytest.raises(ValueError, match=word):
        make_base(**{role: word})


@pytest.mark.parametrize("source", ["", "@v1", ":value", "@v1:value"])
def test_an_empty_name_is_not_the_working_directory(source, tmp_path, monkeypatch):
    shutil.copytree(policy_adapter(), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"An adapter is named {source!r}; expected a folder or a Hub id"):
        read_adapter(source)


# Tensors that cannot be


def _changed(folder, source: str, change) -> str:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return str(folder)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["layers.1.self_attn.q_proj.lora_B.weight", "score.weight"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, part, number):
    folder = _changed(
        tmp_path, reward_adapter(), lambda old: {k: v * number if part in k else v for k, v in old.items()}
    )
    with pytest.raises(
        ValueError, match=f"The adapter {folder} has numbers that are not finite in .*{part}.*diverged"
    ):
        read_adapter(folder)


def test_tensors_that_are_not_floats_are_refused(tmp_path):
    folder = _changed(tmp_path, policy_adapter(), lambda old: {name: tensor.long() for name, tensor in old.items()})
    with pytest.raises(ValueError, match=f"The adapter {folder} has torch.int64 numbers in .*lora_A.*expected floats"):
        read_adapter(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_floats_of_any_size_are_read(tmp_path, dtype):
    folder = _changed(tmp_path, reward_adapter(), lambda old: {name: tensor.to(dtype) for name, tensor in old.items()})
    assert {tensor.dtype for tensor in read_adapter(folder).tensors.values()} == {dtype}


SECOND = {
    "adapter": lambda old: {f"{name[:-7]}.{a}.weight": tensor.clone() for a in "ab" for name, tensor in old.items()},
    "head": lambda old: {**old, "base_model.model.classifier.weight": old["base_model.model.score.weight"] + 1},
}


@pytest.mark.parametrize("second", SECOND)
def test_two_of_a_kind_in_one_file_are_refused(tmp_path, second):
    folder = _changed(tmp_path, reward_adapter(), SECOND[second])
    with pytest.raises(ValueError, match=f"The adapter {folder} has .* twice.*expected one adapter in a file"):
        read_adapter(folder)


@pytest.mark.parametrize("bias", [torch.zeros(2), torch.zeros(())])
def test_a_bias_of_another_shape_is_refused(tmp_path, bias):
    name = "base_model.model.score.bias"
    folder = _changed(tmp_path, reward_adapter(), lambda old: {**old, name: bias})
    with pytest.raises(ValueError, match=rf"The head of {folder} has a bias of shape .*expected \[1\]"):
        make_base(reward=folder)


# Configurations that cannot be

BROKEN_OPTIONS = {
    "r": ["4", None, [4], 4.0, 0, True],
    "lora_alpha": [None, "8", float("nan"), float("inf"), [1]],
    "rank_pattern": [[1], None, {"q_proj": "x"}, {"((": 2}],
    "alpha_pattern": ["abc", {"q_proj": None}],
    "target_modules": [5, "(("],
    "exclude_modules": [7],
    "lora_dropout": ["x"],
    "base_model_name_or_path": [5, ["x"]],
    "revision": [5, {"a": 1}],
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in BROKEN_OPTIONS.items() for value in values]
)
def test_options_of_another_type_are_named(tmp_path, option, value):
    shutil.copytree(policy_adapter(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), option: value}))
    with pytest.raises(ValueError, match=rf"The adapter_config.json of {tmp_path} is broken \(.*{option}") as error:
        read_adapter(tmp_path)
    assert repr(value) in str(error.value)


def test_the_class_that_an_adapter_names_is_not_handed_on(tmp_path):
    """PEFT's AutoPeftModel would import it from the library that the file names."""
    shutil.copytree(policy_adapter(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "adapter_config.json"
    named = {"base_model_class": "LlamaModel", "parent_library": "some.library"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_mapping": named, "task_type": None}))
    assert make_base(policy=tmp_path).adapter("policy").config.auto_mapping is None


def test_a_bottomless_configuration_is_named(tmp_path):
    shutil.copytree(policy_adapter(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"The adapter_config.json of {tmp_path} is broken .RecursionError"):
        read_adapter(tmp_path)


# Loading in place


def _refused_loads(base: SharedBase):
    good = copied(base.adapter("value"))
    first = next(iter(good.tensors))
    without = {key: tensor for key, tensor in good.tensors.items() if key != first}
    yield "no head weights", Adapter(good.config, good.tensors)
    yield "2 outputs", Adapter(good.config, good.tensors, {"weight": torch.zeros(2, 64)})
    yield "hidden size 32; the base's is 64", Adapter(good.config, good.tensors, {"weight": torch.zeros(1, 32)})
    yield "1 tensors are missing", Adapter(good.config, without, good.head)
    yield "1 have no place", Adapter(good.config, {**good.tensors, "lora_extra": torch.zeros(1)}, good.head)
    yield (
        "holds extra, which the base does not",
        Adapter(good.config, {**good.tensors, "extra": torch.zeros(1)}, good.head),
    )
    yield r"\[5, 5\] in the adapter", Adapter(good.config, {**good.tensors, first: torch.zeros(5, 5)}, good.head)


@pytest.mark.parametrize(("option", "value"), [("lora_alpha", 77), ("use_rslora", True), ("alpha_pattern", {"q": 3})])
def test_tensors_are_not_loaded_under_another_scaling(option, value):
    base = full_base()
    before = copied(base.adapter("policy"))
    other = read_adapter(policy_adapter(**{option: value} if option != "alpha_pattern" else {}))
    setattr(other.config, option, value)
    with pytest.raises(ValueError, match=f"The policy adapter .* has .*'{option}': {value}.*, the role's own adapter"):
        base.load_adapter("policy", other)
    assert_same_adapter(base.adapter("policy"), before)


def test_a_refused_load_changes_nothing():
    base = full_base()
    before = copied(base.adapter("value"))
    for text, adapter in _refused_loads(base):
        shifted = {key: tensor + 1 for key, tensor in adapter.tensors.items()}
        with pytest.raises(ValueError, match=text):
            base.load_adapter("value", Adapter(adapter.config, shifted, adapter.head, "the file"))
        assert_same_adapter(base.adapter("value"), before)


def test_a_head_with_a_bias_does_not_fit_one_without():
    base = full_base()
    good = copied(base.adapter("value"))
    with pytest.raises(ValueError, match="bias"):
        base.load_adapter("value", Adapter(good.config, good.tensors, {**good.head, "bias": torch.ones(1)}))
