"""Small local stand-ins for what the recipes of configs/ name: models of the same architecture, data of the same form.

A recipe's YAMLs, and its preparing command, name models and data sets by Hub id or by path. In a test's folder each of
these names is a folder, written by the function that stands beside it in STAND_INS: transformers and datasets take a
folder before they look on the Hub, so the recipe's commands run as they are.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from builders import nf4_config, tiny_config

Writer = Callable[[Path], None]
TRAIN_ROWS, TEST_ROWS = 24, 8
SIZES = {"train": TRAIN_ROWS, "test": TEST_ROWS, "validation": TEST_ROWS}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


# Models


def byte_tokenizer(special_tokens: Sequence[str], bos_token: str | None = None, **options: Any):
    """A byte-level BPE tokenizer with few merges: it knows every text, as those of the real models do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    texts = (text for i in range(TRAIN_ROWS) for text in (post(i), summary(i), problem(i), solution(i), review(i)))
    tokenizer.train_from_iterator(texts, trainer)
    if bos_token is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, tokenizer.token_to_id(bos_token))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos_token, **options)


def model(architecture: str, special_tokens: Sequence[str], quantized: bool = False, **options: Any) -> Writer:
    """Writes a tiny model of the architecture, with a tokenizer that has the real one's special tokens."""

    def write(folder: Path) -> None:
        tokenizer = byte_tokenizer(special_tokens, **options)
        ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
        config = tiny_config(
            architecture, vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id
        )
        config.update(ids)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_config(config)
        stops = [tokenizer.convert_tokens_to_ids(token) for token in special_tokens if token.startswith("<|e")]
        made.generation_config = GenerationConfig(eos_token_id=stops, **ids)
        made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if quantized:
            made = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4_config())
            (folder / "model.safetensors").unlink()
            made.save_pretrained(folder)

    return write


PYTHIA = model("gpt_neox", ["<|endoftext|>", "<|padding|>"], eos_token="<|endoftext|>", unk_token="<|endoftext|>")
QWEN = model(
    "qwen2",
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>"],
    eos_token="<|endoftext|>",
    pad_token="<|endoftext|>",
)
_LLAMA_TOKENS = (
    ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"]
    + ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
)  # fmt: skip
LLAMA = model("llama", _LLAMA_TOKENS, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
LLAMA_INSTRUCT = model(
    "llama", _LLAMA_TOKENS, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=CHAT_TEMPLATE
)
TINY_NF4_BASE = model("llama", ["<pad>", "<eos>"], quantized=True, eos_token="<eos>", pad_token="<pad>")


# Texts


def post(i: int) -> str:
    return f"SUBREDDIT: r/cats\n\nTITLE: Cat {i}\n\nPOST: My cat {i} sleeps.\nIs that fine?\n\nTL;DR:"


def summary(i: int) -> str:
    return f" Cat {i} sleeps{' a lot' * (i % 3)}."


def problem(i: int) -> str:
    return f"Ann has {i + 10} apples and buys {i + 4} more. How many has she?"


def solution(i: int) -> str:
    return f"She has {i + 10}+{i + 4} = <<{i + 10}+{i + 4}={2 * i + 14}>>{2 * i + 14} apples.\n#### {2 * i + 14}"


def review(i: int) -> str:
    return f"I saw this film {i} times.<br /><br />It is a {'fine' if i % 2 else 'poor'} one. I went home after it."


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# Data sets


def rows(of: Callable[[int], dict[str, Any]], *splits: str, config: str | None = None) -> Writer:
    """Writes a data set whose row number i is `of(i)`; splits are train and test where none are named."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        for split in splits or ("train", "test"):
            _write_rows(folder / f"{split}.jsonl", (of(i) for i in range(SIZES[split])))
        if config is not None:
            files = [{"split": split, "path": f"{split}.jsonl"} for split in splits or ("train", "test")]
            card = json.dumps({"configs": [{"config_name": config, "data_files": files}]})
            (folder / "README.md").write_text(f"---\n{card}\n---\n")

    return write


def _write_rows(path: Path, made: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


TLDR = rows(lambda i: {"prompt": post(i), "completion": summary(i)}, "train", "validation", "test")
TLDR_PREFERENCE = rows(
    lambda i: {"prompt": post(i), "chosen": summary(i), "rejected": summary(i + 1)}, "train", "validation"
)
CAPYBARA = rows(
    lambda i: {"source": "made", "messages": turns(problem(i), solution(i), "And then?", summary(i)), "num_turns": 2}
)
ULTRAFEEDBACK = rows(
    lambda i: {
        "chosen": turns(problem(i), solution(i)),
        "rejected": turns(problem(i), summary(i)),
        "score_chosen": 8.0,
        "score_rejected": 5.5,
    }
)
ULTRAFEEDBACK_PROMPT = rows(lambda i: {"prompt": turns(problem(i))})
IMDB = rows(lambda i: {"text": review(i), "label": i % 2}, config="plain_text")
GSM8K = rows(lambda i: {"question": problem(i), "answer": solution(i)}, config="main")


def made_by(module: str) -> Writer:
    """What the script's own module of data writes, in small."""

    def write(folder: Path) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
        importlib.import_module(module).write_data_sets(folder, seed=0, size=TRAIN_ROWS)

    return write


STAND_INS: dict[str, dict[str, Writer]] = {
    "arithmetic": {"runs/arithmetic/base/nf4": TINY_NF4_BASE, "runs/arithmetic/data": made_by("arithmetic_data")},
    "gsm8k": {"Qwen/Qwen2.5-1.5B": QWEN, "openai/gsm8k": GSM8K},
    "imdb": {"Qwen/Qwen2.5-0.5B": QWEN, "stanfordnlp/imdb": IMDB},
    "quickstart": {"runs/quickstart/base/nf4": TINY_NF4_BASE, "runs/quickstart/data": made_by("quickstart_data")},
    "tldr-llama-8b": {
        "meta-llama/Llama-3.1-8B": LLAMA,
        "trl-lib/tldr": TLDR,
        "trl-lib/tldr-preference": TLDR_PREFERENCE,
    },
    "tldr-pythia-1b": {
        "EleutherAI/pythia-1b-deduped": PYTHIA,
        "trl-lib/tldr": TLDR,
        "trl-lib/tldr-preference": TLDR_PREFERENCE,
    },
    "ultrafeedback": {
        "meta-llama/Llama-3.1-8B-Instruct": LLAMA_INSTRUCT,
        "trl-lib/Capybara": CAPYBARA,
        "trl-lib/ultrafeedback-prompt": ULTRAFEEDBACK_PROMPT,
        "trl-lib/ultrafeedback_binarized": ULTRAFEEDBACK,
    },
}
"""By recipe: the names that it takes from elsewhere, and what writes their stand-ins. A new recipe is entered here."""
