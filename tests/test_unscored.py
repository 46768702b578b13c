"""Responses that no reward source scores: nothing is learned from them, and nothing counts them as a score."""

from __future__ import annotations

import math

import pytest
import torch

from builders import prompts
from ppo_lora.normalization import moments
from ppo_lora.rewards import replace_missing_eos
from runs import logged, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*returned None for:UserWarning")
NAN = math.nan
OPTIONS = [
    {},
    {"kl_in": "loss", "entropy_coef": 0.1, "loss_aggregation": "sequence_mean", "whiten_rewards": True},
    {"missing_eos_score": -5.0, "score_normalization": "running", "importance_sampling_cap": 2.0},
    {"overlong_penalty": 1.0, "overlong_buffer_length": 3, "target_kl": 100.0, "max_tokens_per_micro_batch": 60},
]


def scores_but(skipped):
    def some(prompts, completions, **kwargs):
        return [None if row in skipped else float(len(text) % 7) for row, text in enumerate(completions)]

    return some


def weights(made) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for ps in made.base.trainable_parameters().values() for p in ps])


@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_is_learned_from_them(tmp_path, options):
    """One iteration of 16 rows; whatever the skipped rows are, the gradient is the same."""
    whole = {"num_mini_batches": 1, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}

    def run(name, change):
        made = trainer(tmp_path / name, reward_funcs=scores_but({1, 6, 9}), max_steps=2, **whole, **options)
        collector = made._collector
        sample = collector.sample

        def sampled(prompts, *stream):
            rollout = sample(prompts, *stream)
            for row in (1, 6, 9):
                ids = rollout.responses[row]
                ids[:2] = torch.where(ids[:2] > 2, change(ids[:2]), ids[:2])
            return rollout

        collector.sample = sampled
        made.train()
        return weights(made)

    one, other = run("one", lambda ids: ids), run("other", lambda ids: 3 + (ids * 5) % 47)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_is_measured_leaves_them_out(tmp_path):
    made = trainer(tmp_path, reward_funcs=scores_but({0, 5}), max_steps=8, score_normalization="running")
    seen = []
    collector = made._collector
    score = collector.score

    def scored(*args, **kwargs):
        seen.append(score(*args, **kwargs))
        return seen[-1]

    collector.score = scored
    made.train()
    for entry, rollout in zip(logged(made), seen, strict=True):
        known = [float(len(text) % 7) for row, text in enumerate(rollout.responses.completions) if row not in (0, 5)]
        mean = sum(known) / len(known)
        assert entry["objective/scores"] == pytest.approx(mean) == entry["rewards/some/mean"]
        spread = math.sqrt(sum((one - mean) ** 2 for one in known) / len(known))
        assert entry["objective/scores_std"] == pytest.approx(spread)
        assert entry["completions/unscored_ratio"] == 2 / 16
        mask = rollout.experience.response_mask
        assert mask.any(dim=1).tolist() == [row not in (0, 5) for row in range(16)]
        assert not rollout.experience.advantages[[0, 5]].any()
    assert collector.normalizer.moments.count == 28


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("limits", [{}, {"target_kl": 1.0, "ratio_threshold": 10.0}])
def test_a_mini_batch_without_any_score_changes_nothing(tmp_path, aggregation, limits):
    """The second iteration has no score at all: its loss is 0, and plain SGD then takes no step."""
    calls = []

    def first_only(completions, **kwargs):
        calls.append(len(completions))
        return [float(len(text)) if len(calls) == 1 else None for text in completions]

    options = {"optim": "sgd", "loss_aggregation": aggregation, "reward_funcs": first_only, **limits}
    once = trainer(tmp_path / "once", max_steps=4, lr_scheduler_type="constant", **options)
    once.train()
    calls.clear()
    twice = trainer(tmp_path / "twice", max_steps=8, lr_scheduler_type="constant", **options)
    twice.train()
    assert torch.equal(weights(once), weights(twice))
    assert "objective/scores" not in logged(twice)[1] and logged(twice)[1]["completions/unscored_ratio"] == 1.0


def test_evaluations_leave_them_out(tmp_path):
    made = trainer(tmp_path, reward_funcs=scores_but({1}), trainer_options={"eval_dataset": prompts(3)},
                   num_generations_eval=2)  # fmt: skip
    metrics = made.evaluate()
    assert metrics["eval_completions/unscored_ratio"] == pytest.approx(1 / 6)
    assert math.isfinite(metrics["eval_objective/scores"]) and math.isfinite(metrics["eval_objective/best_of_2"])


def test_the_startup_checks_pass(tmp_path, capsys):
    trainer(tmp_path, reward_funcs=scores_but({3}), startup_checks="error").train()
    assert "over 15 responses" in capsys.readouterr().out


def test_by_hand():
    scores = torch.tensor([1.0, NAN, 3.0, NAN])
    found = moments(scores)
    assert (found.count, found.mean, found.squares) == (2, 2.0, 2.0)
    replaced = replace_missing_eos(scores, torch.tensor([True, True, False, False]), -1.0)
    assert replaced.isnan().tolist() == [False, True, False, True] and replaced[2] == -1.0
