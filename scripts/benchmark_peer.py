"""Measures TRL 1.12's PPO on one workload, in a process of its own, with that TRL first on PYTHONPATH.

`python benchmark_peer.py WORK.json RESULT.json`. Its train() is one method, so phases are told apart by wrapping the
functions that it calls, from outside (benchmark_watch.py). It knows nothing of ppo_lora.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmark_measure import PeakMemory, better, machine_rates, write_result
from benchmark_watch import Watch
from benchmark_work import DTYPES, Work, build_tokenizer, lora_options, model_options, prompt_ids

TRL_VERSION = "1.12.0"
PACKAGES = ("trl", "torch", "transformers", "peft")
_IMPORTED = (LlamaForCausalLM, LlamaForSequenceClassification)  # transformers imports lazily


def configuration(work: Work) -> PPOConfig:
    """The workload as TRL's PPOConfig; all values that ours has too are the same.

    With ``bf16`` it casts the norms of a 4-bit policy to float32, and then cannot sample from it: the output head gets
    float32. Without, a bfloat16 base computes in bfloat16 all the same.
    """
    return PPOConfig(
        output_dir=f"{work.cache}/runs/peer",
        per_device_train_batch_size=work.micro_rows,
        gradient_accumulation_steps=work.prompts // work.micro_rows,
        num_mini_batches=1,
        num_ppo_epochs=work.epochs,
        total_episodes=work.prompts * work.iterations,
        local_rollout_forward_batch_size=work.rollout_rows,
        response_length=work.response_length,
        stop_token="eos",
        temperature=1.0,
        learning_rate=1e-5,
        kl_coef=0.05,
        gradient_checkpointing=work.checkpointing,
        num_sample_generations=0,
        bf16=DTYPES[work.dtype] != DTYPES["float32"] and work.quantization != "nf4",
        use_cpu=work.device == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=work.run_seed,
    )


def scalar_model(work: Work, quantized: bool) -> Any:
    """A full model with one output on the base's weights, as TRL's users give for value and reward."""
    torch.manual_seed(work.seed + 1)
    return AutoModelForSequenceClassification.from_pretrained(
        work.base, num_labels=1, **model_options(work, quantized)
    )


def policy_model(work: Work) -> Any:
    """The base, on which the trainer puts the policy's adapter."""
    return AutoModelForCausalLM.from_pretrained(work.base, **model_options(work))


def build(work: Work, policy: Any = policy_model, scalar: Any = scalar_model) -> tuple[PPOTrainer, Watch]:
    """The trainer with its three models, watched. The value model is trained in full, so it is never quantized.

    ``policy`` and ``scalar`` load them, as :func:`policy_model` and :func:`scalar_model` do.
    """
    watch = Watch(work.device)
    trainer = PPOTrainer(
        args=configuration(work),
        processing_class=build_tokenizer(work.vocab),
        model=policy(work),
        ref_model=None,
        reward_model=scalar(work, True),
        value_model=scalar(work, False),
        train_dataset=Dataset.from_dict({"input_ids": prompt_ids(work)}),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora_options()),
        callbacks=[watch],
    )
    for backbone in (trainer.policy_model.get_base_model(), trainer.value_model, trainer.reward_model):
        watch.counter.attach(backbone.model)
    watch.attach_value(trainer.value_model.model)
    ppo_trainer.batch_generation = watch.generation(ppo_trainer.batch_generation)
    ppo_trainer.forward = watch.forward(ppo_trainer.forward)
    trainer.accelerator.backward = watch.backward(trainer.accelerator.backward)
    trainer.optimizer.step = watch.step(trainer.optimizer.step)
    return trainer, watch


def measure(work: Work) -> dict[str, Any]:
    """Train, and return what was seen."""
    rates = machine_rates(work)
    memory = PeakMemory(work.device)
    trainer, watch = build(work)
    loaded = memory.read()
    trainer.train()
    peak = memory.read()
    return {
        "library": "trl",
        "iterations": watch.seen,
        "padding": watch.counter.counts(),
        "peak_mib": peak,
        "peak_loading_mib": loaded,
        "rates": better(rates, machine_rates(work)),
    }


def main(work_file: str, result_file: str) -> None:
    """Measure what `work_file` says and write `result_file`."""
    if trl.__version__ != TRL_VERSION:
        raise SystemExit(f"TRL is {trl.__version__}; expected {TRL_VERSION}, the last with PPO, first on PYTHONPATH.")
    work = Work.load(work_file)
    write_result(result_file, work, measure(work), PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
