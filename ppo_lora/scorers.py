"""Where scores come from: the reward adapter on the base, and reward functions with GRPO's signature."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .roles import Role
from .shared_base import SharedBase
from .types import Prompts, Rollout

RewardFunction = Callable[..., Any]
_OWN_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")


def load_function(name: str) -> RewardFunction:
    """A reward function by its dotted name, such as ``my_module.my_reward``, also from the working directory.

    Raises:
        ValueError: there is no such module, or nothing to call under that name in it.
    """
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"reward_funcs has {name!r}; expected a dotted name such as my_module.my_reward.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ValueError(
            f"reward_funcs has {name!r}, but there is no module {error.name}. Write it into the working directory, "
            "install it, or put its folder on PYTHONPATH."
        ) from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise ValueError(f"reward_funcs has {name!r}, but the module {module} has no function {attribute}.")
    return function


@dataclass(frozen=True)
class Responses:
    """What a scorer sees of a rollout.

    Attributes:
        prompts: B prompts as the data set has them, text or messages.
        completions: B completions in the same form: text, or one assistant message.
        completion_ids: B lists of token ids, the stop token included.
        columns: the data set's other columns.
        rollout: the tokens.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    rollout: Rollout


def read_responses(prompts: Prompts, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Responses:
    """Decode a rollout for scorers and for people."""
    given = prompts.columns["prompt"]
    ids = rollout.completion_ids()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(given, texts, strict=True)
    ]
    columns = {name: values for name, values in prompts.columns.items() if name not in _OWN_COLUMNS}
    return Responses(given, completions, ids, columns, rollout)


