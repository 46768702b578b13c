"""Roles, bases and data sets from the Hub, and what is said when they cannot be had.

The Hub is a local server, the client the real one. Functions named `client_...` run in processes of their own (see
`hub_client`), so they import what they use.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bases import policy_adapter, reward_adapter
from builders import prompts, save_tiny_model
from hub_client import ClientFailed, client_environment, run_client, write_files
from launch import launch_ppo
from ppo_lora import SharedBase

REPORT = re.compile(r"^[^\n]{20,400}$")


def _published(hub, folder: Path, repo: str, source: str, **options) -> str:
    """Put an adapter that names the published base on the Hub; the commit."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/base"}))
    return hub.add_model(repo, folder, **options)


@pytest.fixture
def published(hub, tmp_path):
    """A Hub with a base, adapters and prompts; large files are large from 1000 bytes on."""
    hub.lfs_threshold = 1000
    folder = tmp_path / "published"
    save_tiny_model(folder / "base", initializer_range=0.1)
    hub.add_model("org/base", folder / "base")
    _published(hub, folder / "sft", "org/sft", policy_adapter())
    _published(hub, folder / "reward", "org/reward", reward_adapter())
    prompts(32).to_json(folder / "prompts" / "train.jsonl")
    prompts(8).to_json(folder / "prompts" / "test.jsonl")
    hub.add_dataset("org/prompts", folder / "prompts")
    return hub


def client_messages(calls):
    """What each call says when it fails; calls by name."""
    import datasets

    from hub_client import caught
    from ppo_lora import SharedBase, hub_errors, read_adapter

    def base(name, revision=None):
        SharedBase.from_pretrained(name, revision=revision)

    def dataset(name):
        with hub_errors("data set", name):
            datasets.load_dataset(name)

    kinds = {"adapter": read_adapter, "base": base, "dataset": dataset}
    return [caught(kinds[kind], *arguments) for kind, *arguments in calls]


def _said(hub, home, calls, **environment) -> list[str]:
    errors = run_client(client_messages, hub, home, calls, **environment).value
    for error in errors:
        assert "HubError" in error["type"] or "ValueError" in error["type"], error
        assert REPORT.match(error["message"]), error["message"]
    return [error["message"] for error in errors]


