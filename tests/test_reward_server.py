"""Rewards over HTTP: what is sent, what may come back, when it is sent again, and what an error says."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

import pytest

from builders import tiny_tokenizer
from ppo_lora import Scorer
from ppo_lora.reward_calls import RewardSourceError
from ppo_lora.reward_models import reward_functions
from ppo_lora.reward_server import TOKEN_VARIABLE, RewardServer, _Refused
from reward_server_reference import Handler
from runs import config, logged, trainer
from scoring import NoBase, responses_of

PROMPTS = [f"p{i}" for i in range(7)]
COMPLETIONS = ["w " * i for i in range(7)]
IDS = [[i, 1] for i in range(7)]


@dataclass
class Served:
    """A server, and what it was asked."""

    port: int
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    connections: set = field(default_factory=set)
    busiest: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score"


@contextmanager
def serving(answers=(), delay=0.0):
    """The reference server; ``answers`` (status, body) are given first, None for a connection that is cut."""
    left, lock, inside = list(answers), threading.Lock(), []

    class Watched(Handler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                inside.append(1)
                served.busiest = max(served.busiest, len(inside))
                served.requests.append(request)
                served.headers.append(dict(self.headers))
                served.connections.add(self.client_address)
                answer = left.pop(0) if left else (200, {"rewards": self.judge(request)})
            time.sleep(delay)
            with lock:
                inside.pop()
            if answer is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.reply(*answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Watched)
    server.daemon_threads = True
    served = Served(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def ask(url: str, rows: int = 7, columns=None, **options):
    server = RewardServer(url, first_wait=0.001, **options)
    try:
        return asyncio.run(
            server(PROMPTS[:rows], COMPLETIONS[:rows], IDS[:rows], trainer_state=object(), **(columns or {}))
        )
    finally:
        server.close()


def test_rewards_come_in_order_whatever_the_batches():
    for batch_size in (1, 3, 32):
        with serving() as served:
            assert ask(served.url, batch_size=batch_size) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
            assert len(served.requests) == -(-7 // batch_size)


def test_what_is_sent():
    with serving() as served:
        ask(served.url, columns={"answer": list("abcdefg"), "odd": [1j] * 7}, batch_size=4)
    first = min(served.requests, key=lambda request: request["prompts"])
    assert first == {
        "prompts": PROMPTS[:4],
        "completions": COMPLETIONS[:4],
        "completion_ids": IDS[:4],
        "columns": {"answer": ["a", "b", "c", "d"], "odd": ["1j"] * 4},
    }
    assert served.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in served.headers[0]


def test_requests_are_concurrent_and_bounded_and_connections_are_kept():
    with serving(delay=0.03) as served:
        server = RewardServer(served.url, batch_size=1, concurrency=3)
        for _ in range(2):
            asyncio.run(server(PROMPTS, COMPLETIONS, IDS))
        server.close()
    assert len(served.requests) == 14
    assert served.busiest == 3
    assert len(served.connections) == 3


@pytest.mark.parametrize("answer", [(429, {}), (500, {}), (503, "busy"), None])
def test_what_may_pass_is_sent_again(answer):
    with serving([answer, answer]) as served:
        assert ask(served.url, 2, retries=2) == [0.0, 1.0]
    assert len(served.requests) == 3 and served.requests[0] == served.requests[2]


def test_a_time_out_is_sent_again():
    with serving(delay=0.3) as served:
        with pytest.raises(RewardSourceError, match=r"\(asked 2 times\): ReadTimeout: timed out\.$"):
            ask(served.url, 1, retries=1, timeout=0.05)
    assert len(served.requests) == 2


@contextmanager
def saying(*pieces: bytes, pause: float = 0.0):
    """A server that gives this answer to every connection, piece by piece; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.recv(2**16)
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(pause)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/score"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_answer_that_trickles_in_is_over_its_time():
    started = time.monotonic()
    with saying(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n", *[b" "] * 40, pause=0.05) as url:
        with pytest.raises(RewardSourceError, match=r"ReadTimeout: no whole answer within 0.2 s\."):
            ask(url, 1, timeout=0.2, retries=0)
        assert time.monotonic() - started < 1.0


def test_json_that_is_nested_too_deeply_is_no_answer():
    body = b'{"rewards": ' + b"[" * 100_000
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with saying(head + body) as url, pytest.raises(RewardSourceError, match="its answer is no JSON object like"):
        ask(url, 1, retries=0)


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_what_will_not_pass_is_not_sent_again(status):
    with serving([(status, {"error": "no such\njudge"})]) as served:
        message = (
            f'The reward server {served.url} gave no rewards (asked once): it answered {status} {{"error": "no such'
        )
        with pytest.raises(RewardSourceError, match="^" + re.escape(message)):
            ask(served.url, 1)
    assert len(served.requests) == 1


def test_retries_come_to_an_end():
    with serving([(503, "busy")] * 9) as served:
        message = f'The reward server {served.url} gave no rewards (asked 4 times): it answered 503 "busy".'
        with pytest.raises(RewardSourceError, match="^" + re.escape(message) + "$"):
            ask(served.url, 1, retries=3)
    assert len(served.requests) == 4


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RewardSourceError, match=rf"{port}/x gave no rewards \(asked 2 times\): ConnectError"):
        ask(f"http://127.0.0.1:{port}/x", 1, retries=1)


