"""The pretraining mix: its tokens, its gradient against that of transformers' own loss, and when there is none."""

from __future__ import annotations

import re

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from bases import make_base
from builders import CHAT_TEMPLATE, EOS, prompts, randomize, tiny_model, tiny_tokenizer
from ppo_lora import PPOTrainer, Role
from ppo_lora.pretraining import PretrainingMix
from ppo_lora.update import PolicyValueUpdate
from runs import config, count_w5, logged

TEXTS = Dataset.from_dict(
    {"text": [" ".join(f"w{3 + (5 * i + 3 * j) % 40}" for j in range(1 + i % 6)) for i in range(9)]}
)
PAIRS = Dataset.from_dict({"prompt": ["w5 w6", "w7"], "completion": [" w8 w9", " w10"]})


@pytest.fixture
def settings(tmp_path):
    return config(tmp_path, ptx_coef=0.5, gradient_accumulation_steps=1, num_mini_batches=1)


def mix_of(dataset, settings, tokenizer=None) -> PretrainingMix:
    return PretrainingMix(dataset, tiny_tokenizer() if tokenizer is None else tokenizer, settings)


def only_batch(dataset, settings, tokenizer=None):
    settings.ptx_batch_size = settings.per_device_train_batch_size = len(dataset)
    (batch,) = mix_of(dataset, settings, tokenizer).batches_of_step(0, Accelerator(cpu=True))
    return batch


def read_and_learned(dataset, settings, tokenizer=None):
    """Token lists of the rows of a data set, in an order of their own."""
    batch = only_batch(dataset, settings, tokenizer)
    split = batch.input_ids.shape[1] - batch.length
    rows = zip(batch.input_ids, batch.attention_mask, strict=True)
    return sorted((ids[:split][mask[:split]].tolist(), ids[split:][mask[split:]].tolist()) for ids, mask in rows)


def test_all_of_a_text_is_learned_but_its_first_token(settings):
    given = Dataset.from_dict({"text": ["w5 w6 w7", "w8 w9 <eos>"]})
    assert read_and_learned(given, settings) == [([5], [6, 7, EOS]), ([8], [9, EOS])]


def test_of_a_pair_the_completion_is_learned(settings):
    assert read_and_learned(PAIRS, settings) == [([5, 6], [8, 9, EOS]), ([7], [10, EOS])]


def test_messages_and_pairs_of_messages(settings):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    asked, said = [{"role": "user", "content": "w10"}], [{"role": "assistant", "content": "w20 w21"}]
    whole = Dataset.from_dict({"messages": [asked + said]})
    assert read_and_learned(whole, settings, tokenizer) == [([3], [10, 4, 20, 21])]
    pair = Dataset.from_dict({"prompt": [asked], "completion": [said]})
    assert read_and_learned(pair, settings, tokenizer) == [([3, 10, 4], [20, 21])]


def test_long_rows_are_cut_off_and_those_with_nothing_left_are_left_out(settings):
    settings.ptx_max_length = 3
    long = Dataset.from_dict({"prompt": ["w5 w6", "w7 w8 w9"], "completion": [" w8 w9", " w10"]})
    with pytest.warns(UserWarning, match="1 of 2 rows in ptx_dataset have no token to learn within ptx_max_length=3"):
        mix = mix_of(long, settings)
    assert mix.longest == 3
    settings.ptx_max_length = 1
    with pytest.raises(ValueError, match="No row of ptx_dataset has a token to learn"):
        mix_of(long, settings)


