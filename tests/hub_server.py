"""A server on the loopback that answers as the Hugging Face Hub does, for tests with the real client libraries.

Give clients its `endpoint` as HF_ENDPOINT (see `hub_client`). Large files come from an address of their own, as from
the Hub's CDN. Left out: Xet, pull requests, multipart uploads, and all that the libraries here do not call.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import hub_routes  # noqa: F401 (its functions register themselves as routes)
from hub_http import Request, Response, dispatch, refusal
from hub_repos import Blob, HubError, Repository, read_folder


class Token(NamedTuple):
    """Whose a token is, and whether it may write."""

    value: str
    user: str
    write: bool


class Seen(NamedTuple):
    """A request that came in, and the status it was answered with."""

    method: str
    path: str
    authorized: bool
    range: str | None
    status: int


@dataclass
class Cut:
    """A file whose transfer breaks off after some bytes, and how often still."""

    file: tuple[str, str]
    after: int
    times: int
    reset: bool


@dataclass
class Failure:
    """A status for the next requests whose "METHOD /path" has `matching` in it."""

    status: int
    times: int
    matching: str
    headers: dict[str, str] = field(default_factory=dict)


class HubServer:
    """The server: repositories, tokens, faults on demand and a log of what came in.

    Use it in a `with` statement, or call `up` and `down`.

    Args:
        lfs_threshold: Files of this many bytes or more are large files, and so are *.safetensors and the like.
        page_size: Entries in one page of a listing.
    """

    def __init__(self, lfs_threshold: int = 10_000_000, page_size: int = 1000):
        self.lfs_threshold = lfs_threshold
        self.page_size = page_size
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.large_files: dict[str, Blob] = {}
        self.tokens: dict[str, Token] = {}
        self.requests: list[Seen] = []
        # What no test should let pass: requests without a route, to other hosts, and errors of the server's own.
        self.complaints: list[str] = []
        self._allowed: set[tuple[str, str]] = set()
        self._cuts: list[Cut] = []
        self._failures: list[Failure] = []
        self._lock = threading.RLock()
        self._listeners: list[_Listener] = []
        self._ports = (0, 0)

    def __enter__(self) -> HubServer:
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def up(self) -> None:
        """Listen, after `down` on the same ports as before."""
        self._listeners = [_Listener(port, self) for port in self._ports]
        self._ports = tuple(listener.server_port for listener in self._listeners)

    def down(self) -> None:
        """Finish the requests under way and refuse connections."""
        for listener in self._listeners:
            listener.stop()
        self._listeners = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def cdn(self) -> str:
        return f"http://127.0.0.1:{self._ports[1]}"

    def add_model(self, repo: str, folder: str | Path, revision: str = "main", **access: bool) -> str:
        """Make a local folder all that a branch of a model has, and return the commit's id.

        Args:
            repo: "namespace/name".
            folder: Files to copy, at whatever depth.
            revision: The branch.
            access: `gated`, `private`.
        """
        return self._add("model", repo, folder, revision, **access)

    def add_dataset(self, repo: str, folder: str | Path, revision: str = "main", **access: bool) -> str:
        """As `add_model`, for a data set."""
        return self._add("dataset", repo, folder, revision, **access)

    def _add(self, kind: str, repo: str, folder: str | Path, revision: str, **access: bool) -> str:
        with self._lock:
            repository = self.repositories.setdefault((kind, repo), Repository(kind, repo))
            for name, value in access.items():
                setattr(repository, name, value)
            files = read_folder(folder, self.lfs_threshold)
            self.large_files |= {blob.sha256: blob for blob in files.values() if blob.lfs}
            return repository.commit(revision, files, "Add files").id

    def files(self, repo: str, revision: str = "main", kind: str = "model") -> dict[str, bytes]:
        """What a repository holds, by path."""
        with self._lock:
            return {path: blob.data for path, blob in self.repositories[kind, repo].at(revision).files.items()}

    def tag(self, repo: str, name: str, revision: str = "main", kind: str = "model") -> None:
        repository = self.repositories[kind, repo]
        repository.tags[name] = repository.at(revision).id

    def add_token(self, value: str, user: str, write: bool = False) -> str:
        """Make a token known, and return it; it opens what is in the user's own namespace."""
        self.tokens[value] = Token(value, user, write)
        return value

    def allow(self, token: str, repo: str) -> None:
        """Let a token's holder have a private or gated repository, and write to it if it is a write token."""
        self._allowed.add((token, repo))

    def trusts(self, token: Token | None, repo: str) -> bool:
        """Whether a token opens what the repository keeps from the public."""
        return token is not None and (token.user == repo.split("/")[0] or (token.value, repo) in self._allowed)

    def cut(self, repo: str, path: str, after: int, times: int = 1, reset: bool = False) -> None:
        """Break the next transfers of a file off after some bytes.

        Args:
            repo: The repository's id, of a model or a data set.
            path: The file's path in it.
            after: Bytes to send first, of each transfer.
            times: How many transfers.
            reset: Reset the connection, as a machine that vanishes, instead of closing it.
        """
        self._cuts.append(Cut((repo, path), after, times, reset))

    def fail(self, status: int = 503, times: int = 1, matching: str = "", **headers: str) -> None:
        """Answer the next requests with an error.

        Args:
            status: Of the answers.
            times: How many requests.
            matching: Only those that have this in "METHOD /path".
            headers: Further headers, with _ for -.
        """
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._failures.append(Failure(status, times, matching, named))

    def seen(self, method: str, path_end: str = "") -> list[Seen]:
        """The requests so far of one method, whose path ends in some way."""
        return [seen for seen in self.requests if seen.method == method and seen.path.endswith(path_end)]

    def answer(self, request: Request) -> tuple[Response, Cut | None]:
        """The response to a request, and where its transfer is to break off if it is."""
        with self._lock:
            response = self._failure(request) or self._answer(request)
            path = unquote(request.path)
            authorized = "Authorization" in request.headers
            self.requests.append(Seen(request.method, path, authorized, request.headers.get("Range"), response.status))
            return response, self._due_cut(response) if request.method == "GET" else None

    def _answer(self, request: Request) -> Response:
        try:
            return dispatch(self, request)
        except HubError as error:
            return refusal(error)
        except Exception:
            self.complaints.append(f"{request.method} {request.target}: {traceback.format_exc()}")
            return refusal(HubError(500, None, "The local Hub has a bug; see its complaints"))

    def _failure(self, request: Request) -> Response | None:
        for failure in self._failures:
            if failure.times > 0 and failure.matching in f"{request.method} {unquote(request.path)}":
                failure.times -= 1
                return refusal(HubError(failure.status, None, "The local Hub was told to fail", failure.headers))
        return None

    def _due_cut(self, response: Response) -> Cut | None:
        for cut in self._cuts:
            if cut.times > 0 and cut.file == response.file:
                cut.times -= 1
                return cut
        return None


class _Listener(ThreadingHTTPServer):
    """One port of the server and the thread that accepts on it."""

    daemon_threads = False  # so that closing waits for the requests under way
    request_queue_size = 64

    def __init__(self, port: int, hub: HubServer):
        super().__init__(("127.0.0.1", port), _Handler)
        self.hub = hub
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may hang up
            self.hub.complaints.append(traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, has it answered, and writes the response; one request a connection."""

    protocol_version = "HTTP/1.1"
    server: _Listener
    timeout = 30  # seconds that a client may be silent

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, self.headers, body)
        response, cut = self.server.hub.answer(request)
        self._send_head(response)
        if self.command != "HEAD":
            self.wfile.write(response.body if cut is None else response.body[: cut.after])
        if cut is not None and cut.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = _handle

    def _send_head(self, response: Response) -> None:
        self.send_response(response.status)
        headers = {
            **response.headers,
            "Content-Length": str(len(response.body)),
            "Connection": "close",  # so that nothing is left open when the server goes down
            "X-Request-Id": "Root=1-local-hub",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal: `HubServer.requests` is the log."""
