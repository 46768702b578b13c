"""scripts/merge.py: what it refuses, with nothing written."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bases import reward_adapter
from builders import save_tiny_model, tiny_tokenizer
from merging import SCRIPTS, adapter_folder, refused, weights
from ppo_lora import AdapterSource, read_adapter

sys.path.insert(0, str(SCRIPTS))

import merge_sources  # noqa: E402


def test_value_and_reward_adapters_are_refused(tmp_path):
    assert "with a head" in refused(reward_adapter(), tmp_path / "merged")
    adapter = adapter_folder(tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "task_type": "SEQ_CLS"}))
    assert "SEQ_CLS adapter; expected a policy" in refused(adapter, tmp_path / "merged")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    head = load_file(Path(reward_adapter()) / "adapter_model.safetensors")
    save_file(head, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "CAUSAL_LM adapter with a head" in refused(adapter, tmp_path / "merged")


def test_adapters_that_cannot_be_read_are_refused(tmp_path):
    assert "adapter_config.json" in refused(tmp_path, tmp_path / "merged")
    adapter = adapter_folder(tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    assert "adapter_model.bin and no adapter_model.safetensors" in refused(adapter, tmp_path / "merged")


def test_bases_that_cannot_be_used_are_refused(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    given = ("--model_name_or_path", str(tmp_path / "nothing" / "here"))
    assert "--model_name_or_path" in refused(adapter, tmp_path / "merged", *given)
    base = Path(save_tiny_model(tmp_path / "pickled"))
    torch.save(weights(base), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    assert "safetensors" in refused(adapter, tmp_path / "merged", "--model_name_or_path", str(base))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    assert "does not name its base" in refused(adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("gpt2", {})]
    + [("llama", changes) for changes in ({"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"hidden_size": 32})],
)
def test_a_base_that_the_adapter_was_not_trained_on_is_refused(tmp_path, architecture, changes):
    base = save_tiny_model(tmp_path / "base", architecture, **changes)
    adapter = adapter_folder(tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    message = refused(adapter, tmp_path / "merged", "--model_name_or_path", base)
    assert "does not fit the base" in message


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter", tokenizer=tiny_tokenizer(60))
    assert "60 tokens, the base's embedding 50" in refused(adapter, tmp_path / "merged")
    for file in adapter.glob("token*"):
        file.unlink()
    assert "has a tokenizer" in refused(adapter, tmp_path / "merged")


def test_an_adapters_files_are_of_the_commit_that_was_read(tmp_path, monkeypatch):
    adapter = adapter_folder(tmp_path / "adapter")
    read, commit, asked = read_adapter(adapter), "c" * 40, []
    monkeypatch.setattr(merge_sources, "read_adapter", lambda source: replace(read, revision=commit))
    monkeypatch.setattr(AdapterSource, "find", lambda place, name: asked.append(place) or adapter / name)
    policy = merge_sources.find_policy("someone/policy@main:deep")
    assert policy.source == AdapterSource("someone/policy", commit, "deep") and asked == [policy.source]


def test_a_tokenizer_in_the_adapters_subfolder_is_taken(tmp_path):
    folder = adapter_folder(tmp_path / "run" / "deep")
    tiny_tokenizer(bos_token="w7").save_pretrained(folder)
    policy = merge_sources.find_policy(f"{tmp_path / 'run'}:deep")
    assert merge_sources.find_tokenizer(policy, policy.base, False).bos_token == "w7"


def test_bases_are_found_with_their_revision(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    named = {**config, "base_model_name_or_path": "someone/base", "revision": "abc"}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    policy = merge_sources.find_policy(str(adapter))
    base = merge_sources.find_base(None, policy)
    assert (base.location, merge_sources.loading(base, False)["revision"]) == ("someone/base", "abc")
    given = merge_sources.find_base("other/base@v2", policy)
    assert (given.location, merge_sources.loading(given, False)["revision"]) == ("other/base", "v2")
    assert merge_sources.loading(merge_sources.find_base("other/base", policy), False)["revision"] == "main"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max_shard_size", "5 lots", "5 lots"),
        ("--max_completion_length", "0", "at least 1"),
        ("--prompts", "", "no text"),
        ("--model_nam", "x", "model_nam"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, option, value, message):
    assert message in refused(adapter_folder(tmp_path / "adapter"), tmp_path / "merged", option, value)


def test_remote_code_runs_only_when_asked(tmp_path):
    base = Path(save_tiny_model(tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    strange = {**config, "model_type": "strange", "auto_map": {"AutoConfig": "code.StrangeConfig"}}
    (base / "config.json").write_text(json.dumps(strange))
    (base / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    message = refused(adapter_folder(tmp_path / "adapter"), tmp_path / "merged", "--model_name_or_path", str(base))
    assert "trust_remote_code" in message and not (tmp_path / "ran").exists()
