"""Mistakes are refused at construction with what was given, what was expected and what to do. Nothing is written."""

from __future__ import annotations

import re

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from builders import CHAT_TEMPLATE, EOS, prompts, tiny_config, tiny_model, tiny_tokenizer
from ppo_lora import PPOTrainer, SharedBase
from runs import config, count_w5


def reward_adapter(folder, num_labels: int = 1, **changes):
    """A SEQ_CLS adapter as `trl reward` writes it, for a tiny Llama with the given changes."""
    base_config = tiny_config(**changes)
    base_config.num_labels = num_labels
    model = AutoModelForSequenceClassification.from_config(base_config)
    options = {"task_type": "SEQ_CLS", "target_modules": "all-linear", "modules_to_save": ["score"]}
    options["fan_in_fan_out"] = changes.get("architecture") == "gpt2"
    get_peft_model(model, LoraConfig(r=4, **options)).save_pretrained(folder, save_embedding_layers=False)
    return folder


def headless(folder):
    path = reward_adapter(folder) / "adapter_model.safetensors"
    save_file({key: t for key, t in load_file(path).items() if "score" not in key}, path)
    return folder


def build(folder, **changes):
    given = {
        "model": tiny_model(),
        "reward_funcs": count_w5,
        "args": config(folder),
        "train_dataset": prompts(16),
        "processing_class": tiny_tokenizer(),
        **changes,
    }
    return PPOTrainer(**given)