def test_what_cannot_be_had_is_said_in_one_line(published, tmp_path):
    hub = published
    for kind in (hub.add_model, hub.add_dataset):
        kind("org/gated", tmp_path / "published" / "prompts", gated=True)
        kind("org/private", tmp_path / "published" / "prompts", private=True)
    hub.add_model("org/empty", write_files(tmp_path / "empty", {"README.md": b"nothing"}))
    pickled = tmp_path / "pickled"
    shutil.copytree(tmp_path / "published" / "sft", pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    hub.add_model("org/pickled", pickled)
    hub.add_model("org/pickled-base", write_files(tmp_path / "bin", {"config.json": b"{}", "pytorch_model.bin": b"x"}))
    expected = [
        (["adapter", "org/none"], "The adapter org/none is not on the Hub, or is private, and there is no folder"),
        (["adapter", "org/private"], "The adapter org/private is not on the Hub, or is private.*hf auth login"),
        (["adapter", "org/gated"], "The adapter org/gated is gated. Ask for access.*HF_TOKEN"),
        (["adapter", "org/sft@v9"], "The adapter org/sft has no revision 'v9'. Give a branch, tag or commit"),
        (["adapter", "org/sft:deep"], "No adapter_config.json in org/sft:deep. An adapter is a folder with"),
        (["adapter", "org/empty"], "No adapter_config.json in org/empty."),
        (["adapter", "org/pickled"], "The adapter org/pickled has adapter_model.bin and no .*safetensors. A pickle"),
        (["adapter", "no/such/folder"], "The adapter no/such/folder is not on the Hub.*no folder 'no/such/folder'"),
        (["base", "org/none"], "The base org/none is not on the Hub, or is private"),
        (["base", "org/gated"], "The base org/gated is gated"),
        (["base", "org/base", "v9"], "The base org/base has no revision 'v9'"),
        (["base", "org/pickled-base"], "org/pickled-base has its weights in pytorch_model.bin"),
        (["dataset", "org/none"], "The data set org/none is not on the Hub, or is private"),
        (["dataset", "org/gated"], "The data set org/gated is gated"),
        (["dataset", "./nothing"], r"The data set ./nothing is not on the Hub.*no folder './nothing'"),
    ]
    for (_, text), said in zip(expected, _said(hub, tmp_path / "home", [call for call, _ in expected]), strict=True):
        assert re.match(text, said), said
    assert not [path for path in (tmp_path / "home").rglob("*") if path.name.endswith(".bin")]


def test_a_hub_that_does_not_answer_is_said_in_one_line(published, tmp_path):
    calls = [["adapter", "org/sft"], ["base", "org/base"], ["dataset", "org/prompts"]]
    offline = _said(published, tmp_path / "home", calls, HF_HUB_OFFLINE="1")
    for said, (kind, name) in zip(offline, calls, strict=True):
        what = {"dataset": "data set"}.get(kind, kind)
        text = f"The {what} {name} is not in the local cache, and offline mode is on .HF_HUB_OFFLINE.; unset"
        assert re.match(text, said), said
    published.fail(503, times=1000)
    for said in _said(published, tmp_path / "home", calls[:2]):
        assert re.search(r"the Hub answered 503|The Hub answered 503", said), said
    published.down()
    for said in _said(published, tmp_path / "home", calls):
        assert re.search("is not in the local cache, and the Hub cannot be reached; try again", said), said
    published.up()


def client_scores(pairs):
    """Scores and log-probabilities of (reward, policy) on the published base, and where the roles came from."""
    import torch

    from bases import lora_config
    from ppo_lora import SharedBase

    def seen(reward, policy):
        base = SharedBase.from_pretrained("org/base", policy=policy, reward=reward, peft_config=lora_config())
        ids = torch.arange(3, 43).reshape(4, 10)
        return {
            "scores": base.scores(ids, torch.ones_like(ids)).tolist(),
            "logprobs": base.logprobs("policy", ids, torch.ones_like(ids), 5).tolist(),
            "commits": {role.value: origin.revision for role, origin in base.adapters.origins.items()},
            "base": base.identity.commit,
        }

    return [seen(*pair) for pair in pairs]


def test_each_role_comes_from_its_revision_and_subfolder(published, tmp_path):
    hub, folder = published, tmp_path / "published"
    first = _published(hub, folder / "r1", "org/versions", reward_adapter(seed=5))
    hub.tag("org/versions", "v1")
    second = _published(hub, folder / "r2", "org/versions", reward_adapter(seed=6))
    shutil.copytree(folder / "sft", folder / "nested" / "deep" / "policy")
    nested = hub.add_model("org/nested", folder / "nested", revision="dev")
    rewards = ["org/versions@v1", "org/versions", f"org/versions@{first}", str(folder / "r2")]
    policies = ["org/nested@dev:deep/policy"] * 3 + [str(folder / "sft")]
    pairs = list(zip(rewards, policies, strict=True))
    at_v1, newest, by_commit, local = run_client(client_scores, hub, tmp_path / "home", pairs).value
    assert at_v1["commits"]["reward"] == at_v1["commits"]["value"] == first
    assert newest["commits"]["reward"] == second != first
    assert newest["commits"]["policy"] == newest["commits"]["reference"] == nested
    assert local["commits"]["reward"] is None
    assert at_v1["base"] == newest["base"] and len(newest["base"]) == 40
    assert at_v1["logprobs"] == newest["logprobs"] and at_v1["scores"] != newest["scores"]
    assert by_commit["scores"] == at_v1["scores"]
    assert local["scores"] == newest["scores"] and local["logprobs"] == newest["logprobs"]


def test_a_cut_download_is_made_whole_and_the_cache_serves_offline(published, tmp_path):
    """huggingface_hub 2.4 tries again by itself; 1.3 leaves that to the user, who is told so."""
    hub, pairs = published, [("org/reward", "org/sft")]
    hub.cut("org/reward", "adapter_model.safetensors", after=5000)
    try:
        online = run_client(client_scores, hub, tmp_path / "home", pairs).value
    except ClientFailed as error:
        assert re.search("HubError: The connection broke while the adapter org/reward was loaded .*again", str(error))
        online = run_client(client_scores, hub, tmp_path / "home", pairs).value
    transfers = [seen for seen in hub.seen("GET", "adapter_model.safetensors") if seen.status in (200, 206)]
    assert len(transfers) == 3  # the reward's twice, the policy's once, and nothing again that was whole
    hub.down()
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        assert run_client(client_scores, hub, tmp_path / "home", pairs, **environment).value == online
    hub.up()


def client_custom_code():
    """A base and a tokenizer whose configuration asks for code of the repository."""
    from hub_client import caught
    from ppo_lora import SharedBase

    known = SharedBase.from_pretrained("org/known")
    return caught(SharedBase.from_pretrained, "org/unknown"), type(known.model).__name__


def test_no_code_from_the_hub_is_run(hub, tmp_path):
    code = b"open('harm.txt', 'w')\n"
    for name, kind in (("unknown", "not_a_model"), ("known", "llama")):
        folder = Path(save_tiny_model(tmp_path / name))
        config = json.loads((folder / "config.json").read_text())
        auto_map = {"AutoConfig": "harm.Config", "AutoModelForCausalLM": "harm.Model"}
        config |= {"model_type": kind, "auto_map": auto_map, "trust_remote_code": True}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "harm.py").write_bytes(code)
        hub.add_model(f"org/{name}", folder)
    unknown, known = run_client(client_custom_code, hub, tmp_path / "home").value
    assert "trust_remote_code" in unknown["message"]
    assert not hub.seen("GET", "harm.py") and not list(tmp_path.rglob("harm.txt"))
    assert known == "LlamaForCausalLM"


# All of it by id, and back to the Hub


