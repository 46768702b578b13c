"""Two processes train as one process with twice the rows would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from builders import save_tiny_model

RUN = Path(__file__).with_name("training_run.py")
OPTIONS = (
    "--gradient_accumulation_steps 2 --num_ppo_epochs 2 --max_completion_length 6 --temperature 0.9 "
    "--learning_rate 1e-2 --optim sgd --max_steps 4 --save_strategy no --whiten_advantages false"
).split()


def _free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def test_two_processes_agree_and_move_the_weights(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", _free_port()]
    command += [str(RUN), base, str(tmp_path / "run"), "--per_device_train_batch_size", "2", *OPTIONS]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
    tensors = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for key, tensor in tensors.items() if "lora_B" in key)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
