"""Measure on a GPU what no CPU shows: peaks and plans of real shapes, TRL 1.12, sampling, rates. Without a network.

Writes benchmark_gpu.json and benchmark_gpu.md into the output folder. What is measured and how is told in
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmark import LOG_TAIL, TRL_VERSION, environment, write_page
from benchmark_gpu_base import SHAPES, TINY, GpuWork, is_made
from benchmark_gpu_report import facts, markdown, table_rows
from benchmark_report import Rows, terminal_table

SCRIPTS = Path(__file__).resolve().parent
BEGIN, END = "<!-- scripts/benchmark_gpu.py: begin -->", "<!-- scripts/benchmark_gpu.py: end -->"
NO_TIME, NO_PEER = "no time left", f"TRL {TRL_VERSION} is not in the cache folder"
LENGTH, TINY_LENGTH = 512, 16
_REASON = 200


@dataclass(frozen=True)
class Case:
    """Something that is measured in a process of its own.

    Attributes:
        name: of the case.
        shape: of the base, one of ``SHAPES``.
        seconds: what it was reckoned to take on an H200, process and loading included; without them it is not begun.
        settings: of the workload.
        script: what measures it.
    """

    name: str
    shape: str
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    script: str = "benchmark_gpu_cases.py"


_SMALL = {"prompts": 8, "rollout_rows": 8, "epochs": 4}
CASES = (
    Case("peak", "llama-3-8b", 60, {"prompts": 4, "rollout_rows": 4}),
    Case("rollouts", "llama-3-8b", 95, {"prompts": 64, "rollout_rows": 64}),
    Case("small", "qwen2.5-1.5b", 45, _SMALL),
    Case("trl", "qwen2.5-1.5b", 50, _SMALL, "benchmark_gpu_peer.py"),
    Case("sampling", "qwen2.5-1.5b", 60, {"name": "ragged", "prompts": 64, "rollout_rows": 64}),
    Case("passes", "llama-3-8b", 30),
)
"""In order of importance."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="what to measure")
    parser.add_argument("--budget", type=float, default=460, help="seconds; cases that do not fit into them are left")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial, with --tiny")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script; nothing is measured")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each measured process")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ppo_lora_benchmark"), help="bases and the peer")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_gpu"))
    parser.add_argument("--docs", type=Path, help="page to write the table into, between its markers")
    return parser.parse_args(arguments)


def work_of(case: Case, options: argparse.Namespace) -> GpuWork:
    """The workload of a case."""
    length = TINY_LENGTH if options.tiny else LENGTH
    settings = {"name": "fixed", "epochs": 1, **SHAPES[case.shape], **(TINY if options.tiny else {}), **case.settings}
    return GpuWork(
        **settings,
        prompt_length=length,
        response_length=length,
        dtype="bfloat16",
        quantization="nf4",
        device=options.device,
        micro_rows=1,
        iterations=1,
        checkpointing=True,
        cache=str(options.cache.expanduser().resolve()),
    )


class Run:
    """Runs the cases while there is time, and keeps what they measured.

    Args:
        console: where each case is told.
        options: of the command line.
        now: the clock, in seconds.

    Attributes:
        results: by case; what was not measured has a ``reason``.
    """

    def __init__(self, console: Console, options: argparse.Namespace, now: Callable[[], float] = time.perf_counter):
        self.console, self.options, self._now = console, options, now
        self.results: dict[str, dict[str, Any]] = {}
        self._began = now()

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.options.budget - (self._now() - self._began)

    def measure(self) -> None:
        """All cases that are asked for."""
        for case in CASES:
            if case.name in self.options.cases:
                began = self._now()
                self.console.print(f"{case.name}: {case.shape}, {self.left:.0f} s left", highlight=False)
                result = self._measured(case)
                self.results[case.name] = {**result, "took": self._now() - began}
                self._save()
                told = result.get("reason") or "done"
                self.console.print(
                    f"{case.name}: {told}, {self._now() - began:.0f} s", markup=False, highlight=False, soft_wrap=True
                )

    @property
    def rows(self) -> Rows:
        """The table; a trial is not judged."""
        return table_rows(self.results, judged=not self._is_trial)

    @property
    def facts(self) -> list[str]:
        """What was measured on what."""
        return facts(self.results, self._is_trial)

    @property
    def _is_trial(self) -> bool:
        return self.options.tiny or self.options.device == "cpu"

    def _save(self) -> None:
        """Write what there is so far, in case that this process is stopped."""
        record = {"facts": self.facts, "rows": [dict(zip(self.rows[0], row, strict=True)) for row in self.rows[1]]}
        path = self.options.output / "benchmark_gpu.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**record, "cases": self.results}, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(self.rows, self.facts), encoding="utf-8")

    def _measured(self, case: Case) -> dict[str, Any]:
        peer = self.options.cache.expanduser().resolve() / f"trl-{TRL_VERSION}"
        if case.script == "benchmark_gpu_peer.py" and not (peer / f"trl-{TRL_VERSION}.dist-info").is_dir():
            return {"reason": NO_PEER}
        if self.left < case.seconds:
            return {"reason": NO_TIME}
        folder = self.options.output / "processes"
        folder.mkdir(parents=True, exist_ok=True)
        work, result = folder / f"{case.name}.work", folder / f"{case.name}.json"
        given = work_of(case, self.options)
        given.save(work)
        result.unlink(missing_ok=True)
        making = not is_made(given)
        failed = self._process(case, "benchmark_gpu_base.py", [str(work)], SCRIPTS.parent) if making else {}
        if not failed:
            first = peer if case.script == "benchmark_gpu_peer.py" else SCRIPTS.parent
            failed = self._process(case, case.script, [case.name, str(work), str(result)], first)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
        return {**found, **failed}

    def _process(self, case: Case, script: str, arguments: list[str], first_on_path: Path) -> dict[str, str]:
        """Run a script; ``reason`` and the end of the ``log`` where it did not come to its end."""
        log = self.options.output / "processes" / f"{case.name}-{Path(script).stem}.log"
        command = [sys.executable, str(SCRIPTS / script), *arguments]
        variables = environment(self.options, first_on_path)
        options: dict[str, Any] = {"env": variables, "stderr": subprocess.STDOUT, "timeout": max(1, self.left)}
        try:
            with log.open("w") as file:
                done = subprocess.run(command, stdout=file, check=False, **options)
        except subprocess.TimeoutExpired:
            return {"reason": "stopped at the end of the budget", "log": log.read_text(errors="replace")[-LOG_TAIL:]}
        return failure(done.returncode, log.read_text(errors="replace"))


def failure(code: int, log: str) -> dict[str, str]:
    """What a process died of, in one line, and the end of its log; nothing if it did not."""
    if not code:
        return {}
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return {"reason": f"ended with {code}: {(lines or ['no output'])[-1]}"[:_REASON], "log": log[-LOG_TAIL:]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code: 0 also where there is no GPU."""
    options = parse_arguments(arguments)
    console = Console()
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("No GPU here, so nothing is measured; `--device cpu --tiny` tries the script.", soft_wrap=True)
        return 0
    run = Run(console, options)
    run.measure()
    console.print(terminal_table("On a GPU", run.rows))
    console.print(f"written: {options.output}/benchmark_gpu.json, .md", highlight=False, soft_wrap=True)
    if options.docs:
        write_page(options.docs, markdown(run.rows, run.facts), BEGIN, END)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
