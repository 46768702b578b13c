"""Every recipe in configs/: its files parse as the programs parse them, its head is right, and its commands run.

A recipe is a folder with sft.yaml, reward.yaml and ppo.yaml. Stand-ins for the models and data sets that it names are
registered in recipe_stand_ins.STAND_INS.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from trl import ModelConfig, TrlParser
from trl.scripts import reward as trl_reward
from trl.scripts import sft as trl_sft

from ppo_lora import PPOConfig
from recipe_memory import SHAPES, gib_needed
from recipe_stand_ins import STAND_INS

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("sft", "reward", "ppo")
RECIPES = sorted({path.parent.name for stage in STAGES for path in (ROOT / "configs").glob(f"*/{stage}.yaml")})
PROGRAMS = {"trl sft": [trl_sft.__file__], "trl reward": [trl_reward.__file__], "accelerate launch": [], "python": []}
"""What a command of a head begins with, and the script that it runs if none follows."""

sys.path.insert(0, str(ROOT / "scripts"))
from ppo import PPOScriptArguments  # noqa: E402

each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_stage = pytest.mark.parametrize("stage", STAGES)


def config_path(recipe: str, stage: str) -> Path:
    return ROOT / "configs" / recipe / f"{stage}.yaml"


def options(recipe: str, stage: str) -> dict[str, Any]:
    return yaml.safe_load(config_path(recipe, stage).read_text())


def head(recipe: str, stage: str) -> str:
    """The comment at the top, without its marks."""
    return re.match(r"(?:#.*\n)+", config_path(recipe, stage).read_text()).group().replace("# ", "").replace("#", "")


def commands(recipe: str, stage: str = "ppo") -> list[str]:
    """The commands in a head: its indented lines."""
    return [line.strip() for line in head(recipe, stage).splitlines() if line.startswith("  ")]


def parse(stage: str, path: Path) -> tuple[Any, ...]:
    """What the stage's program makes of a YAML; unknown keys are an error."""
    parsers = {
        "sft": trl_sft.make_parser,
        "reward": trl_reward.make_parser,
        "ppo": lambda: TrlParser((PPOScriptArguments, PPOConfig, ModelConfig)),
    }
    arguments = ["--config", str(path), "--use_cpu", "true"]  # or bf16 asks for a GPU
    return parsers[stage]().parse_args_and_config(arguments, fail_with_unknown_args=True)


deprecations = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")


# The files


def test_there_are_recipes():
    assert {"quickstart", "arithmetic", "tldr-pythia-1b", "tldr-llama-8b", "imdb", "ultrafeedback", "gsm8k"} <= set(
        RECIPES
    )


@each_recipe
def test_a_recipe_has_three_files(recipe):
    assert [stage for stage in STAGES if not config_path(recipe, stage).is_file()] == []


@deprecations
@each_stage
@each_recipe
def test_the_programs_understand_every_option(recipe, stage):
    parsed = parse(stage, config_path(recipe, stage))
    for name, value in options(recipe, stage).items():
        if name == "report_to":
            continue  # "none" becomes an empty list
        given = next(getattr(part, name) for part in parsed if hasattr(part, name))
        assert given == value or isinstance(value, dict) and value.items() <= given.items(), name


