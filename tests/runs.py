"""Small PPO runs for tests: a configuration, a trainer, and what it logged."""

from __future__ import annotations

from builders import prompts, tiny_model, tiny_tokenizer
from ppo_lora import PPOConfig, PPOTrainer


def count_w5(completions, **kwargs):
    return [float(text.split().count("w5")) for text in completions]


def config(folder, **changes) -> PPOConfig:
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "max_steps": 4,
        "max_completion_length": 6,
        "temperature": 0.9,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
        "startup_checks": "off",
        **changes,
    }
    return PPOConfig(output_dir=str(folder), **settings)


def trainer(folder, model=None, reward_funcs=count_w5, rows=32, callbacks=None, trainer_options=None, **changes):
    return PPOTrainer(
        tiny_model() if model is None else model,
        reward_funcs,
        config(folder, **changes),
        prompts(rows),
        processing_class=tiny_tokenizer(),
        callbacks=callbacks,
        **(trainer_options or {}),
    )


def logged(made: PPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in made.state.log_history if "loss" in entry]
