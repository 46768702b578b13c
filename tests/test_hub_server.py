"""The local Hub against the real client libraries: what they download and push, and how they are refused.

Functions named `client_...` run in processes of their own (see `hub_client`), so they import what they use.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from bases import policy_adapter
from builders import save_tiny_model
from hub_client import digest, download_files, download_snapshot, run_client, write_files
from hub_http import Request
from hub_repos import Blob
from hub_server import HubServer

READ, WRITE = "hf_read", "hf_write"


# Reading


def client_revisions(repo, revisions):
    from pathlib import Path

    from huggingface_hub import HfApi, hf_hub_download

    api = HfApi()
    return {
        "read": [Path(hf_hub_download(repo, "a.txt", revision=revision)).read_text() for revision in revisions],
        "ids": [api.model_info(repo, revision=revision).sha for revision in revisions],
        "branches": sorted(branch.name for branch in api.list_repo_refs(repo).branches),
        "tags": [tag.target_commit for tag in api.list_repo_refs(repo).tags],
    }


def test_branches_tags_and_commits_have_files_of_their_own(hub, tmp_path):
    first = hub.add_model("org/model", write_files(tmp_path / "1", {"a.txt": b"one"}))
    hub.tag("org/model", "v1")
    second = hub.add_model("org/model", write_files(tmp_path / "2", {"a.txt": b"two"}))
    third = hub.add_model("org/model", write_files(tmp_path / "3", {"a.txt": b"three"}), revision="runs/3")

    revisions = ["main", "v1", first, "runs/3"]
    got = run_client(client_revisions, hub, tmp_path / "home", "org/model", revisions).value
    assert got["read"] == ["two", "one", "one", "three"]
    assert got["ids"] == [second, first, first, third]
    assert got["branches"] == ["main", "runs/3"] and got["tags"] == [first]
    assert len({first, second, third}) == 3 and all(len(bytes.fromhex(name)) == 20 for name in (first, second, third))


def client_listing(repo):
    from huggingface_hub import HfApi

    api = HfApi()
    return {
        "top": [entry.path for entry in api.list_repo_tree(repo)],
        "all": [entry.path for entry in api.list_repo_tree(repo, recursive=True)],
        "below": [entry.path for entry in api.list_repo_tree(repo, "sub", recursive=True, expand=True)],
        "info": [entry.path for entry in api.get_paths_info(repo, ["sub", "a.txt", "missing"])],
        "sizes": {sibling.rfilename: sibling.size for sibling in api.model_info(repo, files_metadata=True).siblings},
        "large": [entry.lfs.sha256 for entry in api.get_paths_info(repo, ["sub/deep/m.safetensors"])],
    }


def test_listings_come_in_pages(tmp_path):
    files = {"a.txt": b"a", "b.txt": b"bb", "sub/c.txt": b"ccc", "sub/deep/m.safetensors": b"mmmm"}
    with HubServer(page_size=2) as hub:
        hub.add_model("org/model", write_files(tmp_path / "files", files))
        got = run_client(client_listing, hub, tmp_path / "home", "org/model").value
    assert sorted(got["top"]) == ["a.txt", "b.txt", "sub"]
    assert sorted(got["all"]) == ["a.txt", "b.txt", "sub", "sub/c.txt", "sub/deep", "sub/deep/m.safetensors"]
    assert sorted(got["below"]) == ["sub/c.txt", "sub/deep", "sub/deep/m.safetensors"]
    assert sorted(got["info"]) == ["a.txt", "sub"]
    assert got["sizes"] == {name: len(data) for name, data in files.items()}
    assert got["large"] == [digest(b"mmmm")]
    assert len(hub.seen("GET", "/tree/main")) == 2 + 3
    assert hub.complaints == []


def test_large_files_come_from_the_cdn_and_the_token_stays_with_the_hub(hub, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": b"m" * 5000, "sub/name with #.txt": b"t"}
    hub.add_model("org/secret", write_files(tmp_path / "files", files), private=True)
    hub.allow(hub.add_token(READ, "someone"), "org/secret")

    got = run_client(download_snapshot, hub, tmp_path / "home", "org/secret", {}, HF_TOKEN=READ).value
    assert got == {name: digest(data) for name, data in files.items()}
    assert [seen.authorized for seen in hub.requests if seen.path.startswith("/cdn/")] == [False]
    assert all(seen.authorized for seen in hub.requests if not seen.path.startswith("/cdn/"))
    head = Request("HEAD", "/org/secret/resolve/main/model.safetensors", {"Authorization": f"Bearer {READ}"})
    assert hub.answer(head)[0].headers["X-Linked-Size"] == "5000"
    blobs = next((tmp_path / "home").rglob("blobs"))
    assert {path.name for path in blobs.iterdir()} == {
        digest(data) if "safetensors" in name else Blob(data).git_id for name, data in files.items()
    }


def client_models():
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("org/base")
    ids = torch.tensor([tokenizer("w7 w8 w9")["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained("org/base")
    other = AutoModelForCausalLM.from_pretrained("org/base", revision="other")
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("org/base"), "org/adapters", subfolder="policy", revision="v1"
    )
    logits = [model(ids).logits.sum().item() for model in (base, other, adapted)]
    pushed = [part.push_to_hub("me/base").oid for part in (base, tokenizer)]
    adapted.push_to_hub("me/adapter")
    return {"logits": logits, "pushed": pushed}


@pytest.fixture
def hub_with_models(hub, tmp_path):
    """org/base on two branches, an adapter in org/adapters at v1 only, and a token that may write as "me"."""
    hub.add_model("org/base", save_tiny_model(tmp_path / "base", seed=1))
    hub.add_model("org/base", save_tiny_model(tmp_path / "other", seed=2), revision="other")
    adapter = {f"policy/{path.name}": path.read_bytes() for path in Path(policy_adapter()).iterdir()}
    hub.add_model("org/adapters", write_files(tmp_path / "with_adapter", adapter))
    hub.tag("org/adapters", "v1")
    hub.add_model("org/adapters", write_files(tmp_path / "without", {"README.md": b"gone"}))
    hub.add_token(WRITE, "me", write=True)
    return hub


def test_models_and_adapters_load_by_id_and_are_pushed(hub_with_models, tmp_path):
    hub = hub_with_models
    got = run_client(client_models, hub, tmp_path / "home", HF_TOKEN=WRITE).value
    assert len(set(got["logits"])) == 3
    assert got["pushed"][1] in hub.repositories["model", "me/base"].commits

    pushed, original = hub.files("me/base"), hub.files("org/base")
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= pushed.keys()
    assert pushed["tokenizer.json"] == original["tokenizer.json"]
    assert (
        hub.files("me/adapter")["adapter_model.safetensors"]
        == (hub.files("org/adapters", "v1")["policy/adapter_model.safetensors"])
    )
    again = run_client(download_snapshot, hub, tmp_path / "new home", "me/base", {}).value
    assert again == {path: digest(data) for path, data in pushed.items()}


def client_data():
    from datasets import Dataset, load_dataset

    own = Dataset.from_dict({"prompt": ["x", "y"]})
    own.push_to_hub("me/pushed")
    return {
        "parquet": {split: rows.to_dict()["prompt"] for split, rows in load_dataset("org/parquet").items()},
        "jsonl": load_dataset("org/jsonl", split="train").to_dict(),
        "revision": load_dataset("org/jsonl", split="train", revision="short").to_dict(),
        "config": load_dataset("org/carded", "second", split="train").to_dict(),
        "streamed": [row["prompt"] for row in load_dataset("org/parquet", split="test", streaming=True)],
        "pushed": load_dataset("me/pushed", split="train").to_dict(),
    }


CARD = b"""---
configs:
- {config_name: first, data_files: first/*.jsonl}
- {config_name: second, data_files: second/*.jsonl}
---
"""


def test_data_sets_load_by_id_and_are_pushed(hub, tmp_path):
    for split, prompts in {"train": ["a", "b"], "test": ["c"]}.items():
        Dataset.from_dict({"prompt": prompts}).to_parquet(tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
    rows = [json.dumps({"prompt": prompt}).encode() for prompt in "de"]
    hub.add_dataset("org/parquet", tmp_path / "parquet")
    hub.add_dataset("org/jsonl", write_files(tmp_path / "jsonl", {"train.jsonl": b"\n".join(rows)}))
    hub.add_dataset("org/jsonl", write_files(tmp_path / "short", {"train.jsonl": rows[1]}), revision="short")
    carded = {"README.md": CARD, "first/1.jsonl": rows[0], "second/1.jsonl": rows[1]}
    hub.add_dataset("org/carded", write_files(tmp_path / "carded", carded))
    hub.add_token(WRITE, "me", write=True)

    assert run_client(client_data, hub, tmp_path / "home", HF_TOKEN=WRITE).value == {
        "parquet": {"train": ["a", "b"], "test": ["c"]},
        "jsonl": {"prompt": ["d", "e"]},
        "revision": {"prompt": ["e"]},
        "config": {"prompt": ["e"]},
        "streamed": ["c"],
        "pushed": {"prompt": ["x", "y"]},
    }


# Refusals


def client_refusals(read):
    from huggingface_hub import HfApi, auth_check, hf_hub_download

    from hub_client import caught

    errors = {
        "unknown": caught(hf_hub_download, "org/none", "a.txt"),
        "unknown, with a token": caught(hf_hub_download, "org/none", "a.txt", token=read),
        "private": caught(hf_hub_download, "org/private", "a.txt"),
        "private, in a listing": caught(HfApi().list_repo_files, "org/private"),
        "gated": caught(hf_hub_download, "org/gated", "a.txt"),
        "gated, with a token": caught(hf_hub_download, "org/gated", "a.txt", token=read),
        "gated, asked": caught(auth_check, "org/gated", token=read),
        "revision": caught(hf_hub_download, "org/open", "a.txt", revision="nowhere"),
        "file": caught(hf_hub_download, "org/open", "b.txt"),
        "folder": caught(lambda: list(HfApi().list_repo_tree("org/open", "nothing"))),
        "bad token": caught(hf_hub_download, "org/open", "a.txt", token="hf_unknown"),
        "data set": caught(hf_hub_download, "org/open", "a.txt", repo_type="dataset"),
    }
    return {name: [error["type"], error["message"]] for name, error in errors.items()}


def test_refusals_raise_the_errors_of_the_client(hub, tmp_path):
    files = write_files(tmp_path / "files", {"a.txt": b"a"})
    hub.add_model("org/open", files)
    hub.add_model("org/private", files, private=True)
    hub.add_model("org/gated", files, gated=True)
    hub.add_token(READ, "someone")

    got = run_client(client_refusals, hub, tmp_path / "home", READ).value
    assert {name: error for name, (error, message) in got.items()} == {
        "unknown": "RepositoryNotFoundError",
        "unknown, with a token": "RepositoryNotFoundError",
        "private": "RepositoryNotFoundError",
        "private, in a listing": "RepositoryNotFoundError",
        "gated": "GatedRepoError",
        "gated, with a token": "GatedRepoError",
        "gated, asked": "GatedRepoError",
        "revision": "RevisionNotFoundError",
        "file": "RemoteEntryNotFoundError",
        "folder": "RemoteEntryNotFoundError",
        "bad token": "HfHubHTTPError",
        "data set": "RepositoryNotFoundError",
    }
    assert got["unknown"][1].startswith("401") and got["unknown, with a token"][1].startswith("404")
    assert "Please log in" in got["gated"][1] and "ask for access" in got["gated, with a token"][1]
    assert "Invalid credentials in Authorization header" in got["bad token"][1]


def test_tokens_open_what_they_are_allowed_and_what_is_their_own(hub, tmp_path):
    files = write_files(tmp_path / "files", {"a.txt": b"a"})
    hub.add_model("org/gated", files, gated=True)
    hub.add_dataset("someone/private", files, private=True)
    hub.allow(hub.add_token(READ, "someone"), "org/gated")
    for repo, options in {"org/gated": {}, "someone/private": {"repo_type": "dataset"}}.items():
        got = run_client(download_files, hub, tmp_path / "home", repo, ["a.txt"], options, HF_TOKEN=READ)
        assert got.value == {"a.txt": digest(b"a")}


# Writing


def client_upload(folder):
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo("me/run", private=True)
    first = api.upload_folder(repo_id="me/run", folder_path=folder, path_in_repo="out", commit_message="one").oid
    api.create_tag("me/run", tag="v1")
    api.create_branch("me/run", branch="side", revision=first)
    api.upload_file(repo_id="me/run", path_or_fileobj=b"side", path_in_repo="side.txt", revision="side")
    api.delete_file("out/config.json", "me/run")
    api.upload_folder(repo_id="me/run", folder_path=folder, path_in_repo="out", allow_patterns="*.safetensors")
    return {"first": first, "whoami": api.whoami()["name"], "last": api.model_info("me/run").sha}


def test_a_folder_is_uploaded_bit_for_bit(hub, tmp_path):
    files = {"model.safetensors": os.urandom(5000), "empty.txt": b"", "config.json": b"{}", "sub/x.bin": b"x"}
    hub.add_token(WRITE, "me", write=True)
    made = run_client(
        client_upload, hub, tmp_path / "home", str(write_files(tmp_path / "files", files)), HF_TOKEN=WRITE
    ).value
    assert made["whoami"] == "me" and made["first"] != made["last"]

    def downloaded(revision):
        options = {"revision": revision, "allow_patterns": ["out/*", "side.txt"]}
        home = tmp_path / f"home of {revision}"
        return run_client(download_snapshot, hub, home, "me/run", options, HF_TOKEN=WRITE).value

    expected = {f"out/{name}": digest(data) for name, data in files.items()}
    assert downloaded("v1") == downloaded(made["first"]) == expected
    assert downloaded("side") == expected | {"side.txt": digest(b"side")}
    assert downloaded("main") == {path: known for path, known in expected.items() if path != "out/config.json"}
    assert len(hub.seen("PUT")) == 2  # the two large files, once
    assert hub.repositories["model", "me/run"].private
    assert len(hub.repositories["model", "me/run"].commits) == 4  # the first is empty, what is there makes none


def client_forbidden(read):
    from huggingface_hub import HfApi

    from hub_client import caught

    api = HfApi()
    content = {"path_or_fileobj": b"a", "path_in_repo": "a.txt"}
    errors = {
        "without a token": caught(api.upload_file, repo_id="me/run", token=False, **content),
        "read token": caught(api.upload_file, repo_id="me/run", token=read, **content),
        "another's": caught(api.upload_file, repo_id="org/model", **content),
        "another's name": caught(api.create_repo, "org/new"),
        "no repository": caught(api.upload_file, repo_id="me/none", **content),
        "no branch": caught(api.upload_file, repo_id="me/run", revision="none", **content),
        "twice": caught(api.create_repo, "me/run"),
        "stale": caught(api.upload_file, repo_id="me/run", parent_commit="0" * 40, **content),
    }
    return {name: [error["type"], error["message"]] for name, error in errors.items()}


def test_writing_takes_a_write_token_of_the_right_owner(hub, tmp_path):
    for repo in ("me/run", "org/model"):
        hub.add_model(repo, write_files(tmp_path / "files", {"README.md": b"a"}))
    hub.add_token(WRITE, "me", write=True)
    hub.add_token(READ, "me")
    got = run_client(client_forbidden, hub, tmp_path / "home", READ, HF_TOKEN=WRITE).value
    statuses = {"read token": "403", "another's": "403", "another's name": "403", "twice": "409", "stale": "412"}
    assert {name: error for name, (error, message) in got.items()} == {
        "without a token": "RepositoryNotFoundError",
        "no repository": "RepositoryNotFoundError",
        "no branch": "RevisionNotFoundError",
        **dict.fromkeys(statuses, "HfHubHTTPError"),
    }
    assert all(status in got[name][1] for name, status in statuses.items())
    assert hub.files("me/run") == hub.files("org/model") == {"README.md": b"a"}


# The server itself


@pytest.mark.parametrize(
    "asked, status, body, told",
    [
        ("bytes=2-", 206, b"cdef", "bytes 2-5/6"),
        ("bytes=2-3", 206, b"cd", "bytes 2-3/6"),
        ("bytes=4-99", 206, b"ef", "bytes 4-5/6"),
        ("bytes=-2", 206, b"ef", "bytes 4-5/6"),
        ("bytes=6-", 416, None, "bytes */6"),
        ("lines=1-2", 200, b"abcdef", None),
    ],
)
def test_ranges(tmp_path, asked, status, body, told):
    hub = HubServer()
    hub.add_model("org/model", write_files(tmp_path, {"a.txt": b"abcdef"}))
    response, _ = hub.answer(Request("GET", "/org/model/resolve/main/a.txt", {"Range": asked}))
    assert (response.status, response.headers.get("Content-Range")) == (status, told)
    assert body is None or response.body == body


def test_what_it_does_not_know_is_a_complaint():
    hub = HubServer()
    assert hub.answer(Request("GET", "/api/spaces", {}))[0].status == 404
    assert hub.answer(Request("CONNECT", "huggingface.co:443", {}))[0].status == 502
    assert hub.answer(Request("POST", "/api/repos/create", {}, b"not JSON"))[0].status == 500
    assert [complaint.split("\n")[0] for complaint in hub.complaints] == [
        "no route for GET /api/spaces",
        "a client wanted CONNECT huggingface.co:443",
        "POST /api/repos/create: Traceback (most recent call last):",
    ]
    assert hub.answer(Request("GET", "http://datasets-server.127.0.0.1:1/info", {}))[0].status == 502
    assert len(hub.complaints) == 3


def client_elsewhere():
    import urllib.request

    from hub_client import caught

    return caught(urllib.request.urlopen, "http://example.com/")["message"]


def test_clients_reach_no_other_host(tmp_path):
    with HubServer() as hub:
        assert "502" in run_client(client_elsewhere, hub, tmp_path).value
    assert hub.complaints == ["a client wanted GET http://example.com/"]
