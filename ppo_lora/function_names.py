"""Reward functions by their dotted names, and by calls of functions that make them."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
from typing import Any

from .reward_calls import RewardFunction, check_parameters

URL_SCHEMES = ("http://", "https://")


def reward_source(name: str) -> RewardFunction | str:
    """What an entry of ``reward_funcs`` in a YAML file names: the URL of a reward server as it is, or a function.

    Raises:
        ValueError: as :func:`load_function`.
    """
    return name if name.startswith(URL_SCHEMES) else load_function(name)


def load_function(name: str) -> RewardFunction:
    """A reward function by its dotted name, such as ``my_module.my_reward``, also from the working directory.

    A call with literal arguments is made, and what it returns is the function, as in
    ``trl.rewards.get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0)``. Nothing else is evaluated.

    Raises:
        ValueError: there is no such module, or nothing to call under that name in it; or the call's arguments are no
            literals, it refuses them, or returns nothing to call.
        TypeError: it cannot be called with completions.
    """
    path, arguments = _parsed(name)
    found = _found(name, path)
    function = found if arguments is None else _made(name, found, *arguments)
    check_parameters(function)
    return function


def _parsed(name: str) -> tuple[str, tuple[list[Any], dict[str, Any]] | None]:
    """The dotted name, and the arguments of a call; None where there is no call."""
    expected = f"reward_funcs has {name!r}; expected a dotted name such as my_module.my_reward"
    try:
        node = ast.parse(name.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{expected}.") from error
    call = node if isinstance(node, ast.Call) else None
    path = _dotted(node if call is None else call.func)
    if path is None or "." not in path:
        raise ValueError(f"{expected}, or a call of one with literal arguments.")
    if call is None:
        return path, None
    try:
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        arguments = [ast.literal_eval(argument) for argument in call.args]
    except (ValueError, TypeError) as error:
        raise ValueError(_no_literals(name)) from error
    if len(keywords) != len(call.keywords):
        raise ValueError(_no_literals(name))
    return path, (arguments, keywords)


def _no_literals(name: str) -> str:
    return (
        f"reward_funcs has {name!r}, whose arguments are not all literals; expected numbers, text, True, False, None, "
        "or lists and dicts of them."
    )


def _dotted(node: ast.expr) -> str | None:
    """``a.b.c`` as text; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = _dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner is not None and isinstance(node, ast.Attribute) else None


def _found(name: str, path: str) -> RewardFunction:
    module, _, attribute = path.rpartition(".")
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


def _made(name: str, factory: RewardFunction, arguments: list[Any], keywords: dict[str, Any]) -> RewardFunction:
    """What the factory makes, under a name that says so where its own says nothing."""
    try:
        function = factory(*arguments, **keywords)
    except Exception as error:
        raise ValueError(f"reward_funcs has {name!r}, which raised {type(error).__name__}: {error}.") from error
    if not callable(function):
        raise ValueError(
            f"reward_funcs has {name!r}, which returned a {type(function).__name__}; expected a function. A reward "
            "function itself is named without parentheses."
        )
    local = "<locals>" in getattr(function, "__qualname__", "")
    if local or isinstance(function, functools.partial):
        function.__name__ = getattr(factory, "__name__", str(factory))
    return function
