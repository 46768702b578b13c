"""The arithmetic recipe's base model: a tiny Llama that has read a textbook's sums and pupils'."""

from pathlib import Path

import torch
from tokenizers import Regex
from tokenizers.decoders import Fuse
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import recipe_base
from arithmetic_data import SIGNS, base_corpus
from recipe_base import BaseSettings

SUM_TOKENS = 12  # BOS, +37,85=122, EOS


def base_settings(seed: int, steps: int = 1200) -> BaseSettings:
    """Return a size and a training after which the base adds as the textbook does, also problems it has not read."""
    return BaseSettings(
        seed=seed, texts=32768, steps=steps, batch_size=128, block_tokens=SUM_TOKENS, learning_rate=3e-3
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a digit or sign."""
    return recipe_base.word_tokenizer(SIGNS, Split(Regex("."), "isolated"), Fuse())


def read_sums(settings: BaseSettings, tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return the corpus, one sum a row, and its labels: the answers only, since nobody can guess the problems.

    Returns:
        `(blocks, labels)`: both [texts, block_tokens] int64, padded on the right; labels are -100 elsewhere.
    """
    texts = [f"{text}{tokenizer.eos_token}" for text in base_corpus(settings.texts, settings.seed)]
    batch = tokenizer(texts, return_tensors="pt", padding="max_length", max_length=settings.block_tokens)
    blocks = batch["input_ids"]
    equals = (blocks == tokenizer.convert_tokens_to_ids("=")).long()
    answered = (equals.cumsum(1) - equals > 0) & batch["attention_mask"].bool()
    return blocks, torch.where(answered, blocks, -100)


def make_base(folder: Path, settings: BaseSettings) -> float:
    """Train the base and write it to `folder/float32` and `folder/nf4`; return the last training loss."""
    tokenizer = build_tokenizer()
    return recipe_base.make_base(folder, settings, tokenizer, *read_sums(settings, tokenizer))
