"""The quickstart's base model: a tiny Llama that has read rambling reviews."""

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import recipe_base
from quickstart_data import base_corpus, vocabulary
from recipe_base import BaseSettings


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer over the reviews' words."""
    return recipe_base.word_tokenizer(vocabulary(), WhitespaceSplit())


def pack_corpus(settings: BaseSettings, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the corpus as token ids [blocks, block_tokens], texts one after the other, each closed with EOS."""
    texts = [f"{text} {tokenizer.eos_token}" for text in base_corpus(settings.texts, settings.seed)]
    ids = torch.tensor([token for row in tokenizer(texts)["input_ids"] for token in row])
    blocks = len(ids) // settings.block_tokens
    return ids[: blocks * settings.block_tokens].view(blocks, settings.block_tokens)


def make_base(folder: Path, settings: BaseSettings) -> float:
    """Train the base and write it to `folder/float32` and `folder/nf4`; return the last training loss."""
    tokenizer = build_tokenizer()
    blocks = pack_corpus(settings, tokenizer)
    return recipe_base.make_base(folder, settings, tokenizer, blocks, blocks)
