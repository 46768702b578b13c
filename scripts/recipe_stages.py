"""How the small recipes run their stages: child processes without a network, each with its log, one line a stage."""

import resource
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

SCRIPTS = Path(__file__).resolve().parent
LAUNCH = ("launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
LOG_TAIL_LINES = 30


def quiet_environment(output_dir: Path) -> dict[str, str]:
    """Return the variables that keep every process on the CPU, on one thread, off the network and out of $HOME."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(output_dir / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }


def program(name: str) -> str:
    """Return the path of a console program of this interpreter's environment, also when that is not activated."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def trl_command(config: Path, root: Path, data_set: str, seed: int) -> list[str]:
    """Return the command that runs TRL's command line on `config`, which is named as TRL's command."""
    return [program("trl"), config.stem, *_options(config, root, data_set, seed)]


def ppo_command(config: Path, root: Path, data_set: str, seed: int) -> list[str]:
    """Return the command that runs scripts/ppo.py on `config`."""
    return [program("accelerate"), *LAUNCH, str(SCRIPTS / "ppo.py"), *_options(config, root, data_set, seed)]


def _options(config: Path, root: Path, data_set: str, seed: int) -> list[str]:
    """What every training takes: `root` has `base/nf4` and `data`, and gets the results in a folder of the stage."""
    return [
        *("--config", str(config)),
        *("--model_name_or_path", str(root / "base" / "nf4")),
        *("--dataset_name", str(root / "data" / data_set)),
        *("--output_dir", str(root / config.stem)),
        *("--seed", str(seed), "--disable_tqdm", "true"),
    ]


class Stages:
    """Runs named stages one after the other and prints each one's time.

    Args:
        console: where the lines go.
        log_dir: where the child processes' output goes, one file a stage.
    """

    def __init__(self, console: Console, log_dir: Path):
        self.console = console
        self.log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def stage(self, title: str) -> Iterator[list[str]]:
        """Time a stage; what the body appends to the yielded list is printed beside the time."""
        remarks: list[str] = []
        start = time.perf_counter()
        with self.console.status(f"{title} ..."):
            yield remarks
        seconds = f"{time.perf_counter() - start:6.1f} s"
        line = f"[green]done[/]  {title:<36} [cyan]{seconds}[/]  {escape(', '.join(remarks))}"
        self.console.print(line.rstrip(), highlight=False, soft_wrap=True)

    def run(self, name: str, command: Sequence[str]) -> None:
        """Run `command` to its end, its output in the log of that `name`.

        Raises:
            SystemExit: with the child's exit code, after its command and the end of its log were printed.
        """
        log = self.log_dir / f"{name}.log"
        with log.open("w", encoding="utf-8") as stream:
            code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            self._report_failure(command, log, code)
            raise SystemExit(code if code > 0 else 128 - code)

    def _report_failure(self, command: Sequence[str], log: Path, code: int) -> None:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        self.console.print(f"[red]failed[/] with exit code {code}; the end of {escape(str(log))}:", soft_wrap=True)
        self.console.print("\n".join(tail), markup=False, highlight=False, soft_wrap=True)
        self.console.print(f"the command: {shlex.join(command)}", markup=False, highlight=False, soft_wrap=True)


def peak_memory_mb() -> float:
    """Return the largest resident set of this process or any finished child, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / unit
