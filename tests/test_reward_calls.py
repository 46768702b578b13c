"""Reward functions are called as TRL calls them; the asynchronous ones of a batch side by side."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
import torch

from ppo_lora import Responses, Rollout
from ppo_lora.reward_calls import RewardLog, RewardSourceError, call_functions


@pytest.fixture
def responses():
    mask = torch.ones(2, 3, dtype=torch.bool)
    rollout = Rollout(torch.arange(6).reshape(2, 3), mask, mask[:, 1:], torch.ones(2, dtype=torch.bool))
    return Responses(["one", "two"], ["uno", "due"], [[1, 2], [4, 5]], {"answer": [7, 8]}, rollout)


def test_results_come_in_the_functions_order(responses):
    async def late(**kwargs):
        await asyncio.sleep(0.01)
        return "late"

    async def early(**kwargs):
        return "early"

    assert call_functions([late, lambda **kwargs: "now", early], responses, {}) == ["late", "now", "early"]


def test_asynchronous_functions_wait_for_each_other(responses):
    """Each of them can end only after the other has begun."""
    begun = [asyncio.Event(), asyncio.Event()]

    def meeting(me):
        async def meet(**kwargs):
            begun[me].set()
            await asyncio.wait_for(begun[1 - me].wait(), 5)
            return me

        return meet

    assert call_functions([meeting(0), meeting(1)], responses, {}) == [0, 1]


def test_a_client_of_one_batch_works_in_the_next(responses):
    """All calls share a loop: a lock made in the first is not bound to another loop in the second."""
    lock = asyncio.Lock()

    async def locked(**kwargs):
        async with lock:
            await asyncio.sleep(0)
            return threading.current_thread().name

    first, second = (call_functions([locked, locked], responses, {}) for _ in range(2))
    assert first == second == ["ppo_lora reward functions"] * 2


def test_the_first_that_raises_is_named_and_the_others_are_cancelled(responses):
    cancelled = []

    async def endless(**kwargs):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def failing(**kwargs):
        raise KeyError("gold")

    with pytest.raises(RuntimeError, match="The reward function failing raised KeyError: 'gold'"):
        call_functions([endless, failing], responses, {})
    assert cancelled == [True]


@pytest.mark.parametrize("end", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_an_asynchronous_function_that_ends_itself_is_named_and_ends_no_other(responses, end):
    async def gives_up(**kwargs):
        raise end

    async def goes_on(**kwargs):
        return "here"

    message = f"The reward function gives_up raised RuntimeError: it was ended by {end.__name__}"
    with pytest.raises(RuntimeError, match=message):
        call_functions([gives_up], responses, {})
    assert call_functions([goes_on], responses, {}) == ["here"]


def test_a_synchronous_function_that_raises_leaves_nothing_waiting(responses):
    """A coroutine that nobody awaits would be a warning, and so an error."""

    async def never(**kwargs):
        raise AssertionError

    def failing(**kwargs):
        raise ValueError("no")

    with pytest.raises(RuntimeError, match="The reward function failing raised ValueError: no"):
        call_functions([never, failing], responses, {})


def test_what_names_itself_is_passed_on_as_it_is(responses):
    def server(**kwargs):
        raise RewardSourceError("The reward server X is gone.")

    with pytest.raises(RewardSourceError, match=re.escape("The reward server X is gone.") + "$"):
        call_functions([server], responses, {})


def test_logged_metrics_are_means():
    log = RewardLog(2)
    log.log_metric("accuracy", 1)
    log.log_metric("accuracy", 0.5)
    log.log_metric("length", torch.tensor(3.0))
    assert log.metrics == {"accuracy": 0.75, "length": 3.0}


def test_logged_columns_have_a_value_a_completion():
    log = RewardLog(2)
    log.log_extra("parsed", ("a", None))
    assert log.extras == {"parsed": ["a", None]}
    with pytest.raises(ValueError, match=re.escape("log_extra('parsed') has 1 values; expected 2, one a completion")):
        log.log_extra("parsed", ["a"])
