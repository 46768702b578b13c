"""Adapters as people publish them: each works and computes what plain PEFT computes, or is refused with the reason."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from bases import (
    assert_close,
    assert_same_adapter,
    lora_config,
    make_base,
    model_folder,
    plain_model,
    policy_adapter,
    reward_adapter,
    save_random_adapter,
)
from builders import ARCHITECTURES, MORE_ARCHITECTURES, padded_batch, randomize
from ppo_lora import Role, SharedBase, read_adapter

T = 6
VARIETIES = {
    "plain": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
}
LLAMA_VARIETIES = {
    "few targets": {"target_modules": ["q_proj", "down_proj"]},
    "regex": {"target_modules": r".*layers\.1\..*(k|up)_proj"},
    "ranks": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7}, "alpha_pattern": {"q_proj": 40}},
    "one layer": {"layers_to_transform": [1], "target_modules": ["q_proj", "v_proj"]},
    "excluded": {"exclude_modules": ["o_proj"]},
    "dropout": {"lora_dropout": 0.4},
    "dora, ranks": {"use_dora": True, "rank_pattern": {"v_proj": 3}},
}


def _whole_rows():
    ids = torch.randint(3, 50, (4, 11), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids)


def _plain_scores(architecture: str, adapter: str) -> torch.Tensor:
    model = PeftModel.from_pretrained(
        plain_model(architecture, auto=AutoModelForSequenceClassification), adapter
    ).eval()
    ids, mask = _whole_rows()
    with torch.no_grad():
        scores = model(input_ids=ids, attention_mask=mask).logits[:, 0]
    assert scores.std() > 0.01
    return scores


def _plain_logprobs(architecture: str, adapter: str) -> torch.Tensor:
    model = PeftModel.from_pretrained(plain_model(architecture), adapter).eval()
    ids, _ = _whole_rows()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[:, -T - 1 : -1], dim=-1)
    return logprobs.gather(-1, ids[:, -T:, None]).squeeze(-1)


def _assert_works(architecture: str, changes: dict) -> None:
    """Reward and policy are what plain PEFT has; the reference starts as the policy and stays."""
    reward, policy = reward_adapter(architecture, **_frozen(changes)), policy_adapter(architecture, **_frozen(changes))
    base = make_base(architecture, policy=policy, reward=reward)
    ids, mask = _whole_rows()
    assert_close(base.scores(ids, mask), _plain_scores(architecture, reward))
    expected = _plain_logprobs(architecture, policy)
    assert_close(base.logprobs("policy", ids, mask, T).detach(), expected)
    padded = padded_batch()
    kl = base.logprobs("policy", *padded, T) - base.logprobs("reference", *padded, T)
    assert torch.equal(kl, torch.zeros_like(kl))
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.3)
    randomize(base.trainable_parameters()[Role.VALUE], scale=0.3)
    assert_close(base.scores(ids, mask), _plain_scores(architecture, reward))
    assert_close(base.logprobs("reference", ids, mask, T), expected)


class _Frozen(dict):
    """A dict that can be a cache's key."""

    def __hash__(self):
        return hash(str(self))