CASES = {
    "no reward source": (lambda path: {"reward_funcs": None}, "no reward source.*reward_adapter.*reward_funcs"),
    "a reward adapter without head": (
        lambda path: {"reward_adapter": headless(path / "adapter")},
        "no head weights.*score.*trl reward",
    ),
    "a head with two outputs": (
        lambda path: {"reward_adapter": reward_adapter(path / "adapter", num_labels=2)},
        "has 2 outputs; expected 1",
    ),
    "an adapter for another architecture": (
        lambda path: {"reward_adapter": reward_adapter(path / "adapter", architecture="gpt2")},
        "reward adapter .* does not fit LlamaForCausalLM.*Load the base",
    ),
    "an adapter for another hidden size": (
        lambda path: {"reward_adapter": reward_adapter(path / "adapter", hidden_size=128)},
        r"does not fit LlamaForCausalLM: .* is \[.*\] in the adapter and \[.*\] on the base",
    ),
    "a folder without an adapter": (
        lambda path: {"policy_adapter": path},
        "No adapter_config.json in",
    ),
    "a tokenizer without EOS": (
        lambda path: {"processing_class": tiny_tokenizer(eos_token=None)},
        "no EOS token.*tokenizer.eos_token",
    ),
    "a tokenizer with more tokens than the base": (
        lambda path: {"processing_class": tiny_tokenizer(60)},
        "60 tokens, the base's embedding 50",
    ),
    "messages without a chat template": (
        lambda path: {"train_dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": "w4"}]] * 16})},
        "no chat template",
    ),
    "an empty data set": (
        lambda path: {"train_dataset": Dataset.from_dict({"prompt": []})},
        "train_dataset is empty",
    ),
    "no data set": (lambda path: {"train_dataset": None}, "train_dataset is None"),
    "a data set without prompts": (
        lambda path: {"train_dataset": Dataset.from_dict({"text": ["w4"] * 16})},
        r"columns \['text'\]; expected 'prompt'",
    ),
    "fewer prompts than one rollout batch": (
        lambda path: {"train_dataset": prompts(15)},
        "has 15 prompts, one iteration takes 16",
    ),
    "only prompts that are too long": (
        lambda path: {"args": config(path / "run", max_prompt_length=1, overlong_prompts="drop"),
                      "train_dataset": Dataset.from_dict({"prompt": ["w4 w5"] * 16})},
        "All 16 prompts .* over max_prompt_length=1",
    ),
    "too many weights": (
        lambda path: {"args": config(path / "run", reward_weights=[1.0, 2.0])},
        r"reward_weights has 2 numbers; expected 1.*count_w5",
    ),
    "a stop token that the base has not": (
        lambda path: {"args": config(path / "run", stop_token_ids=[7, 50])},
        r"stop_token_ids has \[50\], the base 50 tokens; expected ids below that",
    ),
    "a warm-up that is all there is": (
        lambda path: {"args": config(path / "run", max_steps=-1, num_train_epochs=2, value_warmup_iterations=2)},
        "value_warmup_iterations is 2, but num_train_epochs=2 are 2 iterations",
    ),
    "adapters beside a SharedBase": (
        lambda path: {"model": SharedBase(tiny_model()), "value_adapter": "shared"},
        "SharedBase already.*value",
    ),
    "responses beyond the base's positions": (
        lambda path: {"model": tiny_model("gpt2", n_positions=8), "args": config(path / "run")},
        "longest prompt has 4 tokens; with max_completion_length=6 that is over the base's 8 positions",
    ),
    "a float16 base": (lambda path: {"model": tiny_model().half()}, "base is float16.*bfloat16"),
    "a LoRA that rewrites the base": (
        lambda path: {"peft_config": LoraConfig(init_lora_weights="pissa")},
        "init_lora_weights is 'pissa'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_and_nothing_is_written(tmp_path, case):
    make, message = CASES[case]
    output = tmp_path / "run"
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        build(output, **make(tmp_path))
    assert not output.exists()


TYPE_CASES = {
    "a split dictionary": ({"train_dataset": DatasetDict({"train": prompts(16)})}, "pick a split"),
    "numbers as prompts": ({"train_dataset": Dataset.from_dict({"prompt": list(range(16))})}, "of type int"),
    "a reward that is no function": ({"reward_funcs": [3.0]}, "reward_funcs holds 3.0"),
    "a PeftModel": ({"model": get_peft_model(tiny_model(), LoraConfig())}, "is a PeftModel.*policy_adapter=folder"),
    "other arguments": ({"args": 3}, "args is a int; expected a PPOConfig"),
    "another kind of adapter": ({"peft_config": IA3Config()}, "IA3Config; expected a LoraConfig"),
}


@pytest.mark.parametrize("case", TYPE_CASES)
def test_a_wrong_type_is_refused_and_nothing_is_written(tmp_path, case):
    changes, message = TYPE_CASES[case]
    with pytest.raises(TypeError, match=message):
        build(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_missing_pad_token_becomes_eos_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="no pad token; using EOS"):
        made = build(tmp_path, processing_class=tiny_tokenizer(pad_token=None))
    made.train()


def test_a_pad_token_that_is_eos_trains(tmp_path):
    made = build(tmp_path, processing_class=tiny_tokenizer(pad_token="<eos>"))
    experience = made.collect(0)
    ends = experience.sequences[:, -experience.response_length :][experience.response_mask] == EOS
    stopped = (experience.response_mask & (experience.sequences[:, -experience.response_length :] == EOS)).any(dim=1)
    assert ends.sum() == stopped.sum()
    made.train()


def test_overlong_prompts_are_counted_and_truncated_on_the_left(tmp_path):
    with pytest.warns(UserWarning, match=r"12 of 16 prompts .* over max_prompt_length=1 tokens and were truncated"):
        made = build(tmp_path, args=config(tmp_path, max_prompt_length=1))
    assert made.collect(0).sequences.shape[1] - made.collect(0).response_length == 1


def test_chat_messages_train(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    seen = []

    def note(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(completion[0]["content"])) for completion in completions]

    messages = [[{"role": "user", "content": f"w{5 + i}"}] for i in range(16)]
    made = build(tmp_path, train_dataset=Dataset.from_dict({"prompt": messages}), reward_funcs=note,
                 processing_class=tokenizer)  # fmt: skip
    made.train()
    prompt, completion = seen[0]
    assert prompt in messages and completion[0]["role"] == "assistant"


REWARD_MISTAKES = {
    "raises": (lambda rows: 1 / 0, RuntimeError, "bad raised ZeroDivisionError"),
    "too few": (lambda rows: [0.0] * (rows - 1), ValueError, "bad returned 15 values; expected a list of 16"),
    "none at all": (lambda rows: [None] * rows, ValueError, "'bad'. returned None for all 16"),
    "NaN": (lambda rows: [float("nan")] + [0.0] * (rows - 1), ValueError, "bad returned nan for row 0"),
    "text": (lambda rows: ["good"] * rows, ValueError, "bad returned 'good' for row 0"),
    "a number": (lambda rows: 1.0, ValueError, "bad returned a float; expected a list of 16"),
}


@pytest.mark.parametrize("mistake", REWARD_MISTAKES)
def test_a_reward_function_that_breaks_its_contract_is_named(tmp_path, mistake):
    result, error, message = REWARD_MISTAKES[mistake]

    def bad(prompts, **kwargs):
        return result(len(prompts))

    made = build(tmp_path, reward_funcs=bad)
    with pytest.raises(error, match=message):
        made.train()


def test_generation_defaults_of_a_checkpoint_do_not_reach_the_samples(tmp_path):
    model = tiny_model()
    plain = build(tmp_path, model=tiny_model()).collect(0)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    assert torch.equal(build(tmp_path, model=model).collect(0).sequences, plain.sequences)
