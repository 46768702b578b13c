"""Requests, responses and routes of the local Hub: from a method and a path to the function that answers.

A route is a method, a pattern and a function from the server's state and a request to a response. HEAD requests are
answered by GET's routes; the server leaves the body out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from hub_repos import HubError

if TYPE_CHECKING:
    from hub_server import HubServer


@dataclass(frozen=True)
class Request:
    """One HTTP request; `target` is a path with its query, still quoted (a whole address if meant for a proxy)."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def elsewhere(self) -> bool:
        """Whether it is meant for another host, and came because clients have this server as their proxy."""
        return not self.target.startswith("/")

    @property
    def path(self) -> str:
        return self.target if self.elsewhere else urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def form(self) -> dict[str, list[str]]:
        return parse_qs(self.body.decode())

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def asks_for(self, option: str) -> bool:
        return self.query.get(option, "").lower() in ("1", "true")


@dataclass(frozen=True)
class Response:
    """One HTTP answer; `file` is the repository's id and the path in it whose content the body is."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    file: tuple[str, str] | None = None


class Route(NamedTuple):
    method: str
    pattern: re.Pattern[str]
    answer: Callable[..., Response]
    fixed: Mapping[str, str]


ROUTES: list[Route] = []
# Of a quoted path: a branch "a/b" arrives as "a%2Fb".
_PATTERNS = {"kind": r"(?:models|datasets)", "repo": r"[^/]+/[^/]+?", "path": r".+"}


def route(method: str, pattern: str, **fixed: str) -> Callable[[Callable[..., Response]], Callable[..., Response]]:
    """Make a function answer `method` on paths like `pattern`; what it has in braces becomes named arguments."""
    named = re.sub(r"\\{(\w+)\\}", lambda m: f"(?P<{m[1]}>{_PATTERNS.get(m[1], '[^/]+')})", re.escape(pattern))

    def register(answer: Callable[..., Response]) -> Callable[..., Response]:
        ROUTES.append(Route(method, re.compile(named), answer, fixed))
        return answer

    return register


def dispatch(hub: HubServer, request: Request) -> Response:
    """Answer by the first route that fits."""
    if request.elsewhere:
        return refuse_to_forward(hub, request)
    method = "GET" if request.method == "HEAD" else request.method
    for candidate in ROUTES:
        match = candidate.pattern.fullmatch(request.path)
        if candidate.method == method and match:
            arguments = {name: unquote(value) for name, value in match.groupdict().items()}
            if "kind" in arguments:
                arguments["kind"] = arguments["kind"].removesuffix("s")
            return candidate.answer(hub, request, **arguments, **candidate.fixed)
    hub.complaints.append(f"no route for {request.method} {request.target}")
    return refusal(HubError(404, None, "Sorry, we can't find the page you are looking for."))


def refuse_to_forward(hub: HubServer, request: Request) -> Response:
    """Note that a client wanted another host.

    Not noted: `datasets` asks the data set viewer, at a host made from the endpoint's name, and goes on without it.
    """
    if "://datasets-server." not in request.target:
        hub.complaints.append(f"a client wanted {request.method} {request.target}")
    return refusal(HubError(502, None, f"The local Hub is no way to {request.target}"))


def refusal(error: HubError) -> Response:
    headers = {"X-Error-Message": error.message, **error.headers}
    if error.code is not None:
        headers["X-Error-Code"] = error.code
    return as_json({"error": error.message}, error.status, headers)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})
