"""Running means and the clock."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import lawful
from ppo_lora.metrics import PhaseClock, RunningMeans


def test_mean_by_hand():
    means = RunningMeans()
    means.add({"a": 1.0, "b": torch.tensor(10.0)})
    means.add({"a": 2})
    assert means.pop() == {"a": 1.5, "b": 10.0}


def test_weights_by_hand():
    means = RunningMeans()
    means.add({"a": 1.0, "b": 4.0}, weight=3)
    means.add({"a": 5.0}, weight=torch.tensor(1))
    assert means.pop() == {"a": 2.0, "b": 4.0}


observations = st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 50)), min_size=1, max_size=10)


@given(observations)
@lawful
def test_mean_equals_the_definition(pairs):
    means = RunningMeans()
    for value, weight in pairs:
        means.add({"a": value}, weight=weight)
    expected = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    assert means.pop()["a"] == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_pop_starts_anew():
    means = RunningMeans()
    means.add({"a": 1.0, "b": 2.0})
    means.pop()
    assert means.pop() == {}
    means.add({"a": 7.0})
    assert means.pop() == {"a": 7.0}


def test_reduce_sees_sums_and_weights():
    means = RunningMeans()
    means.add({"a": 1.0, "b": 3.0}, weight=2)
    other_process = torch.tensor([[8.0, 2.0], [0.0, 4.0]])
    assert means.pop(lambda totals: totals + other_process) == {"a": 2.5, "b": 1.0}


def test_no_graph_is_kept():
    def watching(totals):
        assert not totals.requires_grad
        return totals

    parameter = torch.tensor(2.0, requires_grad=True)
    for value, weight in ((parameter * 3, 1.0), (6.0, parameter)):
        means = RunningMeans()
        means.add({"a": value}, weight=weight)
        assert means.pop(watching) == {"a": 6.0}


def test_later_changes_of_a_tensor_do_not_count():
    value = torch.tensor(1.0)
    means = RunningMeans()
    means.add({"a": value})
    value.fill_(100.0)
    assert means.pop() == {"a": 1.0}


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand: ``clock.now``."""
    clock = PhaseClock()
    clock.now = 100.0
    monkeypatch.setattr("ppo_lora.metrics.time.perf_counter", lambda: clock.now)
    return clock


def test_phases_by_hand(clock):
    for now, phase in ((100.0, "sampling"), (103.0, "scoring"), (104.5, "sampling"), (105.0, "updating")):
        clock.now = now
        clock.enter(phase)
    clock.now = 112.0
    assert clock.stop() == {"sampling": 3.5, "scoring": 1.5, "updating": 7.0}


def test_a_stopped_clock_stands(clock):
    clock.enter("sampling")
    clock.now = 101.0
    clock.stop()
    clock.now = 150.0
    assert clock.stop() == {}
    clock.enter("scoring")
    clock.now = 152.0
    assert clock.stop() == {"scoring": 2.0}


def test_names_that_only_another_process_saw_are_reduced_too():
    """Both processes have to hand the same numbers of sums to the reduction, in the same order."""
    means = RunningMeans()
    means.add({"b": 3.0})
    seen = []

    def reduce(totals):
        seen.append(totals.tolist())
        return totals + torch.tensor([[8.0, 2.0], [0.0, 0.0]])

    assert means.pop(reduce, lambda names: [*names, "a", "b"]) == {"a": 4.0, "b": 3.0}
    assert seen == [[[0.0, 0.0], [3.0, 1.0]]]
    assert means.pop(reduce, lambda names: [*names, "a", "b"]) == {"a": 4.0}
    assert means.pop() == {}


def test_shares_by_hand():
    """This process saw a once, the other a twice and b once: each then has half of all."""
    means = RunningMeans()
    means.add({"a": 3.0})
    other_process = torch.tensor([[8.0, 2.0], [5.0, 1.0]])
    means.spread(lambda totals: totals + other_process, lambda names: [*names, "a", "b"], processes=2)
    assert means.state_dict() == {"a": [5.5, 1.5], "b": [2.5, 0.5]}
    assert means.pop() == {"a": 11 / 3, "b": 5.0}


def test_the_state_comes_back_to_the_last_bit():
    means, again = RunningMeans(), RunningMeans()
    assert means.state_dict() == {}
    means.add({"a": 0.1, "b": 1 / 3}, weight=7)
    again.load_state_dict(json.loads(json.dumps(means.state_dict())))
    for each in (means, again):
        each.add({"a": 0.7}, weight=3)
    assert again.pop() == means.pop()
