"""Runs `accelerate launch scripts/ppo.py` as a user does, with small numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "ppo.py"
SMALL = {
    "per_device_train_batch_size": "4",
    "num_ppo_epochs": "2",
    "max_steps": "4",
    "max_completion_length": "5",
    "learning_rate": "1e-2",
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": "true",
    "gradient_checkpointing": "false",
    "disable_tqdm": "true",
}


def launch_ppo(options: Mapping[str, str], environment: Mapping[str, str], folder: Path, fails: bool = False) -> str:
    """Run the script with `SMALL` and `options` in `folder`, and return what it printed.

    Raises:
        AssertionError: It failed, or it did not although it should.
    """
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no"]
    arguments = [part for name, value in {**SMALL, **options}.items() for part in (f"--{name}", value)]
    made = subprocess.run(
        [*launch, str(SCRIPT), *arguments],
        env={**environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = made.stdout + made.stderr
    assert (made.returncode != 0) == fails, output[-5000:]
    return output
