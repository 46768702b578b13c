"""A run that was stopped and resumed in a new process ends with the bytes of one that was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from builders import nf4_config, save_tiny_model, tiny_tokenizer

RUN = Path(__file__).with_name("training_run.py")
OPTIONS = (
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_mini_batches 2 --num_ppo_epochs 2 "
    "--max_completion_length 6 --temperature 0.9 --learning_rate 1e-3 --value_learning_rate 3e-3 --max_steps 16 "
    "--save_steps 4 --eval_strategy steps --eval_steps 4 --logging_steps 4"
).split()


def run(base, folder, *more, code: int = 0) -> None:
    command = [sys.executable, str(RUN), str(base), str(folder), *OPTIONS, *more]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == code, result.stderr[-3000:]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = [folder / "adapter_model.safetensors", folder / "value" / "adapter_model.safetensors"]
    return {f"{i}/{key}": tensor for i, file in enumerate(files) for key, tensor in load_file(file).items()}


def metrics(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [
        {k: v for k, v in entry.items() if not k.startswith(("time/", "memory/")) and "runtime" not in k}
        for entry in history
    ]


@pytest.fixture
def base(request, tmp_path):
    folder = save_tiny_model(tmp_path / "base")
    if request.param == "nf4":
        quantized = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4_config())
        folder = str(tmp_path / "nf4")
        quantized.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


STATE = "--kl_target 0.01 --kl_horizon 40 --value_warmup_iterations 1".split()
DATA = "--stream --num_generations 2 --ptx_coef 0.5 --overlong_prompts drop --max_prompt_length 3".split()


@pytest.mark.parametrize(
    ("base", "step", "more"),
    [("float32", 4, []), ("nf4", 12, []), ("float32", 8, [*STATE, *DATA])],
    indirect=["base"],
)
def test_a_killed_run_resumes_bit_for_bit(base, step, more, tmp_path):
    """Two iterations use every prompt: steps 4 and 12 are in the middle of a pass, the first and the second one."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(base, whole, *more)
    run(base, broken, *more, "--die_at", str(step + 2), code=-signal.SIGKILL)
    assert not (broken / "adapter_model.safetensors").exists()
    run(base, broken, *more, "--resume", str(broken / f"checkpoint-{step}"))
    expected, resumed = weights(whole), weights(broken)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[key], tensor) for key, tensor in expected.items())
    assert metrics(broken / "checkpoint-16") == metrics(whole / "checkpoint-16")
    states = [(folder / "checkpoint-16" / "ppo_state.json").read_text() for folder in (whole, broken)]
    assert states[0] == states[1]
    assert json.loads(states[0]).keys() == ({"kl"} if more else set())
    for name in ("optimizer.pt", "scheduler.pt"):
        one, other = (torch.load(folder / "checkpoint-16" / name) for folder in (whole, broken))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
