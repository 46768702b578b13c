"""What the real client does when the local Hub breaks off, fails or is down.

Waits between its tries are noted and cut short by `hub_client`.
"""

from __future__ import annotations

import os

import pytest

from hub_client import ClientFailed, digest, download_files, run_client, write_files
from hub_server import HubServer

CHUNK = 10 * 1024 * 1024  # the client writes, and so resumes, by this many bytes


def client_download_twice(name):
    """SHA-256, or the error's name, of two tries in a row."""
    from huggingface_hub import hf_hub_download

    from hub_client import digest

    def attempt():
        try:
            return digest(hf_hub_download("org/model", name))
        except Exception as error:
            return type(error).__name__

    return [attempt(), attempt()]


def client_error(name):
    """The error of one try, and those it descends from."""
    from huggingface_hub import hf_hub_download

    from hub_client import caught

    return caught(hf_hub_download, "org/model", name)


def transfers(hub: HubServer, name: str) -> list[tuple[str | None, int]]:
    """Range and status of the requests for a file's content that were answered with it."""
    return [(seen.range, seen.status) for seen in hub.seen("GET", name) if seen.status in (200, 206)]


def test_a_large_download_that_breaks_off_goes_on_where_it_was(hub, tmp_path):
    """huggingface_hub 2.4 goes on by itself, 1.3 with the next call; both from the last whole chunk of 10 MiB."""
    data = os.urandom(CHUNK + 5000)
    hub.add_model("org/model", write_files(tmp_path / "files", {"model.safetensors": data}))
    hub.cut("org/model", "model.safetensors", after=CHUNK + 1000)
    got = run_client(client_download_twice, hub, tmp_path / "home", "model.safetensors").value
    assert got[0] in (digest(data), "RemoteProtocolError") and got[1] == digest(data)
    assert transfers(hub, "model.safetensors") == [(None, 200), (f"bytes={CHUNK}-", 206)]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_download_below_a_chunk_that_breaks_off_starts_over(hub, tmp_path, name):
    hub.add_model("org/model", write_files(tmp_path / "files", {name: b"x" * 5000}))
    hub.cut("org/model", name, after=1000)
    got = run_client(client_download_twice, hub, tmp_path / "home", name).value
    assert got[0] in (digest(b"x" * 5000), "RemoteProtocolError") and got[1] == digest(b"x" * 5000)
    assert transfers(hub, name) == [(None, 200), (None, 200)]


def test_a_download_that_never_gets_through_is_given_up(hub, tmp_path):
    """The error is the HTTP library's own, no OSError; huggingface_hub 2.4 tries six times, 1.3 once."""
    hub.add_model("org/model", write_files(tmp_path / "files", {"model.safetensors": b"x" * 5000}))
    hub.cut("org/model", "model.safetensors", after=1000, times=100)
    got = run_client(client_error, hub, tmp_path / "home", "model.safetensors")
    assert got.value["type"] == "RemoteProtocolError" and "builtins.OSError" not in got.value["is"]
    assert (len(transfers(hub, "model.safetensors")), got.waits) in [(6, [1] * 5), (1, [])]


def test_a_reset_connection_is_an_error_that_the_next_call_mends(hub, tmp_path):
    hub.add_model("org/model", write_files(tmp_path / "files", {"model.safetensors": b"x" * 5000}))
    hub.cut("org/model", "model.safetensors", after=1000, reset=True)
    got = run_client(client_download_twice, hub, tmp_path / "home", "model.safetensors").value
    assert got == ["ReadError", digest(b"x" * 5000)]


def test_errors_of_the_server_are_tried_again(hub, tmp_path):
    hub.add_model("org/model", write_files(tmp_path / "files", {"a.txt": b"a"}))
    hub.fail(status=503, times=4, matching="HEAD /org/model")
    got = run_client(download_files, hub, tmp_path / "home", "org/model", ["a.txt"], {})
    assert got.value == {"a.txt": digest(b"a")}
    assert [seen.status for seen in hub.requests] == [503, 503, 503, 503, 200, 200]
    assert got.waits == [1, 2, 4]


def test_what_was_downloaded_outlives_the_server(hub, tmp_path):
    hub.add_model("org/model", write_files(tmp_path / "files", {"a.txt": b"a", "b.txt": b"b"}))

    def read(name, **environment):
        return run_client(download_files, hub, tmp_path / "home", "org/model", [name], {}, **environment)

    read("a.txt")
    hub.down()
    assert read("a.txt").value == {"a.txt": digest(b"a")}
    assert read("a.txt", HF_HUB_OFFLINE="1").value == {"a.txt": digest(b"a")}
    with pytest.raises(ClientFailed, match="LocalEntryNotFoundError"):
        read("b.txt", HF_HUB_OFFLINE="1")
    hub.up()
    assert read("b.txt").value == {"b.txt": digest(b"b")}


def test_a_server_that_is_down_is_waited_for(hub, tmp_path):
    """23 seconds with huggingface_hub 2.4; 1.3 stumbles over the client that it closed after the first try."""
    hub.down()
    got = run_client(client_error, hub, tmp_path / "home", "a.txt")
    assert (got.value["type"], got.waits) in [("LocalEntryNotFoundError", [1, 2, 4, 8, 8]), ("RuntimeError", [1])]
    assert "Connection refused" in got.stderr