def _frozen(changes: dict) -> dict:
    return {
        name: _Frozen(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value
        for name, value in changes.items()
    }


@pytest.mark.parametrize("variety", VARIETIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE_ARCHITECTURES)
def test_what_is_published_computes_what_plain_peft_computes(architecture, variety):
    _assert_works(architecture, VARIETIES[variety])


@pytest.mark.parametrize("variety", LLAMA_VARIETIES)
def test_further_varieties_compute_what_plain_peft_computes(variety):
    _assert_works("llama", LLAMA_VARIETIES[variety])


def test_roles_of_different_varieties_share_a_base():
    policy = policy_adapter(r=3, use_dora=True, target_modules=("q_proj", "v_proj"))
    reward = reward_adapter(r=9, use_rslora=True, target_modules=("o_proj", "down_proj", "v_proj"))
    reference = policy_adapter(seed=5, r=2, target_modules=("up_proj",))
    base = make_base(policy=policy, reward=reward, reference=reference)
    ids, mask = _whole_rows()
    assert_close(base.scores(ids, mask), _plain_scores("llama", reward))
    assert_close(base.values(ids, mask, 1).detach()[:, 0], base.scores(ids[:, :-1], mask[:, :-1]))
    assert_close(base.logprobs("policy", ids, mask, T).detach(), _plain_logprobs("llama", policy))
    assert_close(base.logprobs("reference", ids, mask, T), _plain_logprobs("llama", reference))


# Names


def _renamed(folder: Path, source: str, rename) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "adapter_model.safetensors"
    save_file({rename(key): tensor for key, tensor in load_file(file).items()}, file)
    return folder


WRAPPED = {
    "compiled": lambda key: f"_orig_mod.{key}",
    "in DDP": lambda key: f"module.{key}",
    "with the adapter's name": lambda key: key.replace(".weight", ".default.weight") if "lora_" in key else key,
    "whole head": lambda key: key.replace("score.weight", "score.modules_to_save.default.weight"),
    "classifier": lambda key: key.replace("score.weight", "classifier.weight"),
    "a bare backbone": lambda key: key.replace("base_model.model.model.", "base_model.model."),
    "no prefix": lambda key: key.replace("base_model.model.model.", ""),
    "deeper": lambda key: key.replace("base_model.model.model.", "base_model.model.language_model.model."),
}


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("names", WRAPPED)
def test_other_prefixes_and_wrappers_find_their_place(tmp_path, names, use_dora):
    reward = reward_adapter(use_dora=use_dora)
    folder = _renamed(tmp_path, reward, WRAPPED[names])
    assert (
        load_file(folder / "adapter_model.safetensors").keys()
        != load_file(f"{reward}/adapter_model.safetensors").keys()
    )
    ids, mask = _whole_rows()
    assert_close(make_base(reward=folder).scores(ids, mask), _plain_scores("llama", reward))


@pytest.mark.parametrize(("architecture", "prefix"), [("llama", "layers"), ("gpt2", "h"), ("gpt_neox", "layers")])
def test_an_adapter_of_a_bare_backbone_computes_what_it_computes_there(tmp_path, architecture, prefix):
    backbone = AutoModel.from_pretrained(model_folder(architecture))
    adapted = get_peft_model(backbone, lora_config(architecture, task_type="FEATURE_EXTRACTION"))
    randomize([p for name, p in adapted.named_parameters() if "lora_" in name], 3, scale=0.1)
    adapted.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert all(key.startswith(f"base_model.model.{prefix}.") for key in keys)
    base = make_base(architecture, policy=tmp_path)
    ids, mask = _whole_rows()
    with torch.no_grad():
        states = adapted.eval()(ids).last_hidden_state
        logits = plain_model(architecture).get_output_embeddings()(states)
    expected = torch.log_softmax(logits[:, -T - 1 : -1], dim=-1).gather(-1, ids[:, -T:, None]).squeeze(-1)
    assert_close(base.logprobs("policy", ids, mask, T).detach(), expected)


def test_names_that_meet_no_module_are_refused(tmp_path):
    folder = _renamed(tmp_path, policy_adapter(), lambda key: key.replace("q_proj", "query"))
    with pytest.raises(ValueError, match=r"tensors are missing \(the first: .*q_proj.*no place \(the first: .*query"):
        make_base(policy=folder)


# Modules that were saved whole


def _with_whole(folder: Path, tensors: dict[str, torch.Tensor], source: str, **config) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


EMBEDDING = "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize("kind", ["float32", "nf4"])
def test_embeddings_that_are_the_bases_own_are_no_hindrance(tmp_path, kind):
    weight = plain_model().get_input_embeddings().weight.detach().clone()
    folder = _with_whole(tmp_path, {EMBEDDING: weight}, reward_adapter(), modules_to_save=["score", "embed_tokens"])
    base = make_base(kind=kind, reward=folder)
    assert_same_adapter(base.adapter("reward"), make_base(kind=kind, reward=reward_adapter()).adapter("reward"))


def test_an_adapter_on_the_embeddings_works(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT says that it saves the embeddings too
        adapted = get_peft_model(plain_model(), lora_config(target_modules=["embed_tokens", "q_proj"]))
        folder = save_random_adapter(adapted, 1)
    assert any("lora_embedding_A" in key for key in load_file(f"{folder}/adapter_model.safetensors"))
    base = make_base(policy=folder)
    ids, mask = _whole_rows()
    assert_close(base.logprobs("policy", ids, mask, T).detach(), _plain_logprobs("llama", folder))
    before = base.logprobs("reference", ids, mask, T)
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.3)
    assert torch.equal(base.logprobs("reference", ids, mask, T), before)


@pytest.mark.parametrize(
    ("role", "name"),
    [(role, name) for role in Role for name in ("embed_tokens", "norm")]
    + [("policy", "lm_head"), ("reference", "lm_head")],
)
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_modules_that_were_trained_whole_are_refused(tmp_path, role, name):
    role = str(getattr(role, "value", role))
    auto = AutoModelForCausalLM if role in ("policy", "reference") else AutoModelForSequenceClassification
    config = lora_config(
        task_type="CAUSAL_LM" if auto is AutoModelForCausalLM else "SEQ_CLS",
        modules_to_save=[name] if auto is AutoModelForCausalLM else ["score", name],
    )
    folder = save_random_adapter(get_peft_model(plain_model(auto=auto), config), 1)
    text = f"(?s)The {role} adapter {folder} comes with trained weights of its own for .*{name}.*scripts/merge.py"
    with pytest.raises(ValueError, match=text):
        make_base(**{role: folder})


@pytest.mark.parametrize("role", ["policy", "reward"])
def test_embeddings_of_another_vocabulary_are_refused_with_both_sizes(tmp_path, role):
    source = policy_adapter() if role == "policy" else reward_adapter()
    folder = _with_whole(tmp_path, {EMBEDDING: torch.zeros(53, 64)}, source)
    with pytest.raises(ValueError, match=rf"{EMBEDDING} is \[53, 64\] in the adapter and \[50, 64\] on the base"):
        make_base(**{role: folder})


def test_a_module_that_the_base_does_not_have_is_refused(tmp_path):
    folder = _with_whole(tmp_path, {"base_model.model.v_head.summary.weight": torch.zeros(1, 64)}, policy_adapter())
    with pytest.raises(ValueError, match=r"its file holds .*v_head.summary.weight, which the base does not have"):
        make_base(policy=folder)


def test_a_head_of_several_layers_is_refused(tmp_path):
    folder = _renamed(tmp_path, reward_adapter(), lambda key: key.replace("score.weight", "score.0.weight"))
    with pytest.raises(ValueError, match=r"has the tensors \['0.weight'\]; expected one linear layer"):
        make_base(reward=folder)


# Options that roles cannot share a base with

REFUSED = {
    "bias": ("all", "it trains the base's own biases"),
    "init_lora_weights": ("pissa", "it rewrites the base's weights"),
    "trainable_token_indices": ([3, 4], "it changes the embeddings"),
    "layer_replication": ([[0, 2], [1, 2]], "it changes the base's layers"),
    "alora_invocation_tokens": ([5], "it is active after certain tokens only"),
    "target_parameters": (["mlp.experts.gate_up_proj"], "it changes parameters and not modules"),
    "arrow_config": ({"top_k": 2}, "it routes among several adapters"),
    "use_qalora": (True, "it pools its inputs"),
    "use_bdlora": ({"nblocks": 2}, "a variant that was not tried"),
    "kasa_config": ({"beta": 1e-4}, "it rewrites the base's weights"),
    "monteclora_config": ({"num_samples": 2}, "it samples its weights"),
    "velora_config": ({"num_groups": 2}, "it changes what backward sees"),
}


@pytest.mark.parametrize("role", ["policy", "reference", "reward", "value"])
@pytest.mark.parametrize("option", [name for name in REFUSED if name in LoraConfig.__dataclass_fields__])
def test_options_that_change_more_than_the_adapter_are_refused(role, option):
    value, why = REFUSED[option]
    adapter = read_adapter(policy_adapter() if role in ("policy", "reference") else reward_adapter())
    setattr(adapter.config, option, value)
    with pytest.raises(ValueError, match=f"The {role} adapter .* has {option}=.*{why}.*Use an adapter without it"):
        make_base(**{role: adapter})
    with pytest.raises(ValueError, match=f"{option}"):
        make_base(peft_config=adapter.config)


# Another base than the adapter's


def _config_changed(folder: Path, source: str, **changes) -> Path:
    return _with_whole(folder, {}, source, **changes)


def _warnings_of(**roles) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        SharedBase.from_pretrained(model_folder("llama"), peft_config=lora_config(), **roles)
    return [str(w.message) for w in seen if issubclass(w.category, UserWarning) and "trained on" in str(w.message)]


def test_the_right_base_is_no_cause_for_a_warning():
    assert _warnings_of(policy=policy_adapter(), reward=reward_adapter()) == []


@pytest.mark.parametrize("role", ["policy", "reference", "reward", "value"])
def test_another_base_is_warned_of_by_both_names(tmp_path, role):
    source = policy_adapter() if role in ("policy", "reference") else reward_adapter()
    here, other = model_folder("llama"), model_folder(seed=9)
    (warning,) = _warnings_of(**{role: _config_changed(tmp_path, source, base_model_name_or_path=other)})
    assert f"The {role} adapter {tmp_path} was trained on the base {other}, this is {here}." in warning


def test_a_relative_path_to_the_same_base_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(model_folder("llama")).parent)
    folder = _config_changed(tmp_path, policy_adapter(), base_model_name_or_path=Path(model_folder("llama")).name)
    assert _warnings_of(policy=folder) == []