@pytest.mark.parametrize("kind", ["float32", "nf4"])
@pytest.mark.parametrize("dataset", [TEXTS, PAIRS], ids=["text", "pairs"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_transformers_loss(settings, kind, dataset, checkpointing):
    base = make_base(kind=kind)
    parameters = base.trainable_parameters()[Role.POLICY]
    randomize(parameters)
    if checkpointing:
        base.gradient_checkpointing_enable()
    batch = only_batch(dataset, settings)
    loss = mix_of(dataset, settings).loss(base, batch)
    own = torch.autograd.grad(loss, parameters)

    ids, mask = batch.input_ids, batch.attention_mask
    labels = torch.where(mask, ids, -100)
    labels[:, : -batch.length] = -100
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    with base.role(Role.POLICY):
        output = base.model(ids, attention_mask=mask.long(), position_ids=positions, labels=labels)
        expected = torch.autograd.grad(output.loss, parameters)
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=1e-6)
    difference = torch.cat([(a - b).flatten() for a, b in zip(own, expected, strict=True)]).norm()
    size = torch.cat([b.flatten() for b in expected]).norm()
    assert size > 1e-3 and difference <= 1e-5 * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_do_not_change_the_gradient(settings, size):
    base = make_base()
    parameters = base.trainable_parameters()[Role.POLICY]
    randomize(parameters)
    gradients = []
    for micro in (9, size):
        settings.ptx_batch_size, settings.per_device_train_batch_size = 9, micro
        mix = mix_of(TEXTS, settings)
        batches = mix.batches_of_step(0, Accelerator(cpu=True))
        assert len(batches) == -(-9 // micro)
        assert sum(batch.portion for batch in batches) == pytest.approx(1.0)
        loss = sum(mix.loss(base, batch) for batch in batches)
        gradients.append(torch.autograd.grad(loss, parameters))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rows_are_an_endless_shuffle_and_a_function_of_seed_and_step(settings):
    settings.ptx_batch_size = settings.per_device_train_batch_size = 3
    mix, again = mix_of(TEXTS, settings), mix_of(TEXTS, settings)
    steps = [mix.batches_of_step(step, Accelerator(cpu=True))[0].input_ids.tolist() for step in range(6)]
    assert again.batches_of_step(4, Accelerator(cpu=True))[0].input_ids.tolist() == steps[4]
    rows = [mix._rows_of_step(step) for step in range(6)]
    for first in (0, 3):
        assert sorted(row for part in rows[first : first + 3] for row in part) == sorted(mix._rows)
    assert rows[:3] != rows[3:]
    settings.seed += 1
    assert [mix_of(TEXTS, settings)._rows_of_step(step) for step in range(6)] != rows


# In the trainer


def run(folder, dataset=TEXTS, train=True, **changes):
    made = PPOTrainer(
        tiny_model(),
        changes.pop("reward_funcs", count_w5),
        config(folder, **changes),
        prompts(32),
        processing_class=tiny_tokenizer(),
        ptx_dataset=dataset,
    )
    if train:
        made.train()
    return made


def policy_gap(one, other) -> float:
    pairs = zip(*(made.base.trainable_parameters()[Role.POLICY] for made in (one, other)), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


ONE_STEP = {"optim": "sgd", "max_grad_norm": 0.0, "num_ppo_epochs": 1, "num_mini_batches": 1, "max_steps": 1}


def test_a_step_adds_the_coefficient_times_the_gradient(tmp_path):
    options = {**ONE_STEP, "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    without = run(tmp_path, None, **options)
    mixed = run(tmp_path, ptx_coef=0.25, ptx_batch_size=5, **options)
    fresh = run(tmp_path, train=False, ptx_coef=0.25, ptx_batch_size=5, **options)
    parameters = fresh.base.trainable_parameters()[Role.POLICY]
    mix = fresh._pretraining
    loss = sum(mix.loss(fresh.base, batch) for batch in mix.batches_of_step(0, fresh.accelerator))
    gradients = torch.autograd.grad(0.25 * loss, parameters)
    for plain, other, gradient in zip(
        without.base.trainable_parameters()[Role.POLICY],
        mixed.base.trainable_parameters()[Role.POLICY],
        gradients,
        strict=True,
    ):
        torch.testing.assert_close(other, plain - gradient, rtol=1e-4, atol=1e-6)
    assert policy_gap(without, mixed) > 1e-4
    for one, other in zip(*(m.base.trainable_parameters()[Role.VALUE] for m in (without, mixed)), strict=True):
        assert torch.equal(one, other)
    entry, plain = logged(mixed)[0], logged(without)[0]
    assert entry["loss/ptx_avg"] == pytest.approx(loss.item(), rel=1e-5)
    assert entry["loss"] == pytest.approx(plain["loss"] + 0.25 * loss.item(), rel=1e-4)
    assert "loss/ptx_avg" not in plain


def test_a_large_coefficient_learns_the_texts(tmp_path):
    made = run(tmp_path, ptx_coef=10.0, max_steps=40, learning_rate=1e-2, ptx_batch_size=9)
    losses = [entry["loss/ptx_avg"] for entry in logged(made)]
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_steps_micro_batches_do_not_change_the_weights(tmp_path, checkpointing):
    options = {"ptx_coef": 1.0, "ptx_batch_size": 6, "optim": "sgd", "learning_rate": 1e-1}
    whole = run(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1, **options)
    split = run(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        gradient_checkpointing=checkpointing,
        **options,
    )
    assert policy_gap(whole, split) < 1e-5


def test_it_draws_no_random_numbers_of_training(tmp_path):
    """A coefficient too small to move a float32 weight leaves the run as it is."""
    without, mixed = run(tmp_path, None, optim="sgd"), run(tmp_path, ptx_coef=1e-30, optim="sgd")
    assert policy_gap(without, mixed) == 0.0


def test_a_policy_that_waits_has_no_pretraining_gradient(tmp_path):
    made = run(tmp_path, ptx_coef=1.0, value_warmup_iterations=1, max_steps=8)
    assert taken(made) == [4]
    assert ["loss/ptx_avg" in entry for entry in logged(made)] == [False, True]


def test_a_stopped_iteration_has_no_further_pretraining_gradient(tmp_path):
    settings = {"num_ppo_epochs": 3, "num_mini_batches": 1, "max_steps": 3, "learning_rate": 1e-2}
    assert taken(run(tmp_path, ptx_coef=1.0, target_kl=1e-12, **settings)) == [1]
    assert taken(run(tmp_path, ptx_coef=1.0, **settings)) == [3]


def test_a_skipped_step_has_no_pretraining_gradient(tmp_path, monkeypatch):
    monkeypatch.setattr(PolicyValueUpdate, "_should_skip", lambda self: True)
    made = run(tmp_path, ptx_coef=1.0)
    assert taken(made) == [] and "loss/ptx_avg" not in logged(made)[0]


def taken(made) -> list[int]:
    """Optimizer steps that moved the policy at all, from Adam's own count."""
    states = [made.optimizer.state[p] for p in made.base.trainable_parameters()[Role.POLICY]]
    return sorted({int(state["step"]) for state in states if state})


def test_a_mixed_run_resumes_bit_for_bit(tmp_path):
    options = {"ptx_coef": 1.0, "ptx_batch_size": 2, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = run(tmp_path / "whole", **options)
    resumed = run(tmp_path / "again", train=False, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert policy_gap(whole, resumed) == 0.0


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (None, {"ptx_coef": 0.5}, ValueError, "ptx_coef is given, but not ptx_dataset. Give both"),
        (TEXTS, {}, ValueError, "ptx_dataset is given, but not ptx_coef. Give both"),
        (["w5"], {"ptx_coef": 0.5}, TypeError, "ptx_dataset is a list; expected a datasets.Dataset"),
        (Dataset.from_dict({"text": []}), {"ptx_coef": 0.5}, ValueError, "ptx_dataset is empty"),
        (prompts(4), {"ptx_coef": 0.5}, ValueError, "ptx_dataset has the columns ['prompt']; expected 'text'"),
        (
            Dataset.from_dict({"messages": [[{"role": "user", "content": "w5"}]]}),
            {"ptx_coef": 0.5},
            ValueError,
            "ptx_dataset has chat messages, but the tokenizer has no chat template.",
        ),
        (
            Dataset.from_dict({"text": ["w5 " * 3000]}),
            {"ptx_coef": 0.5, "ptx_max_length": 3000},
            ValueError,
            "The longest row of ptx_dataset has 3000 tokens, the base 2048 positions. Lower ptx_max_length.",
        ),
        *[
            (Dataset.from_dict(rows), {"ptx_coef": 0.5}, ValueError, f"ptx_dataset has the row {shown}; expected text")
            for rows, shown in [
                ({"text": ["w5", None]}, "{'text': None}"),
                ({"text": [5]}, "{'text': 5}"),
                ({"prompt": ["w5"], "completion": [None]}, "{'completion': None, 'prompt': 'w5'}"),
                ({"messages": [None]}, "{'messages': None}"),
                ({"messages": ["w5"]}, "{'messages': 'w5'}"),
            ]
        ],
    ],
    ids=[
        *("no data", "no coefficient", "list", "empty", "prompts", "no template", "long"),
        *("no text", "a number", "no completion", "no messages", "text as messages"),
    ],
)
def test_what_is_refused(tmp_path, dataset, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        run(tmp_path, dataset, **options)
