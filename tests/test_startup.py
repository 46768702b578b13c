"""The checks before the first rollout: what they see, what they stop, and that training does not notice them."""

from __future__ import annotations

import io
import random
import sys

import pytest
import torch
from datasets import Dataset
from rich.console import Console

from bases import full_base, make_base, policy_adapter, reward_adapter
from builders import prompts, tiny_tokenizer
from ppo_lora import PPOConfig, Role
from ppo_lora.data import PromptDataset
from ppo_lora.startup import (
    Check,
    Sample,
    check_kl,
    check_padding,
    check_prompts,
    check_ratio,
    check_rewards,
    memory_parts,
    raise_for,
    startup_panel,
    trainable_counts,
)
from runs import trainer


def sample(scores=(0.0, 1.0), sources=None, **changes) -> Sample:
    values = torch.tensor(scores)
    named = {"f": values} if sources is None else {name: torch.tensor(each) for name, each in sources.items()}
    return Sample(
        **{"kl": 0.0, "furthest": 0.0, "ratio": 0.0, "scores": values, "sources": named, "distinct": 2} | changes
    )


@pytest.fixture(scope="module")
def base():
    return full_base()


def weights(made) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for ps in made.base.trainable_parameters().values() for p in ps])


def test_training_does_not_notice_the_checks(tmp_path):
    numpy = sys.modules["numpy"].random  # torch's and transformers' dependency

    def noisy(completions, **kwargs):
        return [len(text) + random.random() + torch.rand(()).item() + numpy.random() for text in completions]

    ends = []
    for mode in ("off", "error"):
        random.seed(3)
        made = trainer(tmp_path / mode, reward_funcs=noisy, startup_checks=mode)
        made.train()
        ends.append((weights(made), random.random(), torch.rand(3), numpy.random()))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][2], ends[1][2])
    assert ends[0][1] == ends[1][1] and ends[0][3] == ends[1][3]


def test_a_fresh_run_starts_at_zero_and_one_and_says_so(tmp_path, capsys):
    trainer(tmp_path, startup_checks="error").train()
    printed = capsys.readouterr().out
    assert printed.count("before the first rollout") == 1
    for text in ("exactly 0", "exactly 1", "reward spread", "trained", "policy adapter"):
        assert text in printed


def test_reward_functions_are_called_once_more_for_at_most_an_iterations_rows(tmp_path):
    calls = []

    def counted(completions, **kwargs):
        calls.append(len(completions))
        return [float(i) for i in range(len(completions))]

    trainer(tmp_path, reward_funcs=counted, startup_checks="error").train()
    assert calls == [16, 16]


def test_at_most_32_rows_are_sampled_for_the_checks_from_random_numbers_of_their_own(tmp_path):
    calls = []

    def noted(prompts, completions, **kwargs):
        calls.append(list(zip(prompts, completions, strict=True)))
        return [float(i) for i in range(len(completions))]

    options = {"per_device_train_batch_size": 40, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
    made = trainer(tmp_path, reward_funcs=noted, rows=40, startup_checks="error", max_steps=2, **options)
    made.train()
    checked, rollout = calls
    assert (len(checked), len(rollout)) == (32, 40)
    assert [prompt for prompt, _ in checked] == [prompt for prompt, _ in rollout[:32]]
    same = sum(one == other for one, other in zip(checked, rollout, strict=False))
    assert same < 16, "the checks drew with the rollout's random numbers"


@pytest.mark.parametrize("value", [-1.0, 0.5])
def test_a_constant_reward_stops_before_anything_is_trained(tmp_path, value):
    def constant(completions, **kwargs):
        return [value] * len(completions)

    made = trainer(tmp_path, reward_funcs=constant, startup_checks="error")
    before = weights(made)
    with pytest.raises(ValueError, match=rf"the score {value:g} \(constant {value:g} for every row\)"):
        made.train()
    assert torch.equal(weights(made), before)
    trainer(tmp_path, reward_funcs=constant, startup_checks="warn").train()


def test_zeros_may_be_a_sparse_reward(tmp_path, capsys):
    trainer(tmp_path, reward_funcs=lambda completions, **k: [0.0] * len(completions), startup_checks="error").train()
    assert "warning" in capsys.readouterr().out


def test_a_policy_moved_away_from_its_reference_stops_a_fresh_run_only(tmp_path, capsys):
    made = trainer(tmp_path, startup_checks="error")
    with torch.no_grad():
        for parameter in made.base.trainable_parameters()[Role.POLICY]:
            parameter.add_(0.1)
    with pytest.raises(ValueError, match="policy from a fresh adapter, reference from the base"):
        made.train()
    made.train()
    assert "some training was done before" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_resumed_run_shows_its_kl(tmp_path, capsys):
    trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=4).train()
    trainer(tmp_path, max_steps=8, startup_checks="error").train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "some training was done before" in printed and "exactly 1" in printed


def test_kl_of_the_same_start_and_of_another(base):
    assert check_kl(sample(), base, fresh=True) == Check("KL to the reference", "ok", "exactly 0")
    assert check_kl(sample(furthest=1e-7), base, fresh=True).status == "error"
    assert check_kl(sample(furthest=1e-7), base, fresh=False).status == "shown"
    other = make_base(policy=policy_adapter(), reference=policy_adapter(seed=5))
    assert check_kl(sample(furthest=1e-7), other, fresh=True).status == "warning"


