"""A separate sequence-classification model as a reward function."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from builders import CHAT_TEMPLATE, prompts, tiny_config, tiny_model, tiny_tokenizer
from ppo_lora import PPOTrainer
from ppo_lora.reward_models import reward_functions
from runs import config, count_w5, logged


def reward_model(num_labels: int = 1):
    settings = tiny_config("llama", hidden_size=32)
    settings.num_labels = num_labels
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoModelForSequenceClassification.from_config(settings).eval()


@pytest.fixture
def folder(tmp_path):
    reward_model().save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    return str(tmp_path / "judge")


def test_it_scores_prompt_and_completion_as_the_model_does_one_by_one(tmp_path, folder):
    (score,) = reward_functions(folder, None, config(tmp_path, local_rollout_forward_batch_size=2))
    texts = [("w4 w5 ", "w6"), ("w7 ", "w8 w9 w10"), ("w3 ", "w3")]
    expected = []
    for prompt, completion in texts:
        ids = tiny_tokenizer()(prompt + completion, return_tensors="pt").input_ids
        with torch.no_grad():
            expected.append(reward_model()(ids).logits.item())
    got = score([prompt for prompt, _ in texts], [completion for _, completion in texts], completion_ids=[])
    assert got == pytest.approx(expected, abs=1e-5)


def test_chat_messages_go_through_its_own_template(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    (score,) = reward_functions([reward_model()], [tokenizer], config(tmp_path))
    got = score([[{"role": "user", "content": "w9"}]], [[{"role": "assistant", "content": "w8"}]])
    with torch.no_grad():
        expected = reward_model()(torch.tensor([[3, 9, 4, 8]])).logits.item()
    assert got == pytest.approx([expected], abs=1e-5)


def test_a_run_mixes_it_with_functions(tmp_path, folder):
    made = PPOTrainer(
        tiny_model(), [folder, count_w5], config(tmp_path / "run"), prompts(16), processing_class=tiny_tokenizer()
    )
    made.train()
    entry = logged(made)[0]
    assert entry["objective/scores"] == pytest.approx(
        entry["rewards/judge/mean"] + entry["rewards/count_w5/mean"], abs=1e-5
    )


def test_more_than_one_output_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 2 outputs; expected num_labels=1"):
        reward_functions(reward_model(num_labels=2), tiny_tokenizer(), config(tmp_path))


def test_the_number_of_tokenizers_is_checked(tmp_path):
    with pytest.raises(ValueError, match="reward_processing_classes has 1 entries; expected 2"):
        reward_functions([count_w5, count_w5], [None], config(tmp_path))
