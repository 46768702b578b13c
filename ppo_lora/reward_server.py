"""Rewards from a server: batches of prompts and completions as JSON over HTTP. The protocol is in docs/rewards.md."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
    wait_random,
)

from .reward_calls import RewardSourceError

TOKEN_VARIABLE = "PPO_LORA_REWARD_SERVER_TOKEN"
_LONGEST_WAIT = 30.0
_SHOWN = 200


class _Refused(Exception):
    """An answer that is no list of rewards; sent again where ``again`` says so."""

    def __init__(self, reason: str, again: bool = False):
        super().__init__(reason)
        self.again = again


class RewardServer:
    """A reward function that asks a server.

    Args:
        url: where batches are posted to. A name and password in it are sent as basic authentication; they and the
            query are in no message.
        timeout: seconds to wait for a whole answer.
        retries: how often a batch is sent again after a lost connection, a time-out, a 429 or a 5xx.
        concurrency: batches that are sent at the same time, over kept connections.
        batch_size: completions in a batch.
        first_wait: seconds before a batch is sent again; twice as long each further time, up to 30; and by chance up
            to this much more, so that not all come at once.

    Raises:
        ValueError: this is no URL of a server, or the token is nothing that a header can hold.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 60.0,
        retries: int = 5,
        concurrency: int = 8,
        batch_size: int = 32,
        first_wait: float = 0.5,
    ):
        self.url, self._address, user = _addresses(url)
        self.__name__ = self.url.partition("://")[2].rstrip("/").replace("/", "_")
        self._retries, self._concurrency, self._batch_size = retries, concurrency, batch_size
        self._first_wait = first_wait
        self._timeout = timeout
        self._token = _token()
        self._client = httpx.Client(
            timeout=timeout,
            auth=user,
            headers={} if self._token is None else {"Authorization": f"Bearer {self._token}"},
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )
        self._close = weakref.finalize(self, self._client.close)

    def close(self) -> None:
        """Close the connections. That happens by itself when the server is not used any more."""
        self._close()

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        trainer_state: Any = None,
        log_metric: Any = None,
        log_extra: Any = None,
        **columns: Sequence[Any],
    ) -> list[Any]:
        """The server's rewards, in the order of the completions.

        Raises:
            RewardSourceError: a batch got no rewards; one line with the URL and the last cause.
        """
        rows = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        batches = [
            {
                **{name: list(values[first : first + self._batch_size]) for name, values in rows.items()},
                "columns": {name: list(values[first : first + self._batch_size]) for name, values in columns.items()},
            }
            for first in range(0, len(prompts), self._batch_size)
        ]
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._all_rewards, batches, given_up)
        finally:
            given_up.set()

    def _all_rewards(self, batches: Sequence[Mapping[str, Any]], given_up: threading.Event) -> list[Any]:
        """All batches, several at a time; when one of them fails, the others are given up."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            waiting = [pool.submit(self._rewards, batch, given_up) for batch in batches]
            done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            for error in filter(None, (future.exception() for future in done)):
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise error
            return [reward for future in waiting for reward in future.result()]

    def _rewards(self, batch: Mapping[str, Any], given_up: threading.Event) -> list[Any]:
        body = json.dumps(batch, default=str).encode()
        attempts = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self._retries + 1) | stop_when_event_set(given_up),
            wait=wait_exponential(self._first_wait, _LONGEST_WAIT) + wait_random(0, self._first_wait),
            sleep=sleep_using_event(given_up),
            retry_error_callback=_outcome,
        )
        tries = 0

        def attempt() -> list[Any]:
            nonlocal tries
            tries += 1
            return self._post(body, len(batch["completions"]))

        try:
            rewards: list[Any] = attempts(attempt)
            return rewards
        except (httpx.HTTPError, _Refused) as error:
            times = "once" if tries == 1 else f"{tries} times"
            raise RewardSourceError(
                f"The reward server {self.url} gave no rewards (asked {times}): {self._cause(error)}"
            ) from None

    def _post(self, body: bytes, rows: int) -> list[Any]:
        answer = self._answer(body)
        status = answer.status_code
        if status != httpx.codes.OK:
            said = " ".join(answer.text.split())[:_SHOWN]
            raise _Refused(f"it answered {status} {said}".rstrip(), again=status == 429 or status >= 500)
        try:
            rewards = answer.json()["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _Refused('its answer is no JSON object like {"rewards": [0.5, null]}') from None
        if not isinstance(rewards, list) or len(rewards) != rows:
            given = f"{len(rewards)} rewards" if isinstance(rewards, list) else f"rewards={rewards!r:.{_SHOWN}}"
            raise _Refused(f"its answer has {given}; expected a list of {rows}, one a completion")
        return rewards

    def _answer(self, body: bytes) -> httpx.Response:
        """A whole answer. httpx's own time-out starts again with every byte that arrives."""
        until = time.monotonic() + self._timeout
        headers = {"Content-Type": "application/json"}
        with self._client.stream("POST", self._address, content=body, headers=headers) as answer:
            pieces = []
            for piece in answer.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > until:
                    raise httpx.ReadTimeout(f"no whole answer within {self._timeout:g} s")
        return httpx.Response(answer.status_code, content=b"".join(pieces))

    def _cause(self, error: Exception) -> str:
        """What went wrong, in one line without the token."""
        text = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"
        text = " ".join(text.split()).rstrip(".") + "."
        return text.replace(self._token, "***") if self._token else text


def _token() -> str | None:
    """The token of the environment, without the line's end that a file brings along."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"The environment variable {TOKEN_VARIABLE} has a character that no HTTP header can hold.")
    return token or None


def _addresses(url: str) -> tuple[str, str, tuple[str, str] | None]:
    """A URL for people (without secrets), one to post to (without the user), and the user's name and password."""
    broken = "A reward server's URL is broken; expected one such as http://localhost:8000/score."
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        known = httpx.URL(url).host.strip(".")  # which refuses names that no server can have
    except (ValueError, httpx.InvalidURL):
        raise ValueError(broken) from None
    if parts.scheme not in ("http", "https") or not host or not known or any(letter.isspace() for letter in url):
        raise ValueError(broken)
    place = f"[{host}]" if ":" in host else host
    place = place if port is None else f"{place}:{port}"
    user = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
    shown = urlunsplit((parts.scheme, place, parts.path, "", ""))
    return shown, urlunsplit((parts.scheme, place, parts.path, parts.query, "")), user


def _may_pass(error: BaseException) -> bool:
    """Whether sending a batch again may help."""
    return isinstance(error, httpx.TransportError) or (isinstance(error, _Refused) and error.again)


def _outcome(state: RetryCallState) -> Any:
    """The last attempt's, as if there had been one only."""
    assert state.outcome is not None
    return state.outcome.result()
