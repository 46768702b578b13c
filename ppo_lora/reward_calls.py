"""Calling reward functions: GRPO's arguments, asynchronous ones side by side, and errors that name the function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from .responses import Responses

RewardFunction = Callable[..., Any]


class RewardSourceError(RuntimeError):
    """A reward source failed, and the message says which one and why; it is passed on as it is."""


class RewardLog:
    """What reward functions log beside their rewards, through ``log_metric`` and ``log_extra`` as TRL hands them out.

    Args:
        rows: completions of the batch.

    Attributes:
        extras: by column, one value a completion, for the table of completions.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number under a name; several of a batch are averaged."""
        self._metrics.setdefault(str(name), []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Show values beside the completions, one for each of them.

        Raises:
            ValueError: there are more or fewer.
        """
        values = list(values)
        if len(values) != self._rows:
            raise ValueError(
                f"log_extra({column!r}) has {len(values)} values; expected {self._rows}, one a completion"
            )
        self.extras[str(column)] = values

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of what was logged under each name; NaN where one of it was."""
        return {name: math.fsum(values) / len(values) for name, values in self._metrics.items()}


def function_name(function: RewardFunction) -> str:
    """What a function is called in metrics and messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def parameters_of(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """A function's parameters by name; none where they cannot be known."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def check_parameters(function: RewardFunction) -> None:
    """Refuse what cannot be called with prompts, completions and completion_ids, such as a factory without its call.

    Raises:
        TypeError: it has no such parameters.
    """
    try:
        # not those of a function that it wraps: a wrapper may pass on what it likes
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    missing = [name for name in ("prompts", "completions", "completion_ids") if name not in parameters]
    if missing:
        name, own = function_name(function), ", ".join(f"{own}=..." for own in parameters)
        raise TypeError(
            f"The reward function {name} has the parameters {[*parameters]}, and neither {' nor '.join(missing)} nor "
            "**kwargs; expected f(prompts, completions, completion_ids, **kwargs). If it makes a reward function, "
            f"call it: {name}({own})."
        )


def call_functions(functions: Sequence[RewardFunction], responses: Responses, context: dict[str, Any]) -> list[Any]:
    """What each function returns for a batch, in their order.

    Functions are called one after the other; what the asynchronous ones still have to do then runs concurrently.

    Args:
        functions: with GRPO's signature.
        responses: the batch.
        context: more keyword arguments.

    Raises:
        RuntimeError: a function raised; the message names the first one. What the others still had to do is cancelled.
    """
    results: list[Any] = []
    try:
        for function in functions:
            results.append(_called(function, responses, context))
        waiting = {i: result for i, result in enumerate(results) if inspect.isawaitable(result)}
        if waiting:
            outcomes = asyncio.run_coroutine_threadsafe(_all_of(waiting), _event_loop()).result()
            for i, outcome in outcomes.items():
                if isinstance(outcome, Exception):
                    raise _named(outcome, functions[i], responses) from outcome
                results[i] = outcome
    finally:
        for result in results:
            if inspect.iscoroutine(result):
                result.close()  # never awaited, where a function called after it raised
    return results


def _called(function: RewardFunction, responses: Responses, context: dict[str, Any]) -> Any:
    try:
        return function(
            prompts=responses.prompts,
            completions=responses.completions,
            completion_ids=responses.completion_ids,
            **{**responses.columns, **context},
        )
    except Exception as error:
        raise _named(error, function, responses) from error


def _named(error: Exception, function: RewardFunction, responses: Responses) -> Exception:
    if isinstance(error, RewardSourceError):
        return error
    return RuntimeError(
        f"The reward function {function_name(function)} raised {type(error).__name__}: {error}. It was called with "
        f"{len(responses.prompts)} prompts and completions and the columns {sorted(responses.columns)}; it should "
        "accept **kwargs for those it does not use."
    )


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, in a thread of its own: clients that functions keep stay usable, notebooks work too."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ppo_lora reward functions", daemon=True).start()
    return loop


async def _all_of(waiting: dict[int, Awaitable[Any]]) -> dict[int, Any]:
    """The results of all, or the exceptions of those that raised before the others were cancelled."""

    async def wait(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except Exception:
            raise
        except BaseException as error:  # a SystemExit would end the loop, and all would wait for ever
            raise RuntimeError(f"it was ended by {type(error).__name__}") from error

    tasks = {i: asyncio.create_task(wait(awaitable)) for i, awaitable in waiting.items()}
    done, pending = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return {i: task.exception() or task.result() for i, task in tasks.items() if task in done}
