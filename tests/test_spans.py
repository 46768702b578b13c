"""From characters of a completion to the tokens that hold them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batches import lawful
from builders import tiny_tokenizer
from byte_level import EOS, PAD, byte_level_tokenizer, token_bytes
from ppo_lora.spans import rewards_of_spans, token_ends

CHARACTERS = "the nïéü€日本語🙂👩‍\n.,' a"


def _decoder(tokenizer, calls=None):
    def decode(ids):
        if calls is not None:
            calls.append(len(ids))
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    return decode


def _ends(tokenizer, ids) -> list[int]:
    decode = _decoder(tokenizer)
    return token_ends(ids, decode(ids), decode)


def _ends_by_bytes(tokenizer, ids) -> list[int]:
    """The definition for valid text, from the bytes of each token: characters that are complete after it."""
    ends, seen = [], b""
    for token in ids:
        seen += token_bytes(tokenizer, token)
        ends.append(len(seen.decode("utf-8", errors="ignore")))
    return ends


def _split(tokenizer, text: str, cuts: set[int]) -> list[int]:
    """The text as tokens, but never over a cut: valid ids that no tokenizer would give for it."""
    data = text.encode()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    by_bytes = {token_bytes(tokenizer, i): i for i in range(2, len(tokenizer))}
    ids = []
    for first, last in zip(places, places[1:], strict=False):
        piece = data[first:last]
        while piece:
            size = next(n for n in range(len(piece), 0, -1) if piece[:n] in by_bytes)
            ids.append(by_bytes[piece[:size]])
            piece = piece[size:]
    return ids


texts = st.text(st.sampled_from(CHARACTERS), max_size=25)


@given(texts, st.sets(st.integers(0, 200), max_size=12), st.sampled_from([0, 20, 60]), st.booleans())
@lawful
def test_any_tokens_of_a_text(text, cuts, merges, stopped):
    tokenizer = byte_level_tokenizer(merges)
    ids = _split(tokenizer, text, cuts) + [EOS] * stopped
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert _ends(tokenizer, ids) == _ends_by_bytes(tokenizer, ids)


@given(texts, st.sampled_from([0, 60]))
@lawful
def test_the_tokenizers_own_tokens(text, merges):
    tokenizer = byte_level_tokenizer(merges)
    ids = tokenizer(text)["input_ids"]
    assert _ends(tokenizer, ids) == _ends_by_bytes(tokenizer, ids)


@given(texts, st.lists(st.integers(0, 60), max_size=6), st.data())
@lawful
def test_special_tokens_anywhere_show_nothing(text, places, data):
    tokenizer = byte_level_tokenizer(60)
    ids = tokenizer(text)["input_ids"]
    for place in places:
        ids.insert(place % (len(ids) + 1), data.draw(st.sampled_from([PAD, EOS])))
    assert _ends(tokenizer, ids) == _ends_by_bytes(tokenizer, ids)


@given(st.lists(st.integers(0, 317), max_size=40), st.sampled_from([20, 60]))
@lawful
def test_any_ids_at_all(ids, merges):
    """Most of these are no valid text: every character still has a token, in order, and the last one is there."""
    tokenizer = byte_level_tokenizer(merges)
    ids = [token for token in ids if token < len(tokenizer)]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = _ends(tokenizer, ids)
    assert len(ends) == len(ids) and ends == sorted(ends) and (not ids or ends[-1] == len(text))
    beginnings = [tokenizer.decode(ids[: i + 1], skip_special_tokens=True) for i in range(len(ids))]
    for end, beginning in zip(ends, beginnings, strict=True):
        assert beginning[:end] == text[:end]


def test_a_character_of_many_tokens_is_at_the_last():
    tokenizer = byte_level_tokenizer(0)
    ids = tokenizer("a🙂b")["input_ids"]
    assert len(ids) == 6
    assert _ends(tokenizer, ids) == [1, 1, 1, 1, 2, 3]


def test_a_token_of_many_characters():
    tokenizer = byte_level_tokenizer(60)
    longest = max(range(2, len(tokenizer)), key=lambda token: len(tokenizer.decode([token])))
    length = len(tokenizer.decode([longest]))
    assert length >= 3
    assert _ends(tokenizer, [longest, longest]) == [length, 2 * length]


def test_words_with_spaces_between_them():
    assert _ends(tiny_tokenizer(), [7, 12, 1, 9]) == [2, 6, 6, 9]  # "w7 w12 w9", EOS in between


def _sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama's way: a mark for the space before a word, bytes for what is not in the vocabulary."""
    words = ["<unk>", "<eos>", "▁a", "▁b", "c", "▁"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def test_marks_for_spaces_and_bytes_in_between():
    tokenizer = _sentencepiece_like()
    euro = [6 + byte for byte in "€".encode()]
    ids = [2, 4, *euro, 3, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ac€ b"
    assert _ends(tokenizer, ids) == [1, 2, 2, 2, 3, 5, 5]


def test_special_tokens_first_and_then_a_mark():
    tokenizer = _sentencepiece_like()
    ids = [1] * 12 + [2, 3] + [1] * 12 + [3, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a b b a"
    assert _ends(tokenizer, ids) == [0] * 12 + [1, 3] + [3] * 12 + [5, 7]


def test_what_windows_cannot_see_is_looked_up_from_the_beginning():
    """A decoding that depends on the first token: windows go wrong, the result does not."""

    def decode(ids):
        return "".join(map(str, ids)) if ids and ids[0] == 7 else "x" * len(ids)

    ids = [7, 1, 2, 3]
    assert token_ends(ids, decode(ids), decode) == [1, 2, 3, 4]


@pytest.mark.parametrize("filler", ["words and more of them ", "🙂€日", b"\xc3", b"\xe2\x82"])
def test_the_work_grows_with_the_length(filler):
    """Each token is decoded a bounded number of times, broken text included."""
    tokenizer = byte_level_tokenizer(60)
    if isinstance(filler, str):
        ids = tokenizer(filler * 100)["input_ids"]
    else:
        ids = [i for byte in filler for i in range(2, 258) if token_bytes(tokenizer, i) == bytes([byte])] * 300
    calls: list[int] = []
    ends = token_ends(ids, tokenizer.decode(ids, skip_special_tokens=True), _decoder(tokenizer, calls))
    assert len(ends) == len(ids) and sum(calls) <= 25 * len(ids)


def test_rewards_land_on_the_last_character_of_a_span():
    ends = [2, 2, 5, 9]
    spans = [((0, 2), 1.0), ((0, 3), 2.0), ((3, 5), 4.0), ((8, 9), 8.0), ((0, 1), 16.0)]
    assert rewards_of_spans(spans, ends) == [17.0, 0.0, 6.0, 8.0]
    assert rewards_of_spans([], ends) == [0.0] * 4


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 2), (0, 10), (9, 10)])
def test_a_span_that_is_not_in_the_text_is_refused(span):
    message = f"the span ({span[0]}, {span[1]}) is not inside of the completion's 9 characters"
    with pytest.raises(ValueError, match=re.escape(message)):
        rewards_of_spans([(span, 1.0)], [2, 2, 5, 9])
