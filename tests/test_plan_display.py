"""What is said of the plan at the start of a run, and of the memory at its end."""

from __future__ import annotations

import pytest
from rich.console import Console

from bases import make_base
from measured_memory import PROMPT, plan_config
from ppo_lora import MemoryPlan, plan_display
from ppo_lora.memory_plan import SIZES, Lever
from ppo_lora.plan_display import measured_peak, plan_report, startup_plan


def shown(renderable, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_small_base_on_the_cpu_is_not_planned(tmp_path):
    assert startup_plan(make_base(), plan_config(tmp_path), PROMPT) is None


@pytest.mark.parametrize("kind", ["float32", "nf4-double", "int8"])
def test_a_loaded_base_is_planned_in_one_line(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(plan_display, "_WORTH_A_PLAN", 0)
    text = str(startup_plan(make_base(kind=kind), plan_config(tmp_path), PROMPT))
    assert text.startswith("planned peak ") and " MiB in " in text


def test_a_plan_that_fails_stops_no_run(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(plan_display, "_WORTH_A_PLAN", 0)
    monkeypatch.setattr(plan_display, "plan_memory", fail)
    assert str(startup_plan(make_base(), plan_config(tmp_path), PROMPT)) == "memory not planned: no such kernel"


def test_the_report_says_what_does_not_fit():
    parts = {"unquantized weights": 2**31, "KV cache": 2**20}
    plan = MemoryPlan(parts, {"sampling": 2**32, "update": 2**33}, gpu=2**33, largest={"x": 0}, given={"x": 4})
    text = shown(plan_report(plan))
    for words in ("2.00 GiB", "1.00 MiB", "8.00 GiB in update", "does not fit", "none"):
        assert words in text
    assert "does" not in shown(plan_report(MemoryPlan(parts, {"update": 2**30})))


def test_a_report_has_a_line_for_each_thing_on_a_narrow_terminal():
    parts = {"unquantized weights": 2**35, "activations, sampling": 2**30, "logits chunk": 2**30}
    levers = (
        Lever("gradient checkpointing off", "gradient_checkpointing: false", -(2**34)),
        Lever("half the sampling batch", "local_rollout_forward_batch_size: 128", 2**30),
    )
    sizes = dict.fromkeys(SIZES, 8192)
    plan = MemoryPlan(parts, {"sampling": 2**36}, gpu=2**36, largest=sizes, given=sizes, levers=levers)
    lines = shown(plan_report(plan), 80).rstrip().split("\n")
    tables = [[line for line in block.split("\n")] for block in "\n".join(map(str.rstrip, lines)).split("\n\n")]
    assert [len(table) for table in tables] == [1 + len(parts), 2, 1, 1 + len(SIZES), 1 + len(levers)]
    assert tables[-1][1].split("  ")[-1] == "gradient_checkpointing: false"


def test_measured_peak_says_which_memory():
    assert "iB" in str(measured_peak())
