"""scripts/merge.py: what it writes, by hand and reloaded; and that its check detects a difference."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bases import assert_close, model_folder, quantization
from builders import CHAT_TEMPLATE, save_tiny_model, tiny_model, tiny_tokenizer
from merging import PROMPTS, SCRIPTS, adapter_folder, everything, refused, run, weights

sys.path.insert(0, str(SCRIPTS))

import merge  # noqa: E402
import merge_check  # noqa: E402

IDS = torch.tensor([[2, 9, 4, 8, 20, 31], [2, 40, 7, 7, 15, 3]])

ADAPTERS = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"q_proj": 2, "down_proj": 6}, "alpha_pattern": {"down_proj": 16}},
}


def by_hand(base: dict[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """W + scaling * B @ A for every linear layer; DoRA's rows scaled to their magnitudes."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = weights(adapter)
    merged = dict(base)
    for key in (key for key in tensors if "lora_A" in key):
        layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        short = layer.split(".")[-1]
        rank = config["rank_pattern"].get(short, config["r"])
        alpha = config["alpha_pattern"].get(short, config["lora_alpha"])
        scaling = alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank
        assert tensors[key].shape[0] == rank
        delta = scaling * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        weight = base[f"{layer}.weight"] + (delta.T if config["fan_in_fan_out"] else delta)
        if config["use_dora"]:
            magnitude = tensors[f"base_model.model.{layer}.lora_magnitude_vector"]
            weight = magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
        merged[f"{layer}.weight"] = weight
    return merged


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


def unmerged_logits(adapter: Path, base: str, **options) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **options), adapter))


# What is written


@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_weights_and_logits(tmp_path, kind):
    adapter = adapter_folder(tmp_path / "adapter", **ADAPTERS[kind])
    output = run(adapter, tmp_path / "merged", "--dtype", "float32")
    expected, given = by_hand(weights(model_folder()), adapter), weights(output)
    assert given.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(given[key], expected[key], rtol=0, atol=1e-6)
    changed = {key for key, tensor in weights(model_folder()).items() if not torch.equal(tensor, given[key])}
    assert len(changed) == 14 and all("proj" in key for key in changed)
    merged, base = logits(AutoModelForCausalLM.from_pretrained(output)), model_folder()
    assert_close(merged, unmerged_logits(adapter, base))
    assert (merged - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_other_architectures(tmp_path, architecture):
    adapter = adapter_folder(tmp_path / "adapter", architecture)
    output = run(adapter, tmp_path / "merged", "--dtype", "float32")
    expected = by_hand(weights(model_folder(architecture)), adapter)
    for key, tensor in weights(output).items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)
    loaded = logits(AutoModelForCausalLM.from_pretrained(output))
    assert_close(loaded, unmerged_logits(adapter, model_folder(architecture)))


