"""What the small recipes judge their adapters with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ppo_lora import SharedBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the base's tokenizer, padding on the left."""
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


def pair_accuracy(base: SharedBase, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[dict[str, str]]) -> float:
    """Return the share of preference pairs whose chosen completion the reward role scores higher."""

    def scores(key: str) -> Tensor:
        texts = [pair["prompt"] + pair[key] + tokenizer.eos_token for pair in pairs]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        return base.scores(batch["input_ids"], batch["attention_mask"])

    with torch.no_grad():
        return (scores("chosen") > scores("rejected")).float().mean().item()
