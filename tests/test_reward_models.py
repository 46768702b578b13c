"""A separate sequence-classification model as a reward function."""

from __future__ import annotations

import re

import pytest
import torch

from builders import CHAT_TEMPLATE, prompts, save_reward_model, tiny_model, tiny_reward_model, tiny_tokenizer
from ppo_lora import PPOTrainer
from ppo_lora.reward_models import reward_functions, reward_model_options
from runs import config, count_w5, logged, trainer


@pytest.fixture
def folder(tmp_path):
    return save_reward_model(tmp_path / "judge")


def test_it_scores_prompt_and_completion_as_the_model_does_one_by_one(tmp_path, folder):
    (score,) = reward_functions(folder, None, config(tmp_path, local_rollout_forward_batch_size=2))
    texts = [("w4 w5 ", "w6"), ("w7 ", "w8 w9 w10"), ("w3 ", "w3")]
    expected = []
    for prompt, completion in texts:
        ids = tiny_tokenizer()(prompt + completion, return_tensors="pt").input_ids
        with torch.no_grad():
            expected.append(tiny_reward_model()(ids).logits.item())
    got = score([prompt for prompt, _ in texts], [completion for _, completion in texts], completion_ids=[])
    assert got == pytest.approx(expected, abs=1e-5)


def test_chat_messages_go_through_its_own_template(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    (score,) = reward_functions([tiny_reward_model()], [tokenizer], config(tmp_path))
    got = score([[{"role": "user", "content": "w9"}]], [[{"role": "assistant", "content": "w8"}]])
    with torch.no_grad():
        expected = tiny_reward_model()(torch.tensor([[3, 9, 4, 8]])).logits.item()
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
        reward_functions(tiny_reward_model(num_labels=2), tiny_tokenizer(), config(tmp_path))


def test_the_number_of_tokenizers_is_checked(tmp_path):
    with pytest.raises(ValueError, match="reward_processing_classes has 1 entries; expected 2"):
        reward_functions([count_w5, count_w5], [None], config(tmp_path))


# How a model given by name is loaded


def options(tmp_path, **given):
    return reward_model_options(config(tmp_path, **given))


def test_options_of_loading(tmp_path):
    assert options(tmp_path) == {"trust_remote_code": False}
    given = options(
        tmp_path, trust_remote_code=True, reward_model_init_kwargs='{"dtype": "bfloat16", "revision": "v1"}'
    )
    assert given == {"trust_remote_code": True, "dtype": "bfloat16", "revision": "v1"}


def test_the_dtype_reaches_the_model_and_changes_its_scores_only_by_rounding(tmp_path, folder):
    (plain,) = reward_functions(folder, None, config(tmp_path))
    (half,) = reward_functions(folder, None, config(tmp_path, reward_model_init_kwargs={"dtype": "bfloat16"}))
    assert (plain._model.dtype, half._model.dtype) == (torch.float32, torch.bfloat16)
    texts = (["w4 w5 ", "w7 "], ["w6", "w8 w9 w10"])
    assert half(*texts) == pytest.approx(plain(*texts), abs=0.05)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}, "Linear4bit"),
        ({"load_in_8bit": True}, "Linear8bitLt"),
    ],
)
def test_it_is_quantized_where_asked_for_and_its_head_is_not(tmp_path, folder, given, kind):
    args = config(tmp_path / "run", reward_model_init_kwargs=given)
    (score,) = reward_functions(folder, None, args)
    kinds = {name: type(module).__name__ for name, module in score._model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] == kind
    assert kinds["score"] == "Linear"
    (plain,) = reward_functions(folder, None, config(tmp_path / "run"))
    texts = (["w4 w5 ", "w7 "], ["w6", "w8 w9 w10"])
    score.to(torch.device("cpu"))
    assert score(*texts) == pytest.approx(plain(*texts), abs=0.3)
    assert score(*texts) != plain(*texts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bnb_4bit_quant_type": "nf4"}, "has ['bnb_4bit_quant_type'] without load_in_4bit or load_in_8bit"),
        ({"load_in_4bit": False}, "has ['load_in_4bit'] without load_in_4bit or load_in_8bit"),
        ({"load_in_8bit": True, "quantization_config": {}}, "has ['load_in_8bit'] beside quantization_config"),
    ],
)
def test_quantization_that_contradicts_itself_is_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=re.escape(f"reward_model_init_kwargs {message}")):
        options(tmp_path, reward_model_init_kwargs=given)


def test_its_own_tokenizer_is_used(tmp_path):
    """The same word has another id for the reward model, which scores as with that id."""
    model, tokenizer = tiny_reward_model(), tiny_tokenizer(vocab_size=20)
    model.save_pretrained(tmp_path / "judge")
    tokenizer.add_tokens(["w30"])
    tokenizer.save_pretrained(tmp_path / "judge")
    (score,) = reward_functions(str(tmp_path / "judge"), None, config(tmp_path))
    with torch.no_grad():
        expected = tiny_reward_model()(torch.tensor([[4, 20]])).logits.item()
    assert score(["w4 "], ["w30"]) == pytest.approx([expected], abs=1e-5)


def test_only_its_own_source_changes(tmp_path, folder):
    """A run with the model beside a function: the function's rewards are what they are without it."""
    alone = trainer(tmp_path / "a", reward_funcs=[count_w5])
    beside = trainer(tmp_path / "b", reward_funcs=[count_w5, folder], reward_model_init_kwargs={"dtype": "bfloat16"})
    one, other = alone.collect(0), beside.collect(0)
    assert torch.equal(one.sequences, other.sequences) and torch.equal(one.logprobs, other.logprobs)
    assert torch.equal(one.ref_logprobs, other.ref_logprobs) and not torch.equal(one.scores, other.scores)
    name = "rewards/count_w5/mean"
    assert alone._scored.metrics[name] == beside._scored.metrics[name]


def test_a_model_by_name_with_several_outputs_is_refused_by_name(tmp_path):
    tiny_reward_model(num_labels=2).save_pretrained(tmp_path / "two")
    tiny_tokenizer().save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=f"The reward model {tmp_path / 'two'} has weights of other sizes"):
        reward_functions(str(tmp_path / "two"), None, config(tmp_path))