def client_policy_logprobs(name):
    """The published policy's log-probabilities in plain PEFT, loaded in both ways."""
    import torch
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 43).reshape(4, 10)
    automatic = AutoPeftModelForCausalLM.from_pretrained(name)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("org/base"), name)
    with torch.no_grad():
        return [torch.log_softmax(model.eval()(ids).logits, dim=-1).tolist() for model in (automatic, plain)]


def test_everything_by_hub_id_trains_saves_and_pushes(published, tmp_path):

    hub = published
    token = hub.add_token("hf_secret_write", "someone", write=True)
    environment = client_environment(hub, tmp_path / "home", HF_TOKEN=token)
    options = {
        "model_name_or_path": "org/base",
        "policy_adapter": "org/sft",
        "reward_adapter": "org/reward@main",
        "dataset_name": "org/prompts",
        "output_dir": str(tmp_path / "policy"),
        "push_to_hub": "true",
        "hub_model_id": "someone/policy",
        "hub_token": token,
        "save_strategy": "steps",
        "save_steps": "4",
        "eval_strategy": "steps",
        "eval_steps": "4",
    }
    output = launch_ppo(options, environment, tmp_path)
    files = hub.files("someone/policy")
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "curves.png", "ppo_lora.json",
            "tokenizer.json", "value/adapter_config.json", "value/adapter_model.safetensors",
            "value/ppo_lora.json"} <= files.keys()  # fmt: skip
    assert not [name for name in files if name.startswith("checkpoint-")]
    assert files["adapter_model.safetensors"] == (tmp_path / "policy" / "adapter_model.safetensors").read_bytes()

    secret = token.encode()
    assert secret not in output.encode() and not [name for name, data in files.items() if secret in data]
    written = [path for path in (tmp_path / "policy").rglob("*") if path.is_file()]
    assert not [path for path in written if secret in path.read_bytes()]

    manifest = json.loads(files["ppo_lora.json"])
    assert manifest["base"]["name"] == "org/base" and len(manifest["base"]["commit"]) == 40
    assert json.loads(files["adapter_config.json"])["revision"] == manifest["base"]["commit"]
    assert manifest["roles"]["reward"]["source"] == "org/reward@main"
    assert len(manifest["roles"]["policy"]["revision"]) == 40
    card = files["README.md"].decode()
    assert 'AutoPeftModelForCausalLM.from_pretrained("someone/policy")' in card and "`org/reward`" in card
    assert str(tmp_path) not in card and "org/prompts" in card

    start = load_file(tmp_path / "published" / "sft" / "adapter_model.safetensors")
    trained = load_file(tmp_path / "policy" / "adapter_model.safetensors")
    assert any(not torch.equal(start[name], trained[name]) for name in start)
    with pytest.warns(UserWarning, match="trained on the base org/base, this is"), torch.no_grad():
        base = SharedBase.from_pretrained(str(tmp_path / "published" / "base"), policy=tmp_path / "policy")
        own = torch.log_softmax(base.model(torch.arange(3, 43).reshape(4, 10)).logits, dim=-1).tolist()
    for plain in run_client(client_policy_logprobs, hub, tmp_path / "new home", "someone/policy").value:
        assert plain == own


def client_pushes(folder):
    """What is said on making trainers that push, and on pushing."""
    import os

    from builders import tiny_model
    from hub_client import caught
    from runs import trainer

    quiet = {"push_to_hub": True, "disable_tqdm": True}
    refused = [
        caught(trainer, f"{folder}/a", tiny_model(), hub_model_id="org/taken", **quiet),
        caught(trainer, f"{folder}/b", tiny_model(), hub_model_id="someone/x", hub_token="hf_wrong", **quiet),
    ]
    made = trainer(f"{folder}/c", tiny_model(), hub_model_id="someone/mine", **quiet)
    del os.environ["HF_TOKEN"]
    refused.append(caught(made.push_to_hub, token="hf_wrong"))
    return refused, sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/c"))


def test_pushes_that_are_refused_say_so(hub, tmp_path):
    token = hub.add_token("hf_someone", "someone", write=True)
    (tmp_path / "runs").mkdir()
    refused, folders, files = run_client(
        client_pushes, hub, tmp_path / "home", str(tmp_path / "runs"), HF_TOKEN=token
    ).value
    for error, name in zip(refused, ("org/taken", "someone/x", "someone/mine"), strict=True):
        assert error["type"] == "HubError" and REPORT.match(error["message"])
        assert re.match(
            rf"The Hub answered 40[13] for the repository {name}: the token is not valid", error["message"]
        )
        assert "hf_" not in error["message"].replace("hf_auth", "")
    assert folders == ["c"] and "adapter_model.safetensors" in files


def test_the_script_says_what_is_missing_in_one_line(published, tmp_path):

    environment = client_environment(published, tmp_path / "home")
    options = {
        "model_name_or_path": "org/base",
        "policy_adapter": "org/nowhere",
        "reward_adapter": "org/reward",
        "dataset_name": "org/prompts",
        "output_dir": str(tmp_path / "policy"),
    }
    output = launch_ppo(options, environment, tmp_path, fails=True)
    assert "error: The adapter org/nowhere is not on the Hub, or is private" in output
    assert "ppo_lora/hub.py" not in output
    assert not (tmp_path / "policy").exists()
