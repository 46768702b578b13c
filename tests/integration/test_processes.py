"""Two processes take the step that one process with all the rows takes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from builders import prompts, save_tiny_model, tiny_tokenizer
from ppo_lora import PPOConfig, PPOTrainer

RUN = Path(__file__).with_name("training_run.py")
OPTIONS = (
    "--num_ppo_epochs 1 --num_mini_batches 1 --gradient_accumulation_steps 2 --max_completion_length 6 "
    "--learning_rate 1.0 --optim sgd --max_grad_norm 0 --save_strategy no "
    "--startup_checks off"
).split()


def _free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def _run(processes: int, base: str, folder: Path, *more: str) -> None:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", _free_port()]
    command += [str(RUN), base, str(folder), *OPTIONS, *more]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture
def experience(tmp_path):
    """Eight rows of different lengths, so that the processes have different numbers of tokens."""
    base = save_tiny_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    args = PPOConfig(
        str(tmp_path / "none"), per_device_train_batch_size=8, max_completion_length=6, use_cpu=True, report_to="none"
    )
    reward = lambda completions, **kwargs: [float(len(text)) for text in completions]  # noqa: E731
    made = PPOTrainer(model, reward, args, prompts(24), processing_class=tiny_tokenizer())
    rows = made.collect(0)
    tokens = rows.response_mask.sum(dim=1)
    assert tokens[:4].sum() != tokens[4:].sum()
    torch.save(asdict(rows), tmp_path / "experience.pt")
    return base, tmp_path / "experience.pt"


def test_the_step_of_two_processes_is_that_of_one(tmp_path, experience):
    base, rows = experience
    for processes, size in ((1, 4), (2, 2)):
        more = f"--per_device_train_batch_size {size} --max_steps 1 --logging_steps 1 --experience {rows}"
        _run(processes, base, tmp_path / str(processes), *more.split())
    for part in ("adapter_model.safetensors", "value/adapter_model.safetensors"):
        one, two = (load_file(tmp_path / n / part) for n in ("1", "2"))
        assert any(tensor.abs().max() > 0 for key, tensor in one.items() if "lora_B" in key or "score" in key)
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=1e-6)
    one, two = (json.loads((tmp_path / n / "trainer_state.json").read_text())["log_history"][0] for n in ("1", "2"))
    for name in ("loss", "loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "val/clipfrac_avg"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name


def test_the_mixed_step_and_the_evaluation_of_two_processes_are_those_of_one(tmp_path, experience):
    """Five evaluation prompts, so that the processes have three and two; three responses to each."""
    base, rows = experience
    more = "--max_steps 1 --ptx_coef 1.0 --num_generations 2 --num_generations_eval 3 --evaluate".split()
    for processes, size in ((1, "4"), (2, "2")):
        given = ("--per_device_train_batch_size", size, "--experience", str(rows))
        _run(processes, base, tmp_path / str(processes), *given, *more)
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("1", "2"))
    assert any(tensor.abs().max() > 0 for key, tensor in one.items() if "lora_B" in key)
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=1e-6)
    one, two = (json.loads((tmp_path / n / "evaluation.json").read_text()) for n in ("1", "2"))
    assert one.keys() == two.keys() and "eval_objective/best_of_2" in one
    for name in one.keys() - {"eval_runtime"}:
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def test_two_processes_share_the_prompts_and_sample_for_themselves(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    base = save_tiny_model(tmp_path / "base")
    _run(2, base, tmp_path / "run", "--per_device_train_batch_size", "3", "--max_steps", "2", "--logging_steps", "1")
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    seen = [(tmp_path / f"seen.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(seen[0]) == len(seen[1]) == 12
    assert sorted(seen[0] + seen[1]) == sorted(prompts(24)["prompt"])


def test_two_processes_have_the_moments_of_all_scores_and_log_what_one_of_them_saw(tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_RANK", "1")
    base = save_tiny_model(tmp_path / "base")
    more = "--per_device_train_batch_size 3 --max_steps 2 --logging_steps 1 --save_strategy steps".split()
    _run(
        2,
        base,
        tmp_path / "run",
        *more,
        "--save_steps",
        "2",
        "--score_normalization",
        "running",
        "--startup_checks",
        "warn",
    )
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "ppo_state.json").read_text())["scores"]
    history = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert state["count"] == 2 * 2 * 6
    means = [entry["objective/scores"] for entry in history]
    assert state["mean"] == pytest.approx(sum(means) / 2, abs=1e-5)
    assert [entry["rank_0"] for entry in history] == [1.0, 1.0]
    assert "rank_1" not in history[0] and history[1]["rank_1"] == 5.0