@pytest.mark.parametrize(
    ("ratio", "dtype", "status"),
    [
        (0.0, torch.float32, "ok"),
        (1e-5, torch.float32, "ok"),
        (1.1e-5, torch.float32, "error"),
        (0.0, torch.bfloat16, "ok"),
        (1e-5, torch.bfloat16, "warning"),
    ],
)
def test_the_first_ratio(ratio, dtype, status):
    assert check_ratio(sample(ratio=ratio), dtype).status == status


NAN = float("nan")


@pytest.mark.parametrize(
    ("made", "source_weights", "models", "status"),
    [
        (sample((0.0, 1e-6)), {"f": 1.0}, (), "ok"),
        (sample((), {"f": (NAN, NAN)}), {"f": 1.0}, (), "warning"),
        (sample((2.0, 2.0)), {"f": 1.0}, (), "error"),
        (sample((0.0, 0.0)), {"f": 1.0}, (), "warning"),
        (sample((0.0, 0.0)), {"f": 1.0}, ("f",), "error"),
        (sample((2.0, 2.0), distinct=1), {"f": 1.0}, (), "warning"),
        (sample((0.0, 0.0), {"f": (0.0, NAN), "gold": (1.0, 2.0)}), {"f": 1.0, "gold": 0.0}, (), "warning"),
        (sample((0.0, 0.0), {"f": (1.0, 2.0), "g": (-1.0, -2.0)}), {"f": 1.0, "g": 1.0}, (), "error"),
        (sample((-1.0, -1.0), {"f": (1.0, 2.0)}), {"f": 1.0}, ("f",), "warning"),  # no response ended
    ],
)
def test_reward_spread(made, source_weights, models, status):
    assert check_rewards(made, source_weights, models, fresh=True).status == status
    assert check_rewards(made, source_weights, models, fresh=False).status == status.replace("error", "warning")


def test_the_share_of_long_prompts(tmp_path):
    args = PPOConfig(str(tmp_path), use_cpu=True, max_prompt_length=3)
    for overlong in ("truncate", "drop"):
        with pytest.warns(UserWarning, match="over max_prompt_length"):
            dataset = PromptDataset(prompts(32), tiny_tokenizer(), 3, overlong)
        args.overlong_prompts = overlong
        check = check_prompts(dataset, args)
        assert check.status == "warning" and check.seen.startswith("25.0% of 32 over max_prompt_length=3")
    assert check_prompts(PromptDataset(prompts(32), tiny_tokenizer()), args).status == "ok"


@pytest.mark.parametrize(("long", "status"), [(2, "ok"), (3, "warning")])
@pytest.mark.filterwarnings("ignore:.*over max_prompt_length")
def test_more_than_a_tenth_of_long_prompts_is_a_warning(tmp_path, long, status):
    given = Dataset.from_dict({"prompt": ["w4 w5"] * long + ["w4"] * (20 - long)})
    check = check_prompts(
        PromptDataset(given, tiny_tokenizer(), 1), PPOConfig(str(tmp_path), use_cpu=True, max_prompt_length=1)
    )
    assert check.status == status


def test_pad_equal_to_eos_is_named_where_a_reward_adapter_reads_it(base):
    same = tiny_tokenizer(pad_token="<eos>")
    assert [check.status for check in check_padding(same, base)] == ["warning"]
    assert check_padding(tiny_tokenizer(), base) == []
    assert check_padding(same, make_base()) == []


@pytest.mark.parametrize("value", ["separate", "shared"])
def test_parameters_and_memory_by_part(value):
    made = make_base(policy=policy_adapter(), reward=reward_adapter(), value=value)
    counts, parts = trainable_counts(made), memory_parts(made)
    adapter = sum(p.numel() for p in made.adapters.parameters(Role.POLICY))
    head = 64
    assert counts == {
        "policy": adapter,
        "reference": 0,
        "value": head + (adapter if value == "separate" else 0),
        "reward": 0,
    }
    adapters = {"policy", "reference", "reward"} | ({"value"} if value == "separate" else set())
    assert {name: size for name, size in parts.items() if "adapter" in name} == {
        f"{role} adapter": 4 * adapter for role in adapters
    }
    assert parts["heads"] == 4 * 2 * head
    everything = {id(p): p.nbytes for p in [*made.parameters(), *made.buffers()]}
    assert sum(parts.values()) == sum(everything.values())


def test_quantized_weights_count_with_their_scales():
    plain, nf4 = memory_parts(make_base()), memory_parts(make_base(kind="nf4"))
    assert "quantized weights" not in plain
    linear = plain["other weights"] - nf4["other weights"]
    blocks = linear // 4 // 64
    # Half a byte a weight, a float32 scale for each block of 64, and tables of 16 float32.
    least = linear // 8 + 4 * blocks
    assert least < nf4["quantized weights"] <= least + 14 * 16 * 4
    doubled = memory_parts(make_base(kind="nf4-double"))["quantized weights"]
    assert linear // 8 + blocks < doubled


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_fits_the_terminal(base, width):
    checks = [Check("KL to the reference", "ok", "exactly 0"), Check("reward spread", "error", "a [bold] " * 30)]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(startup_panel(base, checks))
    lines = console.export_text().splitlines()
    assert {len(line) for line in lines} == {width}
    assert "[bold]" in "".join(lines)


def test_what_failed_is_raised_together():
    raise_for([Check("a", "warning", "x"), Check("b", "ok", "y")])
    with pytest.raises(ValueError, match=r"Startup check failed. a: x b: y \(startup_checks='warn'"):
        raise_for([Check("a", "error", "x"), Check("b", "error", "y")])
