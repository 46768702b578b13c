"""Runs a function in a fresh process whose Hugging Face libraries know nothing but a local Hub.

The libraries read HF_ENDPOINT and HF_HOME when they are imported, so each test's client is a process of its own.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hub_server import HubServer

TESTS = Path(__file__).resolve().parent
LONGEST_NAP = 0.02


class Outcome(NamedTuple):
    """What a client's function returned, the waits between its tries in seconds, and what it wrote to stderr."""

    value: Any
    waits: list[float]
    stderr: str


class ClientFailed(AssertionError):
    """The function raised in the client's process; the message is its traceback."""


def client_environment(server: HubServer, home: str | Path, **changes: str) -> dict[str, str]:
    """Environment variables of a process that can reach `server` only and keeps its cache in `home`.

    The server is the proxy for all other hosts and refuses: no name is looked up, and the server's complaints tell.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and not name.upper().endswith("_PROXY")
    }
    own = {
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # `datasets` does that at s3.amazonaws.com
        "HTTP_PROXY": server.endpoint,
        "HTTPS_PROXY": server.endpoint,
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")])),
    }
    return {**kept, **own, **changes}


def run_client(
    function: Callable[..., Any], server: HubServer, home: str | Path, *arguments: Any, **environment: str
) -> Outcome:
    """Call `function` in a fresh process with `home` as HF_HOME.

    Its waits are noted and cut short, because the clients wait up to 24 seconds for a server that is down.

    Args:
        function: Taken by its source, so it has to import what it uses and can use nothing around it.
        server: The Hub of that process.
        home: A folder, made if there is none; give the same one again for what was downloaded.
        arguments: For the function, as JSON can hold them.
        environment: Further environment variables, HF_TOKEN for one.

    Raises:
        ClientFailed: If the function raised.
    """
    job = {
        "source": textwrap.dedent(inspect.getsource(function)),
        "name": function.__name__,
        "arguments": arguments,
    }
    made = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=120,
        env=client_environment(server, home, **environment),
    )
    if made.returncode != 0:
        raise ClientFailed(made.stderr[-5000:])
    return Outcome(**json.loads(made.stdout.splitlines()[-1]), stderr=made.stderr)


def caught(call: Callable[..., Any], *arguments: Any, **named: Any) -> dict[str, Any]:
    """For use in the client: which error a call raises, as its class's name, those it descends from, and its text.

    Raises:
        AssertionError: If the call raised nothing.
    """
    try:
        call(*arguments, **named)
    except Exception as error:
        ancestors = [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__]
        return {"type": type(error).__name__, "is": ancestors, "message": str(error)}
    raise AssertionError("it raised nothing")


def digest(content: str | Path | bytes) -> str:
    """SHA-256 of some bytes, or of the file at a path."""
    return hashlib.sha256(content if isinstance(content, bytes) else Path(content).read_bytes()).hexdigest()


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Make a folder of files, by path in it, and return it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def download_files(repo: str, names: list[str], options: dict[str, Any]) -> dict[str, str]:
    """For `run_client`: `hf_hub_download` with `options`; SHA-256 by name."""
    from huggingface_hub import hf_hub_download

    from hub_client import digest

    return {name: digest(hf_hub_download(repo, name, **options)) for name in names}


def download_snapshot(repo: str, options: dict[str, Any]) -> dict[str, str]:
    """For `run_client`: `snapshot_download` with `options`; SHA-256 by path in the repository."""
    from pathlib import Path

    from huggingface_hub import snapshot_download

    from hub_client import digest

    top = Path(snapshot_download(repo, **options))
    return {path.relative_to(top).as_posix(): digest(path) for path in top.rglob("*") if path.is_file()}


def _note_waits() -> list[float]:
    waits: list[float] = []
    sleep = time.sleep

    def nap(seconds: float) -> None:
        if seconds > LONGEST_NAP:
            waits.append(seconds)
        sleep(min(seconds, LONGEST_NAP))

    time.sleep = nap
    return waits


def main() -> None:
    """The client's process: a job as JSON from stdin, its outcome as the last line on stdout."""
    job = json.load(sys.stdin)
    waits = _note_waits()
    namespace: dict[str, Any] = {}
    exec(compile(job["source"], job["name"], "exec"), namespace)
    value = namespace[job["name"]](*job["arguments"])
    print("\n" + json.dumps({"value": value, "waits": waits}))


if __name__ == "__main__":
    main()
