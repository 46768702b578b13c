"""Options in whole runs: each changes what it should, and nothing else."""

from __future__ import annotations

import json
import math

import pytest
import torch

import ppo_lora.update
from builders import EOS, PAD, prompts, randomize, tiny_model, tiny_tokenizer
from ppo_lora import PPOConfig, PPOTrainer, Role, SharedBase
from ppo_lora.rows import compact_rows
from runs import config, count_w5, logged, trainer

MEASURED = ("time/", "memory/", "train_")


def weights(base: SharedBase) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for own in base.trainable_parameters().values() for each in own])


def numbers(made: PPOTrainer) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if not k.startswith(MEASURED)} for entry in made.state.log_history[:-1]]


def trained(folder, **options) -> PPOTrainer:
    made = trainer(folder, max_steps=8, **options)
    made.train()
    return made


# KL


def test_the_kl_coefficient_follows_its_target(tmp_path):
    """The coefficients that are logged are those that were used, and follow from the logged KL by hand."""
    made = trained(tmp_path, kl_coef=0.4, kl_target=0.01, kl_horizon=64)
    entries = logged(made)
    coefficient = 0.4
    for entry in entries:
        assert entry["objective/kl_coef"] == pytest.approx(coefficient)
        error = min(max(entry["objective/kl"] / 0.01 - 1, -0.2), 0.2)
        coefficient *= 1 + error * 16 / 64
    assert made.kl_controller.value == pytest.approx(coefficient) != 0.4
    first = entries[0]
    assert first["objective/kl"] == 0.0 and first["objective/non_score_reward"] == 0.0


def test_without_a_target_the_coefficient_stays(tmp_path):
    entries = logged(trained(tmp_path, kl_coef=0.5))
    assert {entry["objective/kl_coef"] for entry in entries} == {0.5} and entries[-1]["objective/kl"] != 0.0


def test_a_checkpoint_of_other_options_is_refused(tmp_path):
    made = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=4, kl_target=1.0)
    made.train()
    folder = tmp_path / "checkpoint-4"
    assert json.loads((folder / "ppo_state.json").read_text()) == {"kl": {"kl_coef": made.kl_controller.value}}
    other = trainer(tmp_path / "other", max_steps=8)
    with pytest.raises(ValueError, match=r"has the state of \['kl'\], this run needs that of nothing"):
        other.train(resume_from_checkpoint=str(folder))


def test_the_exact_kl_is_logged_and_changes_nothing(tmp_path):
    plain, exact = trained(tmp_path / "a"), trained(tmp_path / "b", log_exact_kl=True)
    assert torch.equal(weights(plain.base), weights(exact.base))
    with_kl = numbers(exact)
    found = [entry.pop("objective/exact_kl") for entry in with_kl]
    assert with_kl == numbers(plain)
    assert found[0] == 0.0 and found[1] > 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_exact_kl_is_that_of_the_whole_tables(temperature):
    base = SharedBase(tiny_model())
    randomize(base.trainable_parameters()[Role.POLICY], scale=0.3)
    ids = torch.tensor([[PAD, 5, 6, 7, 8, EOS], [9, 8, 7, 6, PAD, PAD]])
    mask = ids != PAD
    tables = []
    for role in (Role.POLICY, Role.REFERENCE):
        with base.role(role), torch.no_grad():
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
            logits = base.model(ids, attention_mask=mask.long(), position_ids=positions).logits
        tables.append((logits[:, 1:-1] / temperature).log_softmax(-1))
    expected = torch.where(mask[:, 2:], (tables[0].exp() * (tables[0] - tables[1])).sum(-1), 0.0)
    torch.testing.assert_close(base.exact_kl(compact_rows(ids, mask, 4), temperature), expected, rtol=1e-4, atol=1e-5)
    assert expected.max() > 0.01


def test_the_penalty_is_normalised_by_the_length(tmp_path):
    """Only the KL's part of the reward changes: the first iteration, without any KL, is the same."""
    options = {"kl_coef": 1.0, "kl_estimator": "k3"}
    plain, normal = (trained(tmp_path / str(on), normalize_kl_by_length=on, **options) for on in (False, True))
    assert numbers(plain)[0] == numbers(normal)[0]
    assert not torch.equal(weights(plain.base), weights(normal.base))
    penalties = [logged(made)[1]["objective/non_score_reward"] for made in (plain, normal)]
    assert 0 > penalties[1] > penalties[0]


def test_the_kl_in_the_loss_is_not_in_the_reward_of_its_token(tmp_path):
    in_reward, in_loss = (trained(tmp_path / place, kl_in=place, kl_coef=1.0) for place in ("reward", "loss"))
    assert numbers(in_reward)[0]["objective/scores"] == numbers(in_loss)[0]["objective/scores"]
    assert "loss/kl_avg" not in logged(in_reward)[1] and logged(in_loss)[1]["loss/kl_avg"] != 0.0
    assert not torch.equal(weights(in_reward.base), weights(in_loss.base))