@pytest.mark.parametrize(
    ("change", "word"), [({"vocab_size": 53}, "vocabulary"), ({"hidden_size": 32}, "hidden size")]
)
@pytest.mark.parametrize("role", ["policy", "reward"])
def test_another_vocabulary_or_hidden_size_is_refused_with_both(tmp_path, role, change, word):
    source = policy_adapter() if role == "policy" else reward_adapter()
    other = model_folder(**change)
    folder = _config_changed(tmp_path, source, base_model_name_or_path=other)
    ((name, size),) = change.items()
    ours = {"vocab_size": 50, "hidden_size": 64}[name]
    with pytest.raises(ValueError, match=f"trained on {other}, whose {word} is {size}; here it is {ours}"):
        make_base(**{role: folder})


# Pickles


def _pickled(folder: Path, source: str) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "adapter_model.safetensors"
    torch.save(load_file(file), folder / "adapter_model.bin")
    file.unlink()
    return folder


def test_a_pickled_adapter_is_refused_unless_it_is_asked_for(tmp_path):
    folder = _pickled(tmp_path, reward_adapter())
    with pytest.raises(ValueError, match=r"has adapter_model.bin and no .*safetensors. A pickle can run code"):
        make_base(reward=folder)
    ids, mask = _whole_rows()
    base = make_base(reward=folder, allow_pickle=True)
    assert_close(base.scores(ids, mask), _plain_scores("llama", reward_adapter()))