class Scorer:
    """The weighted sum of all reward sources.

    Args:
        base: its reward role is the first source, if it has one.
        reward_funcs: functions ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or
            async. None means that the function has nothing to say about that row.
        weights: one for each source, the reward role first; all 1 if None.
        batch_size: rows per pass of the reward role.

    Raises:
        ValueError: there is no source, or the number of weights differs from the number of sources.
        TypeError: a reward function cannot be called.
    """

    def __init__(
        self,
        base: SharedBase,
        reward_funcs: Sequence[RewardFunction],
        weights: Sequence[float] | None,
        batch_size: int,
    ):
        self._base = base if Role.REWARD in base.roles else None
        self._functions = list(reward_funcs)
        self._batch_size = batch_size
        for function in self._functions:
            if not callable(function):
                raise TypeError(
                    f"reward_funcs holds {function!r}; expected functions f(prompts, completions, completion_ids, "
                    "**columns). A SEQ_CLS adapter goes to reward_adapter."
                )
        reward_role = [] if self._base is None else ["reward_adapter"]
        self.names = _distinct(reward_role + [_name(function) for function in self._functions])
        if not self.names:
            raise ValueError(
                "There is no reward source. Give reward_adapter (a SEQ_CLS adapter for the base, as `trl reward` "
                "writes) or reward_funcs (functions of prompts and completions), or both."
            )
        self.weights = [1.0] * len(self.names) if weights is None else list(weights)
        if len(self.weights) != len(self.names):
            raise ValueError(
                f"reward_weights has {len(self.weights)} numbers; expected {len(self.names)}, one for each of "
                f"{self.names}."
            )

    @property
    def models(self) -> set[str]:
        """Names of the sources that are models, and so say something else for every response."""
        are_models = [True] * (self._base is not None) + [getattr(f, "is_model", False) for f in self._functions]
        return {name for name, is_model in zip(self.names, are_models, strict=True) if is_model}

    def __call__(self, responses: Responses, **context: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Score every row.

        Args:
            responses: what to score.
            context: more keyword arguments for the functions (``trainer_state``).

        Returns:
            ``(scores, by_source)``: [B] float32, and by source name [B] float32 with NaN where it had nothing to say.

        Raises:
            ValueError, TypeError, RuntimeError: a function broke its contract; the message names it and the row.
        """
        columns = [] if self._base is None else [self._reward_role(responses.rollout)]
        alone = len(self.names) == 1
        columns += [_call(function, responses, context, alone) for function in self._functions]
        device = responses.rollout.sequences.device
        table = torch.stack([column.to(device) for column in columns], dim=1)
        silent = table.isnan().all(dim=1)
        if bool(silent.any()):
            row = int(silent.nonzero()[0])
            raise ValueError(
                f"No reward source scored row {row} (prompt {responses.prompts[row]!r}): all of {self.names} returned "
                "None. At least one has to give a number for every response."
            )
        scores = (table * torch.tensor(self.weights, device=device)).nansum(dim=1)
        return scores, dict(zip(self.names, table.unbind(dim=1), strict=True))

    @torch.no_grad()
    def _reward_role(self, rollout: Rollout) -> Tensor:
        assert self._base is not None
        pieces = zip(
            rollout.sequences.split(self._batch_size), rollout.attention_mask.split(self._batch_size), strict=True
        )
        scores = torch.cat([self._base.scores(ids, mask) for ids, mask in pieces])
        if not bool(scores.isfinite().all()):
            row = int((~scores.isfinite()).nonzero()[0])
            raise FloatingPointError(
                f"The reward adapter's score of row {row} is {scores[row].item()}. Its head may hold broken weights, "
                "or the dtype overflows (use bfloat16 or float32)."
            )
        return scores


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _distinct(names: list[str]) -> list[str]:
    """Number the names that occur more than once, so that metrics do not overwrite each other."""
    distinct: list[str] = []
    for name in names:
        numbered = [f"{name}_{i}" for i in range(2 * len(names))]
        candidates = [name] if names.count(name) == 1 else [other for other in numbered if other not in names]
        distinct.append(next(other for other in candidates if other not in distinct))
    return distinct


def _call(function: RewardFunction, responses: Responses, context: dict[str, Any], alone: bool) -> Tensor:
    """One function's rewards, [B] float32, NaN for None."""
    name = _name(function)
    try:
        result = function(
            prompts=responses.prompts,
            completions=responses.completions,
            completion_ids=responses.completion_ids,
            **{**responses.columns, **context},
        )
        if inspect.isawaitable(result):
            result = _run(result)
    except Exception as error:
        raise RuntimeError(
            f"The reward function {name} raised {type(error).__name__}: {error}. It was called with "
            f"{len(responses.prompts)} prompts and completions and the columns {sorted(responses.columns)}; it should "
            "accept **kwargs for those it does not use."
        ) from error
    return _checked(name, result, responses, alone)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, in a thread of its own: clients that functions keep stay usable, notebooks work too."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ppo_lora reward functions", daemon=True).start()
    return loop


def _run(awaitable: Any) -> Any:
    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _event_loop()).result()


def _checked(name: str, result: Any, responses: Responses, alone: bool) -> Tensor:
    rows = len(responses.prompts)
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)) or len(result) != rows:
        given = f"{len(result)} values" if isinstance(result, (list, tuple)) else f"a {type(result).__name__}"
        raise ValueError(f"The reward function {name} returned {given}; expected a list of {rows}, one a completion.")
    numbers = [_number(name, value, row, responses) for row, value in enumerate(result)]
    if alone and all(math.isnan(number) for number in numbers):
        raise ValueError(
            f"The reward function {name} returned None for all {rows} completions, so it judges nothing. Return a "
            "number for the rows it applies to, or leave the function out."
        )
    return torch.tensor(numbers, dtype=torch.float32)


def _number(name: str, value: Any, row: int, responses: Responses) -> float:
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, str) else torch.tensor(float(value), dtype=torch.float32).item()
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"The reward function {name} returned {value!r} for row {row} (completion "
            f"{responses.completions[row]!r}); expected a finite number, or None where it does not apply."
        )
    return number
