"""Reward functions by their dotted names, and by calls of functions that make them."""

from __future__ import annotations

import importlib
import os
import sys

from .reward_calls import RewardFunction


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