class _Harm:
    def __reduce__(self):
        return (open, ("harm.txt", "w"))


def test_a_pickle_that_runs_code_does_not_run_even_when_pickles_are_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = _pickled(tmp_path / "adapter", policy_adapter())
    torch.save({"harm": _Harm()}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="adapter_model.bin of .* is broken"):
        make_base(policy=folder, allow_pickle=True)
    assert not (tmp_path / "harm.txt").exists()


def test_safetensors_are_taken_where_there_are_both(tmp_path):
    folder = Path(shutil.copytree(policy_adapter(), tmp_path / "both"))
    (folder / "adapter_model.bin").write_bytes(b"not read")
    assert_same_adapter(read_adapter(folder), read_adapter(policy_adapter()))


def test_a_pickled_base_is_refused_unless_it_is_asked_for(tmp_path):
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "base"))
    torch.save(plain_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"weights in pytorch_model.bin and not in safetensors.*--allow_pickle"):
        SharedBase.from_pretrained(str(folder), peft_config=lora_config())
    base = SharedBase.from_pretrained(str(folder), peft_config=lora_config(), allow_pickle=True)
    ids, mask = _whole_rows()
    assert torch.equal(base.logprobs("reference", ids, mask, T), make_base().logprobs("reference", ids, mask, T))


def test_a_pickled_base_in_a_subfolder_is_refused_too(tmp_path):
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "models" / "base"))
    torch.save(plain_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        SharedBase.from_pretrained(str(folder.parent), subfolder="base", peft_config=lora_config())


# Broken files


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("adapter_model.safetensors", b"\x00" * 40, "adapter_model.safetensors of .* is broken"),
        ("adapter_model.safetensors", b"", "adapter_model.safetensors of .* is broken"),
        ("adapter_config.json", b"{", "adapter_config.json of .* is broken"),
        ("adapter_config.json", b"[]", "adapter_config.json of .* is broken"),
        ("adapter_config.json", b"{}", "adapter_config.json of .* is broken|is a None adapter"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, text):
    folder = Path(shutil.copytree(policy_adapter(), tmp_path / "broken"))
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=text):
        read_adapter(folder)


def test_a_cut_file_is_named(tmp_path):
    folder = Path(shutil.copytree(policy_adapter(), tmp_path / "cut"))
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="adapter_model.safetensors of .* is broken"):
        read_adapter(folder)