def test_one_failed_batch_gives_the_others_up():
    """The first batches would be sent again for minutes; the last one is refused for good."""
    answers = [(503, {})] * 40
    with serving([*answers]) as served:
        server = RewardServer(served.url, batch_size=1, concurrency=7, retries=50, first_wait=20.0)
        server._post = _refusing_last(server._post)
        started = time.monotonic()
        with pytest.raises(RewardSourceError, match="asked once"):
            asyncio.run(server(PROMPTS, COMPLETIONS, IDS))
        server.close()
    assert time.monotonic() - started < 5


def _refusing_last(post):
    def patched(body, rows):
        if b"p6" in body:
            time.sleep(0.1)
            raise _Refused("no")
        return post(body, rows)

    return patched


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"scores": [1.0, 2.0]}, 'its answer is no JSON object like {"rewards": [0.5, null]}.'),
        ([1.0, 2.0], 'its answer is no JSON object like {"rewards": [0.5, null]}.'),
        ({"rewards": [1.0]}, "its answer has 1 rewards; expected a list of 2, one a completion."),
        ({"rewards": 3}, "its answer has rewards="),
    ],
)
def test_answers_that_are_no_rewards(answer, message):
    with serving([(200, answer)]) as served, pytest.raises(RewardSourceError, match=re.escape(message)):
        ask(served.url, 2)


def test_the_token_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "very-secret")
    with serving([(403, "very-secret is not known")]) as served:
        with pytest.raises(RewardSourceError, match=re.escape('403 "*** is not known"')) as caught:
            ask(served.url, 1)
    assert served.headers[0]["Authorization"] == "Bearer very-secret"
    assert "very-secret" not in str(caught.value) and "very-secret" not in repr(vars(caught.value))


def test_a_token_with_the_end_of_a_line_is_sent_without_it(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "very-secret\n")
    with serving() as served:
        ask(served.url, 1)
    assert served.headers[0]["Authorization"] == "Bearer very-secret"


@pytest.mark.parametrize("token", ["very\nsecret", "very-s\u00e9cret"])
def test_a_token_that_no_header_can_hold_is_told_without_it(monkeypatch, token):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ValueError, match=f"{TOKEN_VARIABLE} has a character that no HTTP header can hold") as caught:
        RewardServer("http://localhost/score")
    assert "cret" not in str(caught.value)


def test_secrets_of_the_url_are_sent_and_never_shown(caplog):
    caplog.set_level("DEBUG")
    with serving([(404, "")]) as served:
        url = served.url.replace("http://", "http://me:p%40ss@") + "?key=hidden"
        with pytest.raises(RewardSourceError) as caught:
            ask(url, 1)
    assert served.headers[0]["Authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert f"The reward server {served.url} gave" in str(caught.value)
    assert not re.search("p@ss|p%40ss|me:", caplog.text + str(caught.value)) and "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://", "http:///score", "https://user:secret@:1/x", "http://host:port/x", "http://[::1/secret"),
        *("http://local host/x", "http://host/a\nb", "http://xn--/x", "http://../x", "http://\N{SNOWMAN}.example/x"),
    ],
)
def test_a_broken_url_is_told_without_its_secrets(url):
    with pytest.raises(ValueError, match="A reward server's URL is broken") as caught:
        RewardServer(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://localhost:8000/score", "localhost:8000_score"),
        ("https://me:secret@judge.example/a/b/?key=x", "judge.example_a_b"),
        ("http://[::1]:80", "[::1]:80"),
    ],
)
def test_metrics_are_named_after_the_address(url, name):
    server = RewardServer(url)
    assert server.__name__ == name
    server.close()


def test_options_reach_the_server(tmp_path):
    args = config(
        tmp_path,
        reward_server_timeout=7.5,
        reward_server_retries=2,
        reward_server_concurrency=3,
        reward_server_batch_size=16,
    )
    (server,) = reward_functions("http://localhost:1/x", None, args)
    assert (server._client.timeout.read, server._retries, server._concurrency, server._batch_size) == (7.5, 2, 3, 16)
    server.close()


def test_a_run_is_rewarded_by_a_server_beside_a_function(tmp_path):
    with serving() as served:
        made = trainer(tmp_path, reward_funcs=[served.url, lambda completions, **kwargs: [1.0] * len(completions)])
        made.train()
        made.scorer._functions[0].close()
    entry = logged(made)[0]
    words = [len(text.split()) for text in made._scored.responses.completions]
    name = f"127.0.0.1:{served.port}_score"
    assert entry[f"rewards/{name}/mean"] == pytest.approx(sum(words) / len(words))
    assert entry["objective/scores"] == pytest.approx(entry[f"rewards/{name}/mean"] + 1.0)


def test_null_and_rewards_of_spans_come_through(tmp_path):
    responses = responses_of(["w3", "w4"], [[7, 8, 9, 1], [5, 1, 0, 0]], tiny_tokenizer())
    with serving([(200, {"rewards": [[[[0, 2], 1.5]], None]})]) as served:
        server = RewardServer(served.url)
        judgement = Scorer(NoBase(), [server, lambda **kwargs: [1.0, 2.0]], None, 8).judge(responses)
        server.close()
    assert judgement.scores.tolist() == [2.5, 2.0] and judgement.steps[0].tolist() == [1.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_an_answer_that_is_not_finite_is_named(value):
    responses = responses_of(["w3"], [[7, 1]], tiny_tokenizer())
    with serving([(200, {"rewards": [float(value)]})]) as served:
        server = RewardServer(served.url)
        with pytest.raises(ValueError, match="for row 0 .*expected a finite number, or None"):
            Scorer(NoBase(), [server], None, 8).judge(responses)
        server.close()
