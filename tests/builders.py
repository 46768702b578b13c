"""Tiny models, tokenizers and data sets, made on the spot. Nothing here comes from a network."""

from __future__ import annotations

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, EOS, BOS = 0, 1, 2
VOCABULARY = 50
ARCHITECTURES = ("llama", "qwen2", "gpt2", "gpt_neox")
MORE_ARCHITECTURES = ("mistral", "gemma", "phi", "falcon")
"""For what has to hold for every architecture and is quickly seen."""

_SIZES = {
    "llama": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    "qwen2": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "gpt_neox": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
    "mistral": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    "gemma": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
    ),
    "phi": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4),
    "falcon": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
}


def tiny_config(architecture: str = "llama", vocab_size: int = VOCABULARY, **changes):
    """A configuration of two layers and 64 dimensions; dropout as the architecture has it by default."""
    settings = {
        **_SIZES[architecture],
        "vocab_size": vocab_size,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        **changes,
    }
    return AutoConfig.for_model(architecture, **settings)


def tiny_model(architecture: str = "llama", seed: int = 0, vocab_size: int = VOCABULARY, **changes) -> PreTrainedModel:
    """A float32 causal language model with random weights, the same for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(architecture, vocab_size, **changes)).eval()


def save_tiny_model(folder, architecture: str = "llama", seed: int = 0, **changes) -> str:
    """Save such a model with its tokenizer; returns the folder as text."""
    tiny_model(architecture, seed, **changes).save_pretrained(folder)
    tiny_tokenizer(changes.get("vocab_size", VOCABULARY)).save_pretrained(folder)
    return str(folder)


def tiny_reward_model(num_labels: int = 1, seed: int = 7) -> PreTrainedModel:
    """A float32 sequence-classification model with random weights."""
    settings = tiny_config("llama", hidden_size=32)
    settings.num_labels = num_labels
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(settings).eval()


def save_reward_model(folder) -> str:
    """Save such a model with its tokenizer; returns the folder as text."""
    tiny_reward_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def nf4_config(double_quantization: bool = False) -> BitsAndBytesConfig:
    """NF4 with float32 arithmetic, which the CPU does quickly."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=double_quantization,
    )


def tiny_tokenizer(vocab_size: int = VOCABULARY, **special) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words w3, w4, ...; ids are the numbers in the words, 0 to 2 are pad, EOS and BOS."""
    words = ["<pad>", "<eos>", "<bos>"] + [f"w{i}" for i in range(3, vocab_size)]
    words_to_ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(words_to_ids, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", **special}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: token for name, token in names.items() if token is not None}
    )


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}w3 {% else %}w4 {% endif %}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w4{% endif %}"
)


def prompts(rows: int = 32, **columns) -> Dataset:
    """Text prompts of one to four words, and any further columns."""
    texts = [" ".join(f"w{3 + (7 * i + 5 * j) % (VOCABULARY - 3)}" for j in range(1 + i % 4)) for i in range(rows)]
    return Dataset.from_dict({"prompt": texts, **columns})


def padded_batch(rows: int = 4, prompt: int = 5, response: int = 6, seed: int = 0, vocab_size: int = VOCABULARY):
    """Random input ids [rows, prompt + response] and a bool mask, left padding and right padding of many widths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (rows, prompt + response), generator=generator)
    left = torch.randint(0, prompt, (rows, 1), generator=generator)
    right = torch.randint(1, response + 1, (rows, 1), generator=generator)
    positions = torch.arange(prompt + response)
    mask = (positions >= left) & (positions < prompt + right)
    return torch.where(mask, ids, torch.full_like(ids, PAD)), mask


def randomize(parameters, seed: int = 0, scale: float = 0.05) -> None:
    """Give adapters and heads weights that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
