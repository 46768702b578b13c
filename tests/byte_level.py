"""Byte-level BPE tokenizers made on the spot: every byte is a token, and the merges are what a text teaches."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, EOS = 0, 1
_TEXT = "the theme then, naïve café über €5 日本語 日本 🙂🙂 👩‍👩‍👧 don't can't ... a b . , \n\n  ok ok"


@cache
def byte_level_tokenizer(merges: int = 60, **options) -> PreTrainedTokenizerFast:
    """Ids 0 and 1 are pad and EOS, special both; then 256 bytes and up to ``merges`` longer tokens.

    Some of these are pieces of characters, or whole characters with a piece of the next.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + merges,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", **options)


def token_bytes(tokenizer: PreTrainedTokenizerFast, token: int) -> bytes:
    """What a token stands for; nothing for a special one."""
    if token in (PAD, EOS):
        return b""
    return bytes(_byte_of()[character] for character in tokenizer.convert_ids_to_tokens(token))


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for what follows 255."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