@deprecations
@each_stage
def test_an_unknown_option_is_an_error(stage, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(config_path("imdb", stage).read_text() + "no_such_option: 1\n")
    with pytest.raises(ValueError, match="no_such_option"):
        parse(stage, path)


@each_recipe
def test_the_stages_follow_each_other(recipe):
    sft, reward, ppo = (options(recipe, stage) for stage in STAGES)
    assert sft["model_name_or_path"] == reward["model_name_or_path"] == ppo["model_name_or_path"]
    assert sft.get("load_in_4bit") == reward.get("load_in_4bit") == ppo.get("load_in_4bit")
    assert ppo["policy_adapter"] == sft["output_dir"]
    assert reward["output_dir"] in (ppo.get("reward_adapter"), ppo.get("value_adapter"))
    assert reward["lora_task_type"] == "SEQ_CLS" and reward["lora_modules_to_save"] == ["score"]


@each_stage
@each_recipe
def test_the_head_has_the_commands_and_they_name_files(recipe, stage):
    given = commands(recipe, stage)
    assert given[-3:] == [
        f"trl sft --config configs/{recipe}/sft.yaml",
        f"trl reward --config configs/{recipe}/reward.yaml",
        f"accelerate launch scripts/ppo.py --config configs/{recipe}/ppo.yaml",
    ]
    assert all(command.startswith("python scripts/") for command in given[:-3]) and len(given) <= 4
    assert given == commands(recipe)
    for path in re.findall(r"(?:scripts|configs)/\S+", " ".join(given)):
        assert (ROOT / path).is_file(), path
    assert "This file:" in head(recipe, stage)


@each_recipe
def test_the_head_tells_the_memory(recipe):
    stages = {stage: options(recipe, stage) for stage in STAGES}
    for stage in STAGES:
        assert "Memory:" in head(recipe, stage)
        if stages["ppo"]["model_name_or_path"] in SHAPES:
            told = re.search(r"Memory: about (\d+) GiB of one GPU \(estimated", head(recipe, stage))
            assert int(told.group(1)) == math.ceil(gib_needed(stages))


@each_recipe
def test_the_rows_of_an_iteration_are_what_the_comment_says(recipe):
    ppo = options(recipe, "ppo")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    factors = [ppo.get(name, 1) for name in names]
    for *given, product in re.findall(r"(\d+) \* (\d+) \* (\d+) = (\d+)", config_path(recipe, "ppo").read_text()):
        assert [*map(int, given), int(product)] == [*factors, math.prod(factors)]
    assert ppo["total_episodes"] >= math.prod(factors)


@each_recipe
def test_the_paper_s_score_head(recipe):
    """Where a recipe sets how the score head starts, it is by Huang et al. 2024: std 1 / sqrt(d + 1)."""
    given = options(recipe, "reward").get("model_init_kwargs", {}).get("initializer_range")
    if recipe.startswith("tldr"):
        width = SHAPES[options(recipe, "reward")["model_name_or_path"]][1]["hidden_size"]
        assert given == pytest.approx(1 / math.sqrt(width + 1), rel=0.01)
    else:
        assert given is None


@each_recipe
def test_the_docs_list_the_recipe(recipe):
    assert f"configs/{recipe}/" in (ROOT / "docs" / "recipes.md").read_text()


# The commands, on stand-ins

FEW_STEPS = (
    "--use_cpu true --disable_tqdm true --max_steps 2 --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 1 --per_device_eval_batch_size 4 --logging_steps 1"
)
FEW_EPISODES = (
    "--use_cpu true --disable_tqdm true --per_device_train_batch_size 4 --gradient_accumulation_steps 1 "
    "--local_rollout_forward_batch_size 8 --max_completion_length 8 --logging_steps 1 --eval_steps 1"
)


def runnable(command: str, ppo: dict[str, Any]) -> list[str]:
    """A command of a head as [script, arguments ...], with options that make it short."""
    program = next(name for name in PROGRAMS if command.startswith(name + " "))
    words = [*PROGRAMS[program], *shlex.split(command.removeprefix(program))]
    if program.startswith("trl"):
        return [*words, *FEW_STEPS.split()]
    if words[0] != "scripts/ppo.py":
        return words
    two_iterations = 2 * 4 * ppo.get("num_mini_batches", 1)
    return [*words, *FEW_EPISODES.split(), "--total_episodes", str(two_iterations)]


class Runner:
    """Runs commands in a folder, each folder's in a process of its own. See recipe_runner."""

    def __init__(self, cache: Path):
        own = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("recipe_runner.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, "TOKENIZERS_PARALLELISM": "false"},
        )

    def run(self, folder: Path, job: list[list[str]]) -> None:
        self._server.stdin.write(json.dumps({"folder": str(folder), "commands": job}) + "\n")
        self._server.stdin.flush()
        code = self._server.stdout.readline().strip()
        assert code == "0", f"exit code {code}; the end of the log:\n{(folder / 'log.txt').read_text()[-5000:]}"

    def close(self) -> None:
        with self._server:
            self._server.stdin.close()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


def furnish(folder: Path, recipe: str) -> None:
    """Everything that the recipe's commands name, in `folder`."""
    assert recipe in STAND_INS, (
        f"The recipe {recipe} has no stand-ins: enter in tests/recipe_stand_ins.py, STAND_INS[{recipe!r}], what its "
        "YAMLs and its preparing command take from elsewhere."
    )
    for name in ("configs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    for name, write in STAND_INS[recipe].items():
        write(folder / name)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@each_recipe
def test_the_commands_run_from_data_to_policy(recipe, runner, tmp_path):
    furnish(tmp_path, recipe)
    ppo = options(recipe, "ppo")
    runner.run(tmp_path, [runnable(command, ppo) for command in commands(recipe)])
    sft, reward, policy = (tmp_path / options(recipe, stage)["output_dir"] for stage in STAGES)
    check_reward(recipe, reward, tmp_path / ppo["model_name_or_path"])
    check_training(json.loads((policy / "trainer_state.json").read_text())["log_history"], ppo)
    before, after = tensors(sft), tensors(policy)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)
    assert "base_model.model.score.weight" in tensors(policy / "value")


def check_reward(recipe: str, folder: Path, model: Path) -> None:
    """The head is there, started and was trained as the YAML says, and was read at EOS."""
    quantized = options(recipe, "reward").get("load_in_4bit") or "quantization" in (model / "config.json").read_text()
    found = tensors(folder)
    score = found["base_model.model.score.weight"]
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16 if quantized else torch.float32}
    ignored = version("trl").startswith("1.14.")  # `trl reward` put its own model_init_kwargs in the YAML's place then
    start = 0.02 if ignored else options(recipe, "reward").get("model_init_kwargs", {}).get("initializer_range", 0.02)
    assert score.float().std().item() == pytest.approx(start, rel=0.2)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["pad_token"] != tokenizer["eos_token"], (
        "The reward model was trained with EOS as padding: its score was read at the token before EOS, and PPO reads "
        "it at EOS. Set pad_token in reward.yaml."
    )


def check_training(history: list[dict[str, Any]], ppo: dict[str, Any]) -> None:
    """It starts at the reference, every number is finite, and it is evaluated where the YAML says so."""
    logged = [entry for entry in history if "loss" in entry]
    assert len(logged) == 2
    assert logged[0]["objective/kl"] == 0.0
    assert all(math.isfinite(value) for entry in history for value in entry.values())
    assert any("eval_objective/scores" in entry for entry in history) == (ppo.get("eval_strategy", "no") != "no")


def test_stand_ins_are_of_recipes():
    assert set(STAND_INS) <= set(RECIPES)


def test_a_recipe_without_stand_ins_is_told_what_to_do(tmp_path):
    with pytest.raises(AssertionError, match=r"STAND_INS\['new'\]"):
        furnish(tmp_path, "new")


def test_a_failing_command_shows_its_log(runner, tmp_path):
    (tmp_path / "broken.py").write_text("import sys\nprint('about to fail', *sys.argv[1:])\nraise KeyError('why')\n")
    with pytest.raises(AssertionError, match=r"(?s)exit code 1.*about to fail --now.*KeyError: 'why'"):
        runner.run(tmp_path, [["broken.py", "--now"]])
