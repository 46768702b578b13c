"""The policy loss has exactly the gradient of the KL-regularised objective, which enumeration gives independently."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from builders import nf4_config, randomize, tiny_model
from enumeration import VOCABULARY, all_responses, objective, response_logprobs, responses_batch, reward_table
from ppo_lora import PPOConfig, Role, Rollout, SharedBase, clipped_policy_loss
from ppo_lora.losses import kl_loss
from ppo_lora.rollout import build_experience, score_tokens
from ppo_lora.rows import compact_rows

KL_COEF = 0.3
PROMPT = (4, 2, 7)


@pytest.fixture(params=["float32", "nf4"])
def base(request, tmp_path):
    model = tiny_model(vocab_size=VOCABULARY)
    if request.param == "nf4":
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=nf4_config())
    shared = SharedBase(model)
    for seed, parameters in enumerate(shared.trainable_parameters().values()):
        randomize(parameters, seed=seed, scale=0.1)
    return shared


def _config(tmp_path, **options) -> PPOConfig:
    return PPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        temperature=1.0,
        gamma=1.0,
        lam=1.0,
        whiten_advantages=False,
        local_rollout_forward_batch_size=1000,
        **options,
    )


def _gradient_of_loss(base: SharedBase, rewards: torch.Tensor, config: PPOConfig) -> list[torch.Tensor]:
    """Gradient of the clipped loss at ratio 1, summed over tokens, averaged over all responses with weights pi."""
    sequences, mask = responses_batch(PROMPT)
    response_mask = mask[:, len(PROMPT) :]
    rollout = Rollout(sequences, mask, response_mask, response_mask.any(dim=1))
    tokens = score_tokens(base, rollout, config)
    experience = build_experience(rollout, tokens, rewards, KL_COEF, config)
    weights = experience.logprobs.sum(dim=1).exp()
    logprobs, _ = base(Role.POLICY, compact_rows(sequences, mask, rollout.response_length))
    losses = [
        clipped_policy_loss(new[None], old[None], advantages[None], real[None], 0.2)[0] * real.sum()
        for new, old, advantages, real in zip(
            logprobs, experience.logprobs, experience.advantages, response_mask, strict=True
        )
    ]
    kl_weights = (weights * experience.kl_weights)[:, None].expand_as(logprobs)
    columns = (logprobs, experience.logprobs, experience.ref_logprobs, response_mask)
    total = (weights * torch.stack(losses)).sum() + kl_loss(*columns, config.kl_estimator, weights=kl_weights)
    return torch.autograd.grad(total, base.trainable_parameters()[Role.POLICY])


def _gradient_of_objective(base: SharedBase, rewards: torch.Tensor) -> list[torch.Tensor]:
    with base.role(Role.REFERENCE), torch.no_grad():
        ref_logprobs = response_logprobs(base.model, PROMPT)
    with base.role(Role.POLICY):
        value = objective(response_logprobs(base.model, PROMPT), ref_logprobs, rewards, KL_COEF)
        return torch.autograd.grad(value, base.trainable_parameters()[Role.POLICY])


OPTIONS = [{}, {"kl_in": "loss", "kl_estimator": "k1"}, {"kl_in": "loss", "kl_estimator": "k3"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_has_the_gradient_of_the_objective(base, tmp_path, checkpointing, options):
    if checkpointing:
        base.activation_checkpointing_enable()
    rewards = reward_table(1, seed=3)[0]
    loss_gradient = torch.cat([g.flatten() for g in _gradient_of_loss(base, rewards, _config(tmp_path, **options))])
    objective_gradient = torch.cat([g.flatten() for g in _gradient_of_objective(base, rewards)])
    assert objective_gradient.norm() > 1e-2
    assert (loss_gradient + objective_gradient).norm() <= 1e-4 * objective_gradient.norm()


def test_the_listed_responses_are_all_there_are(base):
    assert len(set(all_responses())) == 1 + 7 + 7**2 + 7**3
    with torch.no_grad():
        assert response_logprobs(base.model, PROMPT).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
