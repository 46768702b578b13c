"""scripts/ppo.py from YAML to a saved policy, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from builders import save_reward_model, save_tiny_model

ROOT = Path(__file__).resolve().parents[1]

CONFIG = """
model_name_or_path: {base}
dataset_name: {data}
output_dir: {output}
reward_funcs: [my_rewards.count_w5]
lora_r: 4
use_cpu: true
total_episodes: 32
per_device_train_batch_size: 8
num_ppo_epochs: 2
max_completion_length: 6
eval_strategy: steps
eval_steps: 2
report_to: none
"""


def _run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text("".join(f'{{"text": "w{3 + i} w{9 + i}"}}\n' for i in range(8)))
    base = save_tiny_model(folder / "base")
    data = folder / "data"
    data.mkdir()
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("".join(f'{{"prompt": "w{3 + i % 40}"}}\n' for i in range(16)))
    (folder / "my_rewards.py").write_text(
        "def count_w5(completions, **kwargs):\n    return [float(c.split().count('w5')) for c in completions]\n"
    )
    config = folder / "ppo.yaml"
    config.write_text(CONFIG.format(base=base, data=data, output=folder / "run"))
    command = [sys.executable, str(ROOT / "scripts" / "ppo.py"), "--config", str(config), *more]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_it_trains_evaluates_and_saves(tmp_path):
    result = _run(tmp_path, "--learning_rate", "1e-3", "--log_completions")
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert '"r": 4' in (tmp_path / "run" / "adapter_config.json").read_text()
    assert "Evaluation at step" in result.stdout


def test_every_kind_of_reward_source_from_the_command_line(tmp_path):
    """A model, a function and a call that makes one, shifted by demonstrations; nothing of the token is written."""
    save_reward_model(tmp_path / "judge")
    demonstrations = tmp_path / "demonstrations"
    demonstrations.mkdir()
    (demonstrations / "train.jsonl").write_text('{"prompt": "w3", "completion": "w5 w5"}\n' * 3)
    repetition = "trl.rewards.get_repetition_penalty_reward(ngram_size=1, max_penalty=-1.0)"
    result = _run(
        tmp_path,
        *("--reward_funcs", "my_rewards.count_w5", repetition),
        *("--reward_model_name_or_path", str(tmp_path / "judge")),
        *(
            "--reward_model_init_kwargs",
            '{"dtype": "float32", "token": "hf_secret"}',
            "--reward_weights",
            "0",
            "1",
            "1",
        ),
        *("--score_normalization", "dataset", "--demonstration_dataset_name", str(demonstrations)),
        *("--eval_strategy", "no"),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reward = json.loads((tmp_path / "run" / "ppo_lora.json").read_text())["reward"]
    assert reward["weights"] == {"judge": 0.0, "count_w5": 1.0, "repetition_penalty_reward": 1.0}
    assert reward["normalisation"] == {"kind": "dataset", "mean": pytest.approx(2.0 - 1 / 3)}  # 2 of 3 tokens differ
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [text for text in written if b"hf_secret" in text]


def test_a_reward_server_that_is_not_there_is_told_in_one_line(tmp_path):
    result = _run(tmp_path, "--reward_funcs", "http://me:secret@127.0.0.1:9/score", "--reward_server_retries", "0")
    assert result.returncode == 1 and "Traceback" not in result.stderr and "secret" not in result.stderr
    message = "error: The reward server http://127.0.0.1:9/score gave no rewards (asked once): ConnectError"
    assert message in result.stderr


def test_it_streams_samples_several_mixes_texts_in_and_keeps_the_best(tmp_path):
    more = {
        "dataset_streaming": "true",
        "num_generations": "2",
        "num_generations_eval": "4",
        "ptx_dataset_name": str(tmp_path / "texts"),
        "ptx_coef": "0.5",
        "load_best_model_at_end": "true",
        "metric_for_best_model": "objective/best_of_4",
        "save_strategy": "steps",
        "save_steps": "2",
        "logging_steps": "2",
    }
    result = _run(tmp_path, *(part for name, value in more.items() for part in (f"--{name}", value)))
    assert result.returncode == 0, result.stderr[-3000:]
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert "objective/best_of_4" in str(state["log_history"]) and "loss/ptx_avg" in str(state["log_history"])
    assert state["best_model_checkpoint"] == str(tmp_path / "run" / f"checkpoint-{state['best_global_step']}")


def test_a_split_that_is_not_there_is_named(monkeypatch):
    spec = importlib.util.spec_from_file_location("ppo_script", ROOT / "scripts" / "ppo.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    message = "The data set texts has the splits ['train'], not 'none'. Name one with --ptx_dataset_split."
    with pytest.raises(ValueError, match=re.escape(message)):
        script.chosen_split({"train": 1}, "texts", "ptx_dataset_split", "none")
    assert script.chosen_split({"train": 1}, "texts", "ptx_dataset_split", "train") == 1


def test_an_unknown_option_in_the_yaml_is_an_error(tmp_path):
    result = _run(tmp_path, "--no_such_option", "1")
    assert result.returncode != 0
    assert "no_such_option" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kl_horizon", "5"), "error: kl_horizon is 5, but kl_coef follows nothing without a kl_target"),
        (("--policy_adapter", "data"), "error: "),
        (("--reward_funcs", "my_rewards.nothing"), "the module my_rewards has no function nothing"),
    ],
)
def test_what_cannot_be_trained_is_told_in_one_line_and_writes_nothing(tmp_path, options, message):
    result = _run(tmp_path, *options)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
