"""Runs recipes' commands in processes of their own, quickly: torch, TRL and this package are imported once.

    python tests/recipe_runner.py

A server, for tests/test_recipes.py. It reads jobs from its standard input, one JSON object a line: a folder, and a
list of [script, argument, ...]. For each job it forks; the child goes to the folder and runs the scripts one after the
other, as `python script argument ...` would, with their output in the folder's log.txt. The answer is a line with the
child's exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def import_once() -> None:
    """Import what every job needs. The names matter: TRL and transformers load their parts when asked for."""
    import bitsandbytes  # noqa: F401
    from trl import DatasetMixtureConfig, ModelConfig, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # noqa: F401

    import ppo_lora  # noqa: F401


def run(script: str, *arguments: str) -> None:
    """Run a script as the main program."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def run_all(folder: str, commands: list[list[str]]) -> int:
    """Run the commands in the folder; 0 if all of them ended well."""
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for command in commands:
        print("$", *command, flush=True)
        try:
            run(*command)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                print(stop.code, flush=True)
                return 1
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


def serve() -> None:
    """Answer each line of standard input."""
    import_once()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = run_all(job["folder"], job["commands"])
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