def test_bfloat16_is_the_default(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    output = run(adapter, tmp_path / "merged", "--tolerate_differences")
    rounded = {key: tensor.bfloat16() for key, tensor in weights(model_folder()).items()}
    expected = by_hand({key: tensor.float() for key, tensor in rounded.items()}, adapter)
    for key, tensor in weights(output).items():
        assert tensor.dtype == torch.bfloat16
        assert_close(tensor.float() / expected[key].abs().max(), expected[key] / expected[key].abs().max(), 2**-8)
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16


def test_tied_embeddings_stay_tied(tmp_path):
    output = run(adapter_folder(tmp_path / "adapter", "qwen2"), tmp_path / "merged", "--dtype", "float32")
    assert "lm_head.weight" not in weights(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.get_input_embeddings().weight


# PEFT warns about what this is for: a head of its own on a base whose head is the embedding.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_a_trained_head_unties_the_embeddings(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter", "qwen2", modules_to_save=["lm_head"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] += 0.1 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    output = run(adapter, tmp_path / "merged", "--dtype", "float32")
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = logits(AutoModelForCausalLM.from_pretrained(output))
    assert_close(loaded, unmerged_logits(adapter, model_folder("qwen2")))


def test_shards_load_again(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    output = run(adapter, tmp_path / "merged", "--dtype", "float32", "--max_shard_size", "100KB")
    shards = sorted(output.glob("model-*.safetensors"))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert len(shards) > 2 and set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert max(shard.stat().st_size for shard in shards) < 110_000
    assert {shard.stat().st_mode for shard in shards} == {(output / "config.json").stat().st_mode}
    loaded = logits(AutoModelForCausalLM.from_pretrained(output))
    assert_close(loaded, unmerged_logits(adapter, model_folder()))


def test_the_merged_model_is_the_loaded_one_changed_in_place(tmp_path, monkeypatch):
    """One copy of the model in memory: base + adapter answered before, the merged model answers after."""
    adapter = adapter_folder(tmp_path / "adapter")
    loaded, seen = [], []
    load_base, compare = merge.load_base, merge.compare
    monkeypatch.setattr(merge, "load_base", lambda *given: loaded.append(load_base(*given)) or loaded[0])
    monkeypatch.setattr(
        merge, "compare", lambda model, *given, **more: seen.append(model) or compare(model, *given, **more)
    )
    run(adapter, tmp_path / "merged", "--dtype", "float32")
    assert len(loaded) == 1 and seen[0] is loaded[0]


@pytest.mark.parametrize("place", ["adapter", "base"])
def test_tokenizer_and_chat_template_along(tmp_path, place):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    adapter = adapter_folder(tmp_path / "adapter", tokenizer=tokenizer if place == "adapter" else None)
    base = save_tiny_model(tmp_path / "base", initializer_range=0.1)
    if place == "base":
        for file in adapter.glob("token*"):
            file.unlink()
        tokenizer.save_pretrained(base)
    output = run(adapter, tmp_path / "merged", "--model_name_or_path", base, "--dtype", "float32")
    loaded = AutoTokenizer.from_pretrained(output)
    assert loaded.chat_template == CHAT_TEMPLATE and loaded.get_vocab() == tokenizer.get_vocab()


def test_generation_config_and_sentencepiece_model_along(tmp_path):
    """Published generation defaults may be ones that transformers refuses to save (temperature without do_sample)."""
    base = Path(save_tiny_model(tmp_path / "base", initializer_range=0.1))
    (base / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": [1, 6]}')
    (base / "tokenizer.model").write_bytes(b"pieces")
    adapter = adapter_folder(tmp_path / "adapter")
    output = run(adapter, tmp_path / "merged", "--model_name_or_path", str(base), "--dtype", "float32")
    saved = json.loads((output / "generation_config.json").read_text())
    assert saved["temperature"] == 0.7 and saved["eos_token_id"] == [1, 6]
    assert (output / "tokenizer.model").read_bytes() == b"pieces"


# Quantized bases


def quantized_folder(folder: Path, kind: str, architecture: str = "llama") -> str:
    AutoModelForCausalLM.from_pretrained(
        model_folder(architecture), quantization_config=quantization(kind)
    ).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("kind", "architecture"), [("nf4", "llama"), ("nf4-double", "qwen2"), ("nf4", "gpt_neox")])
def test_a_dequantized_base_is_the_function_that_was_trained(tmp_path, kind, architecture):
    base = quantized_folder(tmp_path / "base", kind, architecture)
    (Path(base) / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')
    adapter = adapter_folder(tmp_path / "adapter", architecture)
    options = ("--model_name_or_path", base, "--dtype", "float32")
    assert "--dequantize" in refused(adapter, tmp_path / "merged", *options)
    output = run(adapter, tmp_path / "merged", *options, "--dequantize")
    assert "quantization_config" not in (output / "config.json").read_text()
    assert json.loads((output / "generation_config.json").read_text())["eos_token_id"] == [1, 6]
    model = AutoModelForCausalLM.from_pretrained(output)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert type(model.get_submodule(_first_linear(model))) is torch.nn.Linear
    assert model.config.tie_word_embeddings == (architecture == "qwen2")
    assert_close(logits(model), unmerged_logits(adapter, base))


def _first_linear(model) -> str:
    return next(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))


def test_an_8_bit_base_is_dequantized_up_to_its_rounding_of_activations(tmp_path):
    base = quantized_folder(tmp_path / "base", "int8")
    adapter = adapter_folder(tmp_path / "adapter")
    options = ("--model_name_or_path", base, "--dequantize", "--tolerate_differences")
    output = run(adapter, tmp_path / "merged", *options, "--dtype", "float32")
    saved = weights(base)
    scales = {key.removesuffix("SCB"): tensor for key, tensor in saved.items() if key.endswith("SCB")}
    plain = {f"{key}weight": saved[f"{key}weight"] * scale[:, None] / 127 for key, scale in scales.items()}
    for key, expected in by_hand({**weights(model_folder()), **plain}, adapter).items():
        torch.testing.assert_close(weights(output)[key], expected, rtol=0, atol=1e-5)


def test_a_dequantized_base_in_bfloat16(tmp_path):
    base = quantized_folder(tmp_path / "base", "nf4", "gpt_neox")
    adapter = adapter_folder(tmp_path / "adapter", "gpt_neox")
    options = ("--model_name_or_path", base, "--dequantize", "--tolerate_differences")
    output = run(adapter, tmp_path / "merged", *options)
    assert {tensor.dtype for tensor in weights(output).values()} == {torch.bfloat16}
    expected = unmerged_logits(adapter, base)
    assert_close(logits(AutoModelForCausalLM.from_pretrained(output)), expected, 0.02)


def test_dequantizing_gpt2_is_refused(tmp_path):
    """transformers' dequantize() turns its Conv1D layers into linear ones, which have their weights the other way."""
    base = quantized_folder(tmp_path / "base", "nf4", "gpt2")
    adapter = adapter_folder(tmp_path / "adapter", "gpt2")
    options = ("--model_name_or_path", base, "--dequantize", "--dtype", "float32")
    assert "16-bit original" in refused(adapter, tmp_path / "merged", *options)


def test_other_quantizations_and_none_are_refused(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    assert "not quantized" in refused(adapter, tmp_path / "merged", "--dequantize")
    base = Path(save_tiny_model(tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    options = ("--model_name_or_path", str(base))
    assert "gptq" in refused(adapter, tmp_path / "merged", *options)
    assert "bitsandbytes only" in refused(adapter, tmp_path / "merged", *options, "--dequantize")


# The check


def perturbed(amount: float):
    """A merge that gets the embeddings wrong too."""
    right = merge.merge

    def wrong(peft_model):
        model = right(peft_model)
        noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        model.lm_head.weight.data += amount * noise
        return model

    return wrong


def test_a_wrong_merge_is_detected(tmp_path, monkeypatch, capsys):
    adapter = adapter_folder(tmp_path / "adapter")
    monkeypatch.setattr(merge, "merge", perturbed(0.3))
    message = refused(adapter, tmp_path / "merged", "--dtype", "float32")
    assert "outputs differ" in message and "--tolerate_differences" in message and "8-bit" in message
    assert "instead of" in capsys.readouterr().out
    assert "use --dtype float32" in refused(adapter, tmp_path / "merged")
    run(adapter, tmp_path / "merged", "--dtype", "float32", "--tolerate_differences")
    assert "tolerated" in capsys.readouterr().out and (tmp_path / "merged" / "model.safetensors").is_file()


def test_a_right_merge_is_shown_to_be_the_same(tmp_path, monkeypatch, capsys):
    adapter = adapter_folder(tmp_path / "adapter")
    run(adapter, tmp_path / "merged", "--dtype", "float32")
    shown = capsys.readouterr().out
    assert shown.count("same") == len(PROMPTS) and "instead of" not in shown
    assert float(shown.split("largest logit difference: ")[1].split()[0]) < 1e-4
    monkeypatch.setattr(merge, "merge", perturbed(1e-3))
    run(adapter, tmp_path / "again", "--dtype", "float32")
    assert 1e-4 < float(capsys.readouterr().out.split("largest logit difference: ")[1].split()[0]) < 1e-1


def test_logits_that_are_not_finite_are_never_tolerated(tmp_path, monkeypatch):
    adapter = adapter_folder(tmp_path / "adapter")
    monkeypatch.setattr(merge, "merge", perturbed(float("nan")))
    assert "not finite" in refused(adapter, tmp_path / "merged", "--tolerate_differences")


def test_a_diverged_adapter_is_refused(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key][0, 0] = float("inf")
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "diverged" in refused(adapter, tmp_path / "merged", "--dtype", "float32")


@pytest.mark.parametrize(
    ("before", "after", "first"), [([5, 6, 1], [5, 6, 1], None), ([5, 6], [5, 7], 1), ([5], [5, 6], 1), ([], [5], 0)]
)
def test_first_difference(before, after, first):
    answer = merge_check.Answer(torch.tensor([[9, 9, *before]]), 2, torch.zeros(len(before), 3))
    assert merge_check.Comparison(answer, after, 0.0).first_difference == first


def test_the_margin_is_between_the_two_tokens_that_differ():
    answer = merge_check.Answer(torch.tensor([[9, 2, 0]]), 1, torch.tensor([[0.0, 1.0, 5.0], [3.0, 2.5, 0.0]]))
    assert merge_check.Comparison(answer, [2, 1], 0.0).margin == 0.5
    assert merge_check.Comparison(answer, [2, 0], 0.0).margin == 0.0


def test_logits_are_those_that_chose_the_output():
    model = tiny_model(initializer_range=0.1)
    (answer,) = merge_check.answers(model, [torch.tensor([[2, 9, 4]])], 5, 0)
    assert answer.output == answer.logits.argmax(-1).tolist() and answer.logits.shape == (len(answer.output), 50)


def test_prompts_from_a_file_texts_or_nowhere(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo words\n")
    assert merge_check.read_prompts([str(file)]) == ["one", "two words"]
    assert merge_check.read_prompts(["one", "two"]) == ["one", "two"]
    assert len(merge_check.read_prompts(None)) > 2
    with pytest.raises(ValueError, match="no text"):
        merge_check.read_prompts([" "])


def test_prompts_are_messages_where_there_is_a_chat_template():
    tokenizer = tiny_tokenizer()
    assert merge_check.encode(tokenizer, ["w9 w8"])[0].tolist() == [[9, 8]]
    tokenizer.chat_template = CHAT_TEMPLATE
    assert merge_check.encode(tokenizer, ["w9 w8"])[0].tolist() == [[3, 9, 8, 4]]


# Where it is written


def test_a_folder_that_is_not_empty_is_kept_unless_told_otherwise(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    output = tmp_path / "merged"
    output.mkdir()
    run(adapter, output, "--dtype", "float32")
    (output / "old").touch()
    assert "--overwrite" in refused(adapter, output, "--dtype", "float32")
    run(adapter, output, "--dtype", "float32", "--overwrite")
    assert not (output / "old").exists() and (output / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged"]


def test_overwrite_deletes_only_models_that_are_not_in_use(tmp_path, monkeypatch):
    adapter = adapter_folder(tmp_path / "adapter")
    base = save_tiny_model(tmp_path / "base", initializer_range=0.1)
    options = ("--model_name_or_path", base, "--overwrite")
    assert "would delete" in refused(adapter, Path(base), *options)
    assert "would delete" in refused(adapter, adapter, *options)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").touch()
    assert "no config.json" in refused(adapter, other, *options)
    assert "is a file" in refused(adapter, other / "thesis.txt", *options)
    monkeypatch.chdir(other)
    assert "would delete" in refused(adapter, other, *options)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left")])
def test_an_interrupted_run_leaves_no_half_model(tmp_path, monkeypatch, error):
    adapter = adapter_folder(tmp_path / "adapter")
    output = run(adapter, tmp_path / "merged", "--dtype", "float32")
    before = everything(tmp_path)
    monkeypatch.setattr(merge.shutil, "copyfile", lambda *paths: (_ for _ in ()).throw(error))
    base = Path(save_tiny_model(tmp_path / "base", initializer_range=0.1))
    (base / "tokenizer.model").touch()
    before = everything(tmp_path)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(adapter, output, "--model_name_or_path", str(base), "--dtype", "float32", "--overwrite")
    assert everything(tmp_path) == before


def test_from_the_command_line(tmp_path):
    adapter = adapter_folder(tmp_path / "adapter")
    command = [sys.executable, str(SCRIPTS / "merge.py"), "--adapter", str(adapter), "--output_dir", "merged"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [*command, "--dtype", "float32"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same") == len(merge_check.DEFAULT_PROMPTS)
    loaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert_close(loaded, unmerged_logits(adapter, model_folder()))