@pytest.mark.parametrize(("rewards", "advantages"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_kl_in_the_loss_is_scaled_like_the_advantages(tmp_path, rewards, advantages):
    """Its weight is kl_coef times what whitening multiplies with; the plain numbers come from runs without."""
    options = {"kl_in": "loss", "kl_coef": 0.7, "whiten_rewards": rewards, "lam": 1.0}
    plain_options = {"whiten_advantages": False, "whiten_rewards": False}
    made, unscaled, plain = (
        trainer(tmp_path / str(i), **{**options, "whiten_advantages": advantages, **more}).collect(0)
        for i, more in enumerate(({}, {"whiten_advantages": False}, plain_options))
    )
    mask = made.response_mask
    scale = 1.0
    if rewards:
        scale /= plain.rewards[mask].std()
    if advantages:
        scale /= unscaled.advantages[mask].std()
    torch.testing.assert_close(made.kl_weights, torch.full_like(made.kl_weights, 0.7 * scale), rtol=1e-4, atol=1e-6)


def test_the_kl_in_the_loss_counts_as_its_weights_say(tmp_path, monkeypatch):
    seen, original = [], ppo_lora.update.kl_loss
    monkeypatch.setattr(
        ppo_lora.update, "kl_loss", lambda *args, weights: seen.append(weights) or original(*args, weights=weights)
    )
    made = trainer(tmp_path, kl_in="loss", kl_coef=0.25, whiten_advantages=False, num_ppo_epochs=1, max_steps=2)
    made.train()
    assert len(seen) == 4
    for pair in (seen[:2], seen[2:]):  # two micro-batches a step
        assert sum(each.sum() for each in pair).item() == pytest.approx(0.25)


# Clips


@pytest.mark.parametrize("options", [{"cliprange_high": 1e-4}, {"dual_clip": 1.0001}])
def test_clips_take_more_gradients(tmp_path, options, monkeypatch):
    """The old log-probabilities are made wrong, so that every ratio is away from 1."""
    original = ppo_lora.update.clipped_policy_loss
    monkeypatch.setattr(
        ppo_lora.update, "clipped_policy_loss", lambda new, old, *rest, **more: original(new, old - 0.1, *rest, **more)
    )
    plain, clipped = (trained(tmp_path / str(i), **more) for i, more in enumerate(({}, options)))
    assert logged(clipped)[0]["policy/clipfrac_avg"] > logged(plain)[0]["policy/clipfrac_avg"]
    assert logged(clipped)[0]["objective/scores"] == logged(plain)[0]["objective/scores"]


# Sampling and training


def test_a_sampler_that_agrees_changes_nothing_much(tmp_path):
    plain, corrected = (trained(tmp_path / str(cap), importance_sampling_cap=cap) for cap in (None, 2.0))
    torch.testing.assert_close(weights(plain.base), weights(corrected.base), rtol=1e-3, atol=1e-5)
    entry = logged(corrected)[1]
    assert entry["sampling/sampling_logp_difference/max"] < 1e-4
    assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert not [name for name in logged(plain)[1] if name.startswith("sampling/")]


def test_advantages_are_weighed_where_sampling_and_training_differ(tmp_path, monkeypatch):
    """A sampler whose log-probabilities are log 4 too low: the true weight is 4, the cap lets 1.5 through."""
    original = SharedBase.sample

    def low(self, *args, **kwargs):
        responses, logprobs = original(self, *args, **kwargs)
        return responses, logprobs - math.log(4.0)

    monkeypatch.setattr(SharedBase, "sample", low)
    experiences = []
    for cap in (10.0, 1.5):
        made = trainer(tmp_path / str(cap), importance_sampling_cap=cap)
        experiences.append(made.collect(0))
    plain = trainer(tmp_path / "plain").collect(0)
    torch.testing.assert_close(experiences[0].advantages, 4.0 * plain.advantages, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(experiences[1].advantages, 1.5 * plain.advantages, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(experiences[0].returns, plain.returns)


# The value


def test_a_value_that_starts_from_zero_beside_a_reward_adapter(tmp_path):
    reward = SharedBase(tiny_model()).adapter(Role.VALUE)
    reward.head["weight"].normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    fresh, copied = (SharedBase(tiny_model(), reward=reward, value=word) for word in ("zero", "separate"))
    assert fresh.values(ids, mask, 2).count_nonzero() == 0
    assert copied.values(ids, mask, 2).count_nonzero() == 2
    torch.testing.assert_close(fresh.scores(ids, mask), copied.scores(ids, mask))
    with pytest.raises(ValueError, match="policy adapter is 'zero', which only the value adapter can be"):
        SharedBase(tiny_model(), policy="zero")


def test_explained_variance_is_logged_before_the_update(tmp_path, monkeypatch):
    base = SharedBase(tiny_model())
    randomize(base.value_head.parameters(), scale=1.0)
    made = trainer(tmp_path, base)
    seen, collect = [], made.collect
    monkeypatch.setattr(made, "collect", lambda iteration: seen.append(collect(iteration)) or seen[-1])
    made.train()
    real = seen[0].response_mask
    returns, errors = seen[0].returns[real], (seen[0].returns - seen[0].values)[real]
    expected = 1 - errors.var() / returns.var()
    assert logged(made)[0]["val/explained_variance"] == pytest.approx(expected.item(), rel=1e-4)
    assert seen[0].values[real].std() > 0.01


def test_the_value_may_start_from_a_checkpoint(tmp_path):
    first = trainer(tmp_path / "a", value_learning_rate=1e-2)
    first.train()
    first.save_model()
    args = config(tmp_path / "b")
    second = PPOTrainer(
        tiny_model(), count_w5, args, prompts(32), processing_class=tiny_tokenizer(),
        value_adapter=str(tmp_path / "a" / "value"),
    )  # fmt: skip
    assert isinstance(args, PPOConfig)
    for mine, theirs in zip(*(made.base.trainable_parameters()[Role.VALUE] for made in (first, second)), strict=True):
        assert torch.equal(mine, theirs)
