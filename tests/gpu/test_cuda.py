"""What only a GPU can show: placement, bfloat16 compute on NF4, and that the peak stays near one model's."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from bases import assert_same_gradient, lora_config
from builders import padded_batch, prompts, save_tiny_model, tiny_model, tiny_tokenizer
from measured_memory import VOCABULARY as PLAN_VOCABULARY
from measured_memory import long_prompts, save_model
from ppo_lora import PPOConfig, PPOTrainer, SharedBase, plan_memory
from ppo_lora.rows import compact_rows
from ppo_lora.splitting import RowLimit
from ppo_lora.update import PolicyValueUpdate

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
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=_quantization(), device_map={"": 0}
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


def _quantization() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )


def _device_peak(work) -> int:
    """Bytes that the allocator gave out at the most while ``work`` ran, above what it had given out before."""
    square = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    square @ square  # cuBLAS keeps its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_plan_is_within_a_tenth_of_the_allocator_s_peak(tmp_path, quantized, checkpointing):
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8}
    folder = save_model(tmp_path / "base", "llama", num_key_value_heads=4, **sizes)
    config = {"quantization_config": _quantization()} if quantized else {}
    args = _config(
        tmp_path,
        gradient_checkpointing=checkpointing,
        max_prompt_length=256,
        max_completion_length=64,
        num_ppo_epochs=2,
        max_steps=2,
        startup_checks="off",
        health_warnings=False,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    plan = plan_memory(folder, args, search=False, **config)

    def train() -> None:
        data, tokenizer = long_prompts(8, 256), tiny_tokenizer(PLAN_VOCABULARY)
        trainer = PPOTrainer(folder, count_w5, args, data, processing_class=tokenizer, **config)
        trainer._collector._stop_token_ids = [-1]  # all responses are of full length
        trainer.train()

    assert 0.9 <= _device_peak(train) / plan.peak <= 1.1


def test_gradients_on_the_gpu_are_those_on_the_cpu():
    ids, mask = padded_batch(rows=4, prompt=5, response=6)
    gradients = {}
    for device in ("cpu", "cuda"):
        base = SharedBase(tiny_model().to(device), peft_config=lora_config())
        policy, value = base.trainable_parameters().values()
        for number, parameters in enumerate((policy, value)):
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        base.logprobs("policy", ids.to(device), mask.to(device), 6).sum().backward()
        base.values(ids.to(device), mask.to(device), 6).sum().backward()
        gradients[device] = [p.grad.cpu() for p in (*policy, *value)]
    assert_same_gradient(gradients["cuda"], gradients["cpu"], tolerance=1e-4)


@pytest.mark.parametrize("rows", [8, 1])
def test_sampling_tells_the_log_probabilities_that_scoring_finds(rows):
    base = SharedBase(tiny_model().to("cuda"), peft_config=lora_config())
    ids, mask = (each[:rows, :5].to("cuda") for each in padded_batch(rows=8, prompt=5, response=6))
    mask[:, -1] = True
    draws = torch.rand(rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    responses, drawn_with = base.sample(ids, mask, draws, [1], 0)
    real = torch.cat([torch.ones_like(responses[:, :1]), responses[:, :-1] != 1], dim=1).cumprod(dim=1).bool()
    whole, whole_mask = torch.cat([ids, responses], dim=1), torch.cat([mask, real], dim=1)
    scored = base.logprobs("policy", whole, whole_mask, responses.shape[1])
    torch.testing.assert_close(scored[real], drawn_with[real], atol=1e-4, rtol=0)


def test_the_passes_of_an_update_do_not_wait_for_the_device(tmp_path, monkeypatch):
    gradients = PolicyValueUpdate.gradients

    def strictly(update, model, pieces):
        torch.cuda.set_sync_debug_mode("error" if update.seen_before else "default")
        try:
            return gradients(update, model, pieces)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            PolicyValueUpdate.seen_before = True

    monkeypatch.setattr(PolicyValueUpdate, "seen_before", False, raising=False)
    monkeypatch.setattr(PolicyValueUpdate, "gradients", strictly)
    args = _config(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True)
    PPOTrainer(tiny_model(), count_w5, args, prompts(32), processing_class=tiny_tokenizer()).train()


def test_a_batch_that_does_not_fit_is_halved_on_a_real_out_of_memory():
    limit, row = RowLimit("scoring"), 2**28
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 5 * row) / total)
    try:
        with pytest.warns(UserWarning, match="Out of memory while scoring 16 rows"):
            done = limit.run(
                torch.arange(16), lambda rows: torch.empty(len(rows), row, dtype=torch.uint8, device="cuda").shape[0]
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert limit.rows == 4 and [count for _, count in done] == [4] * 4


def test_rows_are_laid_out_without_waiting_for_the_device():
    ids, mask = padded_batch(rows=4, prompt=5, response=6)
    base = SharedBase(tiny_model().to("cuda"), peft_config=lora_config())
    on_device = ids.to("cuda")
    base("policy", compact_rows(on_device, mask, 6))[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        base("policy", compact_rows(on_device, mask, 6))[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
