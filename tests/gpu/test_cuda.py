"""What only a GPU can show: placement, bfloat16 compute on NF4, and that the peak stays near one model's."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from builders import prompts, save_tiny_model, tiny_model, tiny_tokenizer
from ppo_lora import PPOConfig, PPOTrainer, SharedBase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def count_w5(completions, **kwargs):
    return [float(text.split().count("w5")) for text in completions]


def _config(folder, **changes) -> PPOConfig:
    settings = {
        "per_device_train_batch_size": 8,
        "num_ppo_epochs": 2,
        "max_steps": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        **changes,
    }
    return PPOConfig(output_dir=str(folder), **settings)


@pytest.fixture(params=["float32", "bfloat16", "nf4"])
def model(request, tmp_path):
    if request.param == "float32":
        return tiny_model()
    folder = save_tiny_model(tmp_path / "base")
    if request.param == "bfloat16":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": 0}
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains_on_the_gpu_from_a_kl_of_zero(tmp_path, model, checkpointing):
    args = _config(tmp_path, gradient_checkpointing=checkpointing)
    made = PPOTrainer(model, count_w5, args, prompts(32), processing_class=tiny_tokenizer())
    made.train()
    first = next(entry for entry in made.state.log_history if "loss" in entry)
    assert made.base.device.type == "cuda"
    assert first["objective/kl"] == 0.0
    assert first["memory/peak_gib"] > 0
    assert all(p.isfinite().all() for parameters in made.base.trainable_parameters().values() for p in parameters)


def test_scoring_a_large_vocabulary_holds_a_chunk_of_logits_at_a_time():
    base = SharedBase(tiny_model(vocab_size=128_000).to("cuda", torch.bfloat16))
    ids = torch.randint(3, 1000, (8, 512), device="cuda")
    mask = torch.ones_like(ids, dtype=torch.bool)
    base.logprobs("policy", ids[:1], mask[:1], 8)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    base.logprobs("policy", ids, mask, 256)[mask[:, :256]].sum().backward()
    whole = 8 * 256 * 128_000 * 4
    assert torch.cuda.max_memory_allocated() - before < whole / 4
