"""Reward functions by name, from modules and from calls that make them; TRL's own in whole runs."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import sys

import pytest
import trl.rewards
from datasets import Dataset

from builders import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from ppo_lora import PPOTrainer, Scorer, load_function
from ppo_lora.function_names import reward_source
from runs import config, logged
from scoring import NoBase

MODULE = """
import functools

two = 2


def one(**kwargs):
    return [1.0]


def make(number, *, text="", **more):
    def inner(**kwargs):
        return [number, text, more]
    return inner


def make_partial(number):
    return functools.partial(one, number=number)


class Judge:
    def __init__(self, number=0):
        self.number = number

    def __call__(self, **kwargs):
        return [self.number]


def make_nothing():
    return 3
"""


@pytest.fixture(autouse=True)
def rewards_here(tmp_path, monkeypatch):
    """A module of rewards in the working directory, and one that imports what there is not."""
    (tmp_path / "rewards_named.py").write_text(MODULE)
    (tmp_path / "rewards_lacking.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])


def test_a_function_of_the_working_directory_is_found():
    assert load_function("rewards_named.one")() == [1.0]
    assert load_function("trl.rewards.think_format_reward") is trl.rewards.think_format_reward


def test_a_call_is_made():
    text = "rewards_named.make(-1.5, text='a, (b)', on=True, none=None, some=[1, {'x': 2}])"
    assert load_function(text)() == [-1.5, "a, (b)", {"on": True, "none": None, "some": [1, {"x": 2}]}]


@pytest.mark.parametrize(
    ("names", "metrics"),
    [
        (["rewards_named.make(1)"], ["make"]),
        (["rewards_named.make_partial(1)"], ["make_partial"]),
        (["rewards_named.Judge(number=2)"], ["Judge"]),
        (["rewards_named.make(1)", "rewards_named.one", "rewards_named.make(2)"], ["make_0", "one", "make_1"]),
        (
            ["trl.rewards.get_repetition_penalty_reward(2)", "trl.rewards.get_soft_overlong_punishment(8, 4)"],
            ["repetition_penalty_reward", "soft_overlong_punishment_reward"],
        ),
    ],
)
def test_metrics_have_readable_and_distinct_names(names, metrics):
    assert Scorer(NoBase(), [load_function(name) for name in names], None, 8).names == metrics


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", "expected a dotted name"),
        ("one(1)", "expected a dotted name"),
        ("a b", "expected a dotted name"),
        ("", "expected a dotted name"),
        ("my_module.my_reward[0]", "expected a dotted name"),
        ("rewards_named.make(1)(2)", "expected a dotted name"),
        ("no_such_module.one", "no module no_such_module. Write it into the working directory"),
        ("os.no_such_module.one(1)", "no module os.no_such_module"),
        ("rewards_named.three", "the module rewards_named has no function three"),
        ("rewards_named.two", "has no function two"),
        ("rewards_named.make(number=len('abc'))", "whose arguments are not all literals"),
        ("rewards_named.make(__import__('os').getcwd())", "whose arguments are not all literals"),
        ("rewards_named.make(1, **{'text': 'a'})", "whose arguments are not all literals"),
        ("rewards_named.make(*[1])", "whose arguments are not all literals"),
        ("rewards_named.make()", "which raised TypeError: make() missing 1 required positional argument"),
        ("rewards_named.make_nothing()", "which returned a int; expected a function"),
        (
            "rewards_named.one()",
            "which returned a list; expected a function. A reward function itself",
        ),
        ("trl.rewards.get_repetition_penalty_reward(3, 1.0)", "max_penalty 1.0 should not be positive"),
    ],
)
def test_what_is_refused_and_why(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_function(name)


def test_what_a_module_lacks_is_not_blamed_on_its_name():
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_function("rewards_lacking.one")


def test_a_url_stays_what_it_is():
    assert reward_source("https://somewhere/score?x=(1)") == "https://somewhere/score?x=(1)"
    assert reward_source("trl.rewards.think_format_reward") is trl.rewards.think_format_reward


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "trl.rewards.get_soft_overlong_punishment",
            "get_soft_overlong_punishment(max_completion_len=..., soft_punish_cache=...)",
        ),
        (
            "trl.rewards.get_repetition_penalty_reward",
            "get_repetition_penalty_reward(ngram_size=..., max_penalty=...)",
        ),
        ("rewards_named.make_partial", "make_partial(number=...)"),
        ("math.floor", "floor(x=...)"),
    ],
)
def test_a_factory_without_its_call_is_refused_with_the_call(name, call):
    message = re.escape(f"expected f(prompts, completions, completion_ids, **kwargs). If it makes a reward function, "
                        f"call it: {call}.")  # fmt: skip
    with pytest.raises(TypeError, match=message):
        load_function(name)
    module, _, attribute = name.rpartition(".")
    with pytest.raises(TypeError, match=message):
        Scorer(NoBase(), [getattr(importlib.import_module(module), attribute)], None, 8)


def test_a_wrapper_may_take_what_the_function_inside_does_not():
    @functools.wraps(math.floor)
    def wrapper(completions, **kwargs):
        return [float(len(text)) for text in completions]

    def every(prompts, completions, completion_ids, trainer_state, log_metric, log_extra):
        return [0.0] * len(prompts)

    assert len(Scorer(NoBase(), [wrapper, every], None, 8).names) == 2


# TRL's functions in whole runs


def _run(folder, name: str) -> dict[str, float]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": f"w{3 + i}"}], "solution": f"${i}$"} for i in range(16)]
    made = PPOTrainer(
        tiny_model(),
        [reward_source(name)],
        config(folder, num_mini_batches=1, num_ppo_epochs=1, max_steps=1),
        Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    made.train()
    return logged(made)[0]


@pytest.mark.parametrize(
    ("name", "metric", "lowest", "highest"),
    [
        ("trl.rewards.think_format_reward", "think_format_reward", 0.0, 0.0),
        (
            "trl.rewards.get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=6)",
            "soft_overlong_punishment_reward",
            -1.0,
            -1e-3,
        ),
        (
            "trl.rewards.get_repetition_penalty_reward(ngram_size=1, max_penalty=-2.0)",
            "repetition_penalty_reward",
            -2.0,
            -1e-3,
        ),
    ],
)
def test_trls_functions_reward_a_run(tmp_path, name, metric, lowest, highest):
    entry = _run(tmp_path, name)
    assert lowest <= entry[f"rewards/{metric}/mean"] <= highest
    assert entry["objective/scores"] == pytest.approx(entry[f"rewards/{metric}/mean"])


def test_trls_accuracy_reward(tmp_path):
    """Without math_verify TRL's own message comes through, with the function's name."""
    if importlib.util.find_spec("math_verify") is not None:
        assert _run(tmp_path, "trl.rewards.accuracy_reward")["rewards/accuracy_reward/mean"] == 0.0
        return
    message = "The reward function accuracy_reward raised ImportError: Please install the `math_verify` package"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        _run(tmp_path, "trl.rewards.accuracy_reward")
