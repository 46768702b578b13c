"""PPO with one base and a LoRA adapter per role.

accelerate launch scripts/ppo.py --config configs/quickstart/ppo.yaml [--option value ...]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from ppo_lora import HubError, PPOConfig, PPOTrainer, RewardSourceError, StartupError, hub_errors, reward_source


@dataclass
class PPOScriptArguments(ScriptArguments):
    """What to train on, and where each role and the rewards come from."""

    policy_adapter: str | None = field(
        default=None,
        metadata={
            "help": "Adapter to start the policy from (an SFT adapter): a folder or `id[@revision][:subfolder]`, as "
            "all adapters here. Default: a fresh one."
        },
    )
    reference_adapter: str | None = field(
        default=None, metadata={"help": "Adapter of the reference. Default: the policy as it starts."}
    )
    value_adapter: str | None = field(
        default=None,
        metadata={
            "help": "'separate' (default; starts from the reward adapter), 'shared' with the policy, or an adapter."
        },
    )
    reward_adapter: str | None = field(default=None, metadata={"help": "SEQ_CLS reward adapter for the same base."})
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions by dotted name, such as my_module.my_reward; calls with literal arguments, "
            "such as 'trl.rewards.get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0)'; URLs of servers."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "A separate sequence-classification model that scores, with its own tokenizer."},
    )
    demonstration_dataset_name: str | None = field(
        default=None,
        metadata={"help": "Prompts and completions whose mean score is to be 0, for score_normalization: dataset."},
    )
    demonstration_dataset_split: str = field(default="train", metadata={"help": "Which split of it."})
    ptx_dataset_name: str | None = field(
        default=None,
        metadata={"help": "Data set of the pretraining mix (--ptx_coef): text, or as `trl sft` takes it."},
    )
    ptx_dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    ptx_dataset_split: str = field(default="train", metadata={"help": "Its split."})


def load_splits(script_args: PPOScriptArguments, evaluates: bool) -> list[Dataset | IterableDataset]:
    """The prompts to train on and, where it is asked for, those to evaluate on."""
    name = script_args.dataset_name
    with hub_errors("data set", name):
        dataset = load_dataset(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)
    wanted = {"dataset_train_split": script_args.dataset_train_split}
    if evaluates:
        wanted["dataset_test_split"] = script_args.dataset_test_split
    return [chosen_split(dataset, name, option, split) for option, split in wanted.items()]


def load_demonstrations(script_args: PPOScriptArguments) -> Dataset | None:
    """The demonstrations whose mean score is to be 0, where there are any."""
    name = script_args.demonstration_dataset_name
    if name is None:
        return None
    with hub_errors("data set", name):
        dataset = load_dataset(name)
    return chosen_split(dataset, name, "demonstration_dataset_split", script_args.demonstration_dataset_split)


def reward_sources(script_args: PPOScriptArguments) -> list[Any]:
    """What scores beside the reward adapter: the reward model, then functions and servers."""
    models = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    return [*models, *(reward_source(name) for name in script_args.reward_funcs or [])]


def load_pretraining(script_args: PPOScriptArguments) -> Dataset | None:
    """The data set of the pretraining mix, if there is one."""
    name = script_args.ptx_dataset_name
    if name is None:
        return None
    with hub_errors("data set", name):
        dataset = load_dataset(name, name=script_args.ptx_dataset_config)
    return chosen_split(dataset, name, "ptx_dataset_split", script_args.ptx_dataset_split)


def chosen_split(dataset: Mapping[str, Any], name: str, option: str, split: str) -> Any:
    """One split of a data set."""
    if split not in dataset:
        raise ValueError(
            f"The data set {name} has the splits {sorted(dataset)}, not {split!r}. Name one with --{option}."
        )
    return dataset[split]


def build(script_args: PPOScriptArguments, training_args: PPOConfig, model_args: ModelConfig) -> PPOTrainer:
    """The trainer that the arguments describe."""
    model_args.use_peft = True
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    train_dataset, *eval_dataset = load_splits(script_args, training_args.eval_strategy != "no")
    return PPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward_sources(script_args),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset[0] if eval_dataset else None,
        demonstration_dataset=load_demonstrations(script_args),
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        policy_adapter=script_args.policy_adapter,
        reference_adapter=script_args.reference_adapter,
        value_adapter=script_args.value_adapter,
        reward_adapter=script_args.reward_adapter,
        ptx_dataset=load_pretraining(script_args),
    )


def train(trainer: PPOTrainer, dataset_name: str | None) -> None:
    """Train, save, and push where that is asked for."""
    args = trainer.args
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume in ("true", "True") else resume)
    trainer.save_state()
    trainer.save_model(args.output_dir)
    trainer.create_model_card(dataset_name=dataset_name)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)


def main() -> None:
    """Read the arguments, build the trainer, train.

    Raises:
        SystemExit: what was given cannot be trained with, or a server failed; the message is one line.
    """
    parser = TrlParser((PPOScriptArguments, PPOConfig, ModelConfig))
    try:
        script_args, training_args, model_args = parser.parse_args_and_config(fail_with_unknown_args=True)
        trainer = build(script_args, training_args, model_args)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    try:
        train(trainer, script_args.dataset_name)
    except (HubError, RewardSourceError, StartupError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
