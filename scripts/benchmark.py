"""Measure ppo_lora beside TRL 1.12's PPO: same weights, prompts, sampling and episodes, in processes that alternate.

Writes benchmark.json, benchmark.png and benchmark.md (for docs/benchmarks.md) into the output folder. What is measured
and how is told in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

import benchmark_checks
from benchmark_report import by_workload, markdown, measure_rows, picture, terminal_table, wanted_rows
from benchmark_summary import Summary, combine, ratios, summarize_run
from benchmark_work import Work, make_base

SCRIPTS = Path(__file__).resolve().parent
TRL_VERSION = "1.12.0"
SIZES = {"fixed": {"prompts": 8, "prompt_length": 32}, "ragged": {"prompts": 16, "prompt_length": 64}}
LOG_TAIL = 2000
BEGIN, END = "<!-- scripts/benchmark.py: begin -->", "<!-- scripts/benchmark.py: end -->"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    work = Work()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=("fixed", "ragged", "both"), default="both")
    parser.add_argument("--value", choices=("separate", "shared", "both"), default="both", help="ours: value adapter")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="measure TRL 1.12 too")
    parser.add_argument("--checks", action="store_true", help="also the cost of roles, vocabulary and rows")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each kind; medians are told")
    parser.add_argument("--iterations", type=int, default=work.iterations, help="a process; the first is not counted")
    for name in ("hidden", "layers", "intermediate", "vocab", "response_length", "epochs", "micro_rows"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(work, name))
    parser.add_argument("--rollout-rows", type=int, default=work.rollout_rows, help="of a sampling or scoring batch")
    parser.add_argument("--prompts", type=int, help="rows of an iteration; default 8 fixed, 16 ragged")
    parser.add_argument("--prompt-length", type=int, help="tokens of the longest; default 32 fixed, 64 ragged")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=work.dtype)
    parser.add_argument("--quantization", choices=("none", "nf4", "int8"), default=work.quantization)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=work.device)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing (TRL's PPO ignores it)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each measured process")
    parser.add_argument("--config", action="append", default=[], metavar="NAME=JSON", help="option of our PPOConfig")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ppo_lora_benchmark"), help="bases and the peer")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--docs", type=Path, help="page to write the tables into, between its markers")
    return parser.parse_args(arguments)


def works(options: argparse.Namespace) -> list[Work]:
    """The workloads that are asked for.

    Raises:
        SystemExit: sizes do not go together.
    """
    shared = ("hidden", "layers", "intermediate", "vocab", "response_length", "epochs", "micro_rows", "rollout_rows")
    given = {name: getattr(options, name) for name in (*shared, "dtype", "quantization", "device", "iterations")}
    config = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in options.config)}
    made = []
    for name, sizes in SIZES.items():
        if options.workload in (name, "both"):
            own = {key: getattr(options, key) or default for key, default in sizes.items()}
            cache = str(options.cache.expanduser().resolve())
            made.append(Work(name, **given, **own, checkpointing=options.checkpointing, config=config, cache=cache))
            if own["prompts"] % options.micro_rows:
                raise SystemExit(f"--prompts {own['prompts']} is not a multiple of --micro-rows {options.micro_rows}.")
    return made


def install_peer(cache: Path) -> Path:
    """Put TRL 1.12.0 alone into a folder of the cache, unless it is there; everything else is this environment's.

    Raises:
        OSError: pip could not.
    """
    folder = cache / f"trl-{TRL_VERSION}"
    if not (folder / f"trl-{TRL_VERSION}.dist-info").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*pip, "--target", str(folder), f"trl=={TRL_VERSION}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return folder


def environment(options: argparse.Namespace, first_on_path: Path | None = None) -> dict[str, str]:
    """Variables of a measured process: its threads, nothing of a network, and no GPU where none is asked for."""
    path = [*([str(first_on_path)] if first_on_path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if options.device == "cpu" else {}
    return {
        **os.environ,
        **cpu,
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def run(name: str, work: Work, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Measure one workload in a process of its own.

    Args:
        name: ``trl``, ``separate`` or ``shared`` for that contender, ``roles`` for the memory of the roles.
        work: the workload.
        folder: for its files: the work, the result, the log.
        variables: of its environment.

    Raises:
        RuntimeError: the process failed; the message has the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = {"trl": "benchmark_peer.py", "roles": "benchmark_checks.py"}.get(name, "benchmark_ours.py")
    label = f"{work.name}-{name}-{work.prompts}-{work.vocab}-{work.run_seed}"
    paths = {kind: folder / f"{label}.{kind}" for kind in ("work", "json", "log")}
    work.save(paths["work"])
    command = [sys.executable, str(SCRIPTS / script), str(paths["work"]), str(paths["json"])]
    with paths["log"].open("w") as log:
        done = subprocess.run(command, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}: {paths['log'].read_text()[-LOG_TAIL:]}")
    result: dict[str, Any] = json.loads(paths["json"].read_text())
    return result


class Benchmark:
    """Runs the contenders in turn and keeps what they measured.

    Args:
        console: where each run is told.
        options: of the command line.
    """

    def __init__(self, console: Console, options: argparse.Namespace):
        self.console, self.options = console, options
        self.results: list[dict[str, Any]] = []
        self.summaries: dict[tuple[str, str], list[Summary]] = {}
        self._peer = self._install() if options.peer else None

    def _install(self) -> Path | None:
        try:
            return install_peer(self.options.cache.expanduser().resolve())
        except OSError as error:
            self.console.print(f"TRL {TRL_VERSION} cannot be installed, going on without it: {error}", markup=False)
            return None

    def contenders(self) -> list[str]:
        """Who is measured: the peer, then ours by value adapter."""
        values = ["separate", "shared"] if self.options.value == "both" else [self.options.value]
        return [*(["trl"] if self._peer else []), *values]

    def measure(self, work: Work) -> None:
        """Every contender ``repeats`` times, in turn."""
        if make_base(work):
            self.console.print(f"{work.name}: made the base in {work.base}", soft_wrap=True)
        for repeat in range(self.options.repeats):
            for name in self.contenders():
                value = "separate" if name == "trl" else name
                self._run(name, replace(work, value=value, run_seed=repeat))

    def check(self, work: Work) -> list[dict[str, Any]]:
        """What roles, vocabulary and rows cost, of the same sizes as ``work``; see benchmark_checks.py."""

        def measured(changed: Work) -> Summary:
            make_base(changed)
            runs = [self._measured("separate", replace(changed, run_seed=n)) for n in range(self.options.repeats)]
            return combine(runs)

        return benchmark_checks.measure(work, measured, lambda changed: self._process("roles", changed))

    def _run(self, name: str, work: Work) -> None:
        self.summaries.setdefault((work.name, name), []).append(self._measured(name, work))

    def _process(self, name: str, work: Work) -> dict[str, Any]:
        variables = environment(self.options, self._peer if name == "trl" else None)
        return run(name, work, self.options.output / "processes", variables)

    def _measured(self, name: str, work: Work) -> Summary:
        result = self._process(name, work)
        summary = summarize_run(name, work, result)
        self.results.append(result)
        responses = f"responses of {summary.mean_response:.1f} tokens"
        self.console.print(
            f"{work.name:<7}{name:<9}{work.prompts:>3} rows, vocabulary {work.vocab}, run {work.run_seed + 1}: "
            f"{summary.seconds:7.2f} s an iteration, {summary.peak_mib:6.0f} MiB, {responses}",
            highlight=False,
            soft_wrap=True,
        )
        return summary


def facts(results: Sequence[dict[str, Any]], work: Work) -> list[str]:
    """What the numbers were measured on."""
    versions = {name: each for result in results for name, each in result["versions"].items() if name != "trl"}
    machine = results[0]["machine"]
    return [
        f"{date.today().isoformat()}: {machine['device']}, {machine['threads']} threads, Python {machine['python']}, "
        + ", ".join(f"{name} {each}" for name, each in sorted(versions.items())),
        f"hidden {work.hidden}, layers {work.layers}, intermediate {work.intermediate}, vocabulary {work.vocab}, "
        f"{work.dtype}, quantization {work.quantization}, {work.epochs} epochs, {work.micro_rows} rows a micro-batch",
    ]


def write_page(page: Path, text: str, begin_mark: str = BEGIN, end_mark: str = END) -> None:
    """Put ``text`` between the markers of a page.

    Raises:
        SystemExit: there are none.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not end:
        raise SystemExit(f"{page} lacks the lines '{begin_mark}' and '{end_mark}', between which the tables go.")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def report(
    console: Console, benchmark: Benchmark, made: Sequence[Work], checks: list[dict[str, Any]], output: Path
) -> str:
    """Print the tables; write JSON, picture and markdown; return the markdown."""
    summaries = [combine(runs) for runs in benchmark.summaries.values()]
    wanted = [*ratios(summaries), *checks]
    told = facts(benchmark.results, made[0])
    for each in by_workload(summaries):
        console.print(terminal_table("An iteration; in brackets the floor at the measured rates", measure_rows(each)))
    console.print(terminal_table("Wanted at the default sizes", wanted_rows(wanted)))
    record = {
        "facts": told,
        "workloads": [asdict(work) for work in made],
        "summaries": [asdict(each) for each in summaries],
        "wanted": wanted,
        "processes": benchmark.results,
    }
    (output / "benchmark.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    text = markdown(summaries, wanted, told)
    (output / "benchmark.md").write_text(text, encoding="utf-8")
    picture(summaries, output / "benchmark.png")
    console.print(f"written: {output}/benchmark.json, .md, .png", highlight=False, soft_wrap=True)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = parse_arguments(arguments)
    warnings.simplefilter("ignore", FutureWarning)  # what libraries will rename is no news for the reader
    console = Console()
    made = works(options)
    options.output.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(console, options)
    try:
        for work in made:
            benchmark.measure(work)
        fixed = made[0] if made[0].name == "fixed" else replace(made[0], **SIZES["fixed"])
        checks = benchmark.check(fixed) if options.checks else []
    except RuntimeError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    text = report(console, benchmark, made, checks, options.output)
    if options.docs:
        shutil.copy(options.output / "benchmark.png", options.docs.with_suffix(".png"))
        picture_line = f"![Time by phase, and memory]({options.docs.with_suffix('.png').name})"
        write_page(options.docs, f"{text}\n{picture_line}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
