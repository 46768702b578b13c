"""A small PPO run as a program of its own, for tests that need fresh processes.

training_run.py BASE OUTPUT_DIR [--resume CHECKPOINT] [--die_at STEP] [--experience FILE] [--stream]
    [--evaluate] [--option value ...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from builders import prompts, tiny_tokenizer  # noqa: E402
from ppo_lora import Experience, PPOConfig, PPOTrainer  # noqa: E402


def count_w5(completions, prompts, trainer_state, log_metric, **kwargs):
    rank = int(os.environ.get("RANK", 0))
    if "LOG_RANK" in os.environ and (rank == 0 or trainer_state.global_step > 0):
        log_metric(f"rank_{rank}", 1.0 + 4.0 * rank)  # what one process logs and the other does not
    if "SEEN" in os.environ:
        with open(f"{os.environ['SEEN']}.{os.environ['RANK']}", "a") as file:
            file.writelines(f"{prompt}\n" for prompt in prompts)
    return [float(text.split().count("w5")) for text in completions]


class DieAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    own = argparse.ArgumentParser()
    own.add_argument("base")
    own.add_argument("output_dir")
    own.add_argument("--resume")
    own.add_argument("--die_at", type=int, default=-1)
    own.add_argument("--experience")
    own.add_argument("--stream", action="store_true")
    own.add_argument("--evaluate", action="store_true")
    given, rest = own.parse_known_args()
    fixed = ["--output_dir", given.output_dir, "--use_cpu", "--report_to", "none", "--disable_tqdm", "true"]
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses([*fixed, *rest])
    trainer = PPOTrainer(
        AutoModelForCausalLM.from_pretrained(given.base),
        count_w5,
        args,
        prompts(24).to_iterable_dataset().shuffle(seed=5, buffer_size=9) if given.stream else prompts(24),
        prompts(5),
        tiny_tokenizer(),
        callbacks=[DieAt(given.die_at)],
        ptx_dataset=Dataset.from_dict({"text": prompts(10)["prompt"]}) if args.ptx_coef else None,
    )
    if given.evaluate:
        metrics = trainer.evaluate()
        if trainer.is_world_process_zero():
            Path(given.output_dir).mkdir(parents=True, exist_ok=True)
            (Path(given.output_dir) / "evaluation.json").write_text(json.dumps(metrics))
    if given.experience:
        everything = Experience(**torch.load(given.experience))
        size = len(everything) // args.world_size
        mine = everything.select(range(args.process_index * size, (args.process_index + 1) * size))
        trainer.collect = lambda iteration: mine
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
