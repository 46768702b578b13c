"""Adapters and heads: read from folders that PEFT wrote, written so that plain PEFT reads them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from bases import (
    KINDS,
    assert_close,
    assert_same_adapter,
    copied,
    full_base,
    lora_config,
    make_base,
    plain_model,
    policy_adapter,
    reward_adapter,
)
from builders import ARCHITECTURES, padded_batch, randomize
from ppo_lora import Adapter, AdapterSource, Role, ScalarHead, read_adapter
from ppo_lora.adapters import write_adapter

P, T = 5, 6


def _unpadded(rows: int = 4):
    ids = torch.randint(3, 50, (rows, P + T), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids)


def _right_padded(rows: int = 4):
    ids, mask = _unpadded(rows)
    mask = mask * (torch.arange(P + T) < torch.tensor([[11], [3], [7], [1]]))
    return ids * mask, mask


# Reward adapters from plain PEFT (invariant 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_plain_peft_on_a_sequence_classifier(architecture, kind):
    plain = PeftModel.from_pretrained(
        plain_model(architecture, kind, AutoModelForSequenceClassification), reward_adapter(architecture)
    ).eval()
    base = make_base(architecture, kind, policy=policy_adapter(architecture), reward=reward_adapter(architecture))
    for ids, mask in (_unpadded(), _right_padded()):
        with torch.no_grad():
            expected = plain(input_ids=ids, attention_mask=mask).logits[:, 0]
        assert expected.std() > 0.01
        assert_close(base.scores(ids, mask), expected)
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.3)
    randomize(base.trainable_parameters()[Role.VALUE], scale=0.3)
    assert_close(base.scores(ids, mask), expected)


@pytest.mark.parametrize("kind", ["int8", "nf4-double"])
def test_scores_are_those_of_plain_peft_on_other_quantizations(kind):
    plain = PeftModel.from_pretrained(
        plain_model(kind=kind, auto=AutoModelForSequenceClassification), reward_adapter()
    )
    ids, mask = _unpadded()
    with torch.no_grad():
        expected = plain.eval()(input_ids=ids, attention_mask=mask).logits[:, 0]
    assert_close(make_base(kind=kind, reward=reward_adapter()).scores(ids, mask), expected, 1e-4)


# Written for plain PEFT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["value", "reward"])
def test_a_written_head_and_adapter_score_in_plain_peft(tmp_path, role, kind):
    base = full_base(kind=kind)
    write_adapter(tmp_path, base.adapter(role))
    plain = PeftModel.from_pretrained(plain_model(kind=kind, auto=AutoModelForSequenceClassification), tmp_path).eval()
    assert plain.peft_config["default"].task_type == "SEQ_CLS"
    ids, mask = _unpadded()
    for t in range(T):
        seen = P + t
        with torch.no_grad():
            expected = plain(input_ids=ids[:, :seen], attention_mask=mask[:, :seen]).logits[:, 0]
        given = base.values(ids, mask, T)[:, t] if role == "value" else base.scores(ids[:, :seen], mask[:, :seen])
        assert_close(given.detach(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_written_policy_is_the_policy_in_plain_peft(tmp_path, architecture, kind):
    base = full_base(architecture, kind)
    write_adapter(tmp_path, base.adapter("policy"))
    plain = PeftModel.from_pretrained(plain_model(architecture, kind), tmp_path).eval()
    ids, mask = _unpadded()
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(ids).logits[:, P - 1 : -1], dim=-1)
    expected = logprobs.gather(-1, ids[:, P:, None]).squeeze(-1)
    assert_close(base.logprobs("policy", ids, mask, T).detach(), expected)


@pytest.mark.parametrize("policy", [None, policy_adapter])
def test_a_written_adapter_names_its_base_for_autopeft(tmp_path, policy):
    base = make_base(policy=policy and policy(), reward=reward_adapter())
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.1)
    for role in ("policy", "value"):
        write_adapter(tmp_path / role, base.adapter(role))
    ids, mask = _unpadded()
    model = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "policy")).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[:, P - 1 : -1], dim=-1)
    expected = logprobs.gather(-1, ids[:, P:, None]).squeeze(-1)
    assert_close(base.logprobs("policy", ids, mask, T).detach(), expected)
    scorer = AutoPeftModelForSequenceClassification.from_pretrained(str(tmp_path / "value"), num_labels=1).eval()
    with torch.no_grad():
        assert_close(base.values(ids, mask, 1)[:, 0].detach(), scorer(ids[:, :-1]).logits[:, 0])


def test_the_names_in_a_written_file_are_pefts(tmp_path):
    base = full_base()
    write_adapter(tmp_path, base.adapter("value"))
    theirs = load_file(f"{reward_adapter()}/adapter_model.safetensors")
    ours = load_file(tmp_path / "adapter_model.safetensors")
    assert {key: t.shape for key, t in ours.items()} == {key: t.shape for key, t in theirs.items()}
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"], written["inference_mode"]) == (
        "SEQ_CLS",
        ["score"],
        True,
    )
    write_adapter(tmp_path / "policy", base.adapter("policy"))
    written = json.loads((tmp_path / "policy" / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"], written["inference_mode"]) == ("CAUSAL_LM", None, True)


# Round trips


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["policy", "reference", "value", "reward"])
def test_write_and_read_is_bit_for_bit(tmp_path, role, kind):
    base = full_base(kind=kind)
    before = base.adapter(role)
    write_adapter(tmp_path / "deep" / "er", before)
    after = read_adapter(tmp_path / "deep" / "er")
    assert_same_adapter(after, before)
    assert after.source == str(tmp_path / "deep" / "er")
    again = make_base(kind=kind, **{role: tmp_path / "deep" / "er"})
    assert_same_adapter(again.adapter(role), before)


@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}], ids=str
)
def test_lora_variants_round_trip(tmp_path, changes):
    ids, mask = padded_batch()
    base = make_base(peft_config=lora_config(**changes))
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.1)
    write_adapter(tmp_path, base.adapter("policy"))
    again = make_base(policy=tmp_path)
    expected = base.logprobs("policy", ids, mask, T)
    assert torch.equal(again.logprobs("policy", ids, mask, T), expected)
    assert torch.equal(again.logprobs("reference", ids, mask, T), expected)


def test_a_bfloat16_base_keeps_float32_adapters_through_a_round_trip(tmp_path):
    base = make_base(dtype=torch.bfloat16)
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.1)
    write_adapter(tmp_path, base.adapter("policy"))
    assert_same_adapter(make_base(dtype=torch.bfloat16, policy=tmp_path).adapter("policy"), base.adapter("policy"))
    assert {tensor.dtype for tensor in read_adapter(tmp_path).tensors.values()} == {torch.float32}


def test_writing_changes_neither_adapter_nor_base(tmp_path):
    base = full_base()
    adapter = base.adapter("value")
    before = adapter.config.to_dict(), list(adapter.tensors)
    write_adapter(tmp_path, adapter)
    assert (adapter.config.to_dict(), list(adapter.tensors)) == before
    assert all(p.requires_grad for p in base.trainable_parameters()[Role.VALUE])


def test_an_adapter_is_its_roles_own_tensors():
    base = full_base()
    pointers = {tensor.data_ptr() for tensor in base.adapter("policy").tensors.values()}
    assert pointers == {p.data_ptr() for p in base.trainable_parameters()[Role.POLICY]}
    assert base.adapter("value").head["weight"].data_ptr() == base.value_head.weight.data_ptr()
    assert base.adapter("policy").head is None and base.adapter("reference").head is None


def test_a_shared_values_adapter_is_the_policys_and_its_head():
    base = make_base(policy=policy_adapter(), value="shared", reward=reward_adapter())
    value = base.adapter("value")
    assert_same_adapter(Adapter(value.config, value.tensors), base.adapter("policy"))
    assert torch.equal(value.head["weight"], base.value_head.weight)


def test_a_reference_without_an_adapter_has_nothing_to_save_or_load():
    base = make_base()
    with pytest.raises(ValueError, match="The reference role .*the base.* nothing|nothing to"):
        base.adapter("reference")
    with pytest.raises(ValueError, match="(?i)reference role .*nothing"):
        base.load_adapter("reference", base.adapter("policy"))


# Loading in place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", list(Role))
def test_loading_in_place_keeps_the_parameter_objects(role, kind):
    base = full_base(kind=kind)
    saved = copied(base.adapter(role))
    optimizer = torch.optim.AdamW([p for group in base.trainable_parameters().values() for p in group], lr=0.1)
    before = [(id(p), p.data_ptr(), p.requires_grad) for p in base.parameters()]
    with torch.no_grad():
        adapter = base.adapter(role)
        for tensor in [*adapter.tensors.values(), *(adapter.head or {}).values()]:
            tensor.add_(1.0)
    others = {other: copied(base.adapter(other)) for other in Role if other is not role}
    with base.role("reward"):
        base.load_adapter(role, saved)
        assert base.active_role is Role.REWARD
    assert_same_adapter(base.adapter(role), saved)
    for other, adapter in others.items():
        assert_same_adapter(base.adapter(other), adapter)
    assert [(id(p), p.data_ptr(), p.requires_grad) for p in base.parameters()] == before
    assert len(optimizer.param_groups[0]["params"]) == sum(len(g) for g in base.trainable_parameters().values())


def test_loading_the_value_takes_the_head_too():
    base = full_base()
    ids, mask = padded_batch()
    values = base.values(ids, mask, T).detach()
    saved = copied(base.adapter("value"))
    randomize(base.trainable_parameters()[Role.VALUE], seed=8, scale=0.4)
    assert not torch.equal(base.values(ids, mask, T), values)
    base.load_adapter("value", saved)
    assert torch.equal(base.values(ids, mask, T), values)


# Sources


@pytest.mark.parametrize(
    ("text", "location", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("name@v1.0", "name", "v1.0"),
        ("org/name:value", "org/name", None),
        ("org/name@v1:deep/value", "org/name", "v1"),
    ],
)
def test_a_source_is_parsed(text, location, revision):
    parsed = AdapterSource.parse(text)
    assert parsed == AdapterSource(location, revision, text.partition(":")[2] or None)
    assert str(parsed) == text
    assert AdapterSource.parse(parsed) is parsed


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path):
    folder = tmp_path / "run@3"
    shutil.copytree(policy_adapter(), folder)
    assert AdapterSource.parse(folder) == AdapterSource(str(folder))
    assert read_adapter(str(folder)).source == str(folder)


def test_a_subfolder_is_read(tmp_path):
    shutil.copytree(policy_adapter(), tmp_path / "checkpoint" / "policy")
    given = read_adapter(AdapterSource(str(tmp_path / "checkpoint"), subfolder="policy"))
    assert_same_adapter(given, read_adapter(policy_adapter()))
    for source in (AdapterSource(str(tmp_path / "checkpoint"), subfolder="policy"), f"{tmp_path}/checkpoint:policy"):
        assert_same_adapter(make_base(policy=source).adapter("policy"), given)


# Heads


def test_a_head_is_float32_whatever_it_is_given():
    head = ScalarHead(torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float16))
    assert head.weight.dtype == head.bias.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = head(torch.full((2, 3, 4), 1.001, dtype=torch.float64))
    assert given.shape == (2, 3) and given.dtype == torch.float32
    assert_close(given, torch.full((2, 3), 5.004), 1e-6)


def test_a_head_is_a_copy():
    weight = torch.ones(1, 4)
    head = ScalarHead(weight)
    with torch.no_grad():
        head.weight.zero_()
    assert weight.all() and head.weight.requires_grad
    assert torch.equal(ScalarHead.zeros(4)(torch.randn(3, 4)), torch.zeros(3))


def _with_head_keys(tmp_path, rename: dict[str, torch.Tensor]):
    shutil.copytree(reward_adapter(), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors.pop("base_model.model.score.weight")
    save_file({**tensors, **rename}, tmp_path / "adapter_model.safetensors")
    return read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["score", "classifier"])
def test_a_head_by_either_name_with_or_without_bias(tmp_path, name):
    weight, bias = torch.randn(1, 64), torch.randn(1)
    keys = {f"base_model.model.{name}.weight": weight, f"base_model.model.{name}.bias": bias}
    adapter = _with_head_keys(tmp_path, keys)
    assert adapter.head.keys() == {"weight", "bias"} and not any(name in key for key in adapter.tensors)
    base = make_base(reward=adapter)
    assert torch.equal(base.reward_head.weight, weight) and torch.equal(base.reward_head.bias, bias)
    write_adapter(tmp_path / "again", base.adapter("value"))
    assert_same_adapter(read_adapter(tmp_path / "again"), base.adapter("value"))


def test_lora_on_the_score_head_is_not_a_head(tmp_path):
    keys = {f"base_model.model.score.lora_{x}.weight": torch.ones(1, 1) for x in "AB"}
    assert _with_head_keys(tmp_path, keys).head is None
