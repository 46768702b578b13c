"""Prompts: tokens, padding, what is refused, and the order in which iterations take them."""

from __future__ import annotations

import re
import warnings
from collections import Counter

import pytest
import torch
from datasets import Dataset, DatasetDict
from datasets.utils.logging import disable_progress_bar, enable_progress_bar
from hypothesis import given
from hypothesis import strategies as st

from batches import lawful
from builders import BOS, CHAT_TEMPLATE, EOS, PAD, prompts, tiny_tokenizer
from ppo_lora.data import PromptDataset, is_chat, iteration_rows, left_pad


@pytest.fixture(autouse=True)
def _quiet():
    disable_progress_bar()
    yield
    enable_progress_bar()


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _texts(*texts, **columns) -> Dataset:
    return Dataset.from_dict({"prompt": list(texts), **columns})


def _said(*turns) -> list[dict[str, str]]:
    """Messages from words: the user speaks first, then the assistant, and so on."""
    return [{"role": ("user", "assistant")[i % 2], "content": words} for i, words in enumerate(turns)]


def _real(dataset: PromptDataset) -> list[list[int]]:
    batch = dataset.batch(range(len(dataset)))
    return [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


def test_left_pad_by_hand():
    ids, mask = left_pad([[5, 6, 7], [8], [9, 3]], pad_token_id=1)
    assert ids.tolist() == [[5, 6, 7], [1, 1, 8], [1, 9, 3]]
    assert mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=5))
@lawful
def test_left_pad_keeps_every_token(rows):
    ids, mask = left_pad(rows, pad_token_id=0)
    assert [row[real].tolist() for row, real in zip(ids, mask, strict=True)] == rows
    assert ids.shape == (len(rows), max(map(len, rows)))
    assert mask[:, -1].all()


def test_text_prompts(tokenizer):
    batch = PromptDataset(_texts("w5 w6", "w7"), tokenizer).batch([0, 1])
    assert batch.input_ids.tolist() == [[5, 6], [PAD, 7]]
    assert batch.attention_mask.tolist() == [[True, True], [False, True]]


def test_a_pad_id_in_a_prompt_is_real(tokenizer):
    assert PromptDataset(_texts("<pad> w5"), tokenizer).batch([0]).attention_mask.tolist() == [[True, True]]


def test_columns_come_along_in_the_order_of_the_rows(tokenizer):
    dataset = PromptDataset(_texts("w5", "w6", "w7", answer=[10, 20, 30]), tokenizer)
    batch = dataset.batch([2, 0])
    assert len(dataset) == 3 and len(batch) == 2
    assert batch.columns == {"prompt": ["w7", "w5"], "answer": [30, 10]}
    assert batch.input_ids.tolist() == [[7], [5]]


def test_an_appended_eos_is_taken_off_and_a_written_one_stays(tokenizer):
    class Appending:
        pad_token_id, eos_token_id, eos_token, chat_template = PAD, EOS, "<eos>", None

        def __call__(self, text):
            return {"input_ids": [*tokenizer(text)["input_ids"], EOS]}

    assert _real(PromptDataset(_texts("w5 w6"), Appending())) == [[5, 6]]
    assert _real(PromptDataset(_texts("w5 <eos>"), tokenizer)) == [[5, EOS]]


def test_an_empty_prompt_is_one_bos_token_where_the_tokenizer_adds_it(tokenizer):
    class Opening:
        pad_token_id, eos_token_id, eos_token, chat_template = PAD, EOS, "<eos>", None

        def __call__(self, text):
            return {"input_ids": [BOS, *tokenizer(text)["input_ids"]]}

    assert _real(PromptDataset(_texts("w5", ""), Opening())) == [[BOS, 5], [BOS]]


def test_a_chat_prompt_opens_the_assistants_turn(chat_tokenizer):
    dataset = PromptDataset(Dataset.from_dict({"prompt": [_said("w10 w11")]}), chat_tokenizer)
    assert _real(dataset) == [[3, 10, 11, 4]]
    assert dataset.batch([0]).columns["prompt"] == [_said("w10 w11")]


def test_a_chat_prompt_with_an_unfinished_answer_is_continued(chat_tokenizer):
    given = Dataset.from_dict({"prompt": [_said("w10", "w20 w21"), _said("w10", "w20", "w30")]})
    assert _real(PromptDataset(given, chat_tokenizer)) == [[3, 10, 4, 20, 21], [3, 10, 4, 20, 3, 30, 4]]


def test_is_chat():
    assert is_chat(Dataset.from_dict({"prompt": [_said("w10")]}))
    assert not is_chat(_texts("w5"))


LONG = ("w5", "w6 w7 w8", "w9 w10", "w11 w12 w13 w14")


def test_truncation_keeps_the_end_and_says_so(tokenizer):
    with pytest.warns(UserWarning) as caught:
        dataset = PromptDataset(_texts(*LONG), tokenizer, max_length=2)
    assert [str(warning.message) for warning in caught] == [
        "2 of 4 prompts in train_dataset are over max_prompt_length=2 tokens and were truncated on the left "
        "(overlong_prompts='truncate')."
    ]
    assert caught[0].filename == __file__
    assert _real(dataset) == [[5], [7, 8], [9, 10], [13, 14]]
    assert dataset.overlong_count == 2


def test_dropping_leaves_prompts_out_and_says_so(tokenizer):
    message = "2 of 4 prompts in eval_dataset are over max_prompt_length=2 tokens and were dropped "
    with pytest.warns(UserWarning, match=re.escape(message + "(overlong_prompts='drop').")):
        dataset = PromptDataset(
            _texts(*LONG, n=[0, 1, 2, 3]), tokenizer, max_length=2, overlong="drop", name="eval_dataset"
        )
    assert _real(dataset) == [[5], [9, 10]]
    assert dataset.batch([0, 1]).columns["n"] == [0, 2]
    assert dataset.overlong_count == 2


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
@pytest.mark.parametrize("max_length", [4, None])
def test_prompts_that_fit_are_left_alone_in_silence(tokenizer, overlong, max_length):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = PromptDataset(_texts(*LONG), tokenizer, max_length=max_length, overlong=overlong)
    assert [len(ids) for ids in _real(dataset)] == [1, 3, 2, 4]
    assert dataset.overlong_count == 0


@pytest.mark.parametrize(
    ("max_length", "overlong", "longest"),
    [(None, "truncate", 4), (3, "truncate", 3), (9, "truncate", 4), (3, "drop", 3), (2, "drop", 2)],
)
def test_longest_is_what_a_batch_can_hold(tokenizer, max_length, overlong, longest):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = PromptDataset(_texts(*LONG), tokenizer, max_length, overlong)
    assert dataset.longest == longest == max(map(len, _real(dataset)))


def test_dropped_prompts_are_not_the_longest(tokenizer):
    with pytest.warns(UserWarning):
        dataset = PromptDataset(_texts("w5", "w6 w7 w8 w9"), tokenizer, max_length=3, overlong="drop")
    assert dataset.longest == 1


def test_nothing_left_is_an_error(tokenizer):
    message = "All 2 prompts of train_dataset are over max_prompt_length=1 tokens."
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptDataset(_texts("w5 w6", "w7 w8"), tokenizer, max_length=1, overlong="drop")


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        pytest.param(
            DatasetDict(train=_texts("w5")),
            TypeError,
            "train_dataset is a DatasetDict; expected a datasets.Dataset with a 'prompt' column "
            "(pick a split of a DatasetDict, as in dataset['train']).",
            id="DatasetDict",
        ),
        pytest.param(
            ["w5"], TypeError, "train_dataset is a list; expected a datasets.Dataset with a 'prompt' column", id="list"
        ),
        pytest.param(None, TypeError, "train_dataset is a NoneType; expected a datasets.Dataset", id="None"),
        pytest.param(
            Dataset.from_dict({"prompt": []}),
            ValueError,
            "train_dataset is empty; expected rows with a 'prompt' column.",
            id="empty",
        ),
        pytest.param(
            Dataset.from_dict({"question": ["w5"], "answer": ["w6"]}),
            ValueError,
            "train_dataset has the columns ['question', 'answer']; expected 'prompt', text or chat messages "
            "(TRL's prompt-only format). Rename yours: dataset.rename_column('...', 'prompt').",
            id="no prompt column",
        ),
        pytest.param(
            Dataset.from_dict({"prompt": [_said("w5")]}),
            ValueError,
            "train_dataset has chat messages, but the tokenizer has no chat template. Use the tokenizer of a chat "
            "model, set tokenizer.chat_template, or give prompts as text.",
            id="no chat template",
        ),
        pytest.param(
            Dataset.from_dict({"prompt": [7, 8]}),
            TypeError,
            "The prompts of train_dataset are of type int; expected text or a list of chat messages.",
            id="numbers",
        ),
        pytest.param(
            Dataset.from_dict({"prompt": [["w5", "w6"]]}),
            TypeError,
            "The prompts of train_dataset are of type list; expected text or a list of chat messages.",
            id="lists of text",
        ),
        pytest.param(
            _texts("w5", ""),
            ValueError,
            "The prompt '' has no tokens; every prompt needs at least one (a BOS token, say).",
            id="no tokens",
        ),
    ],
)
def test_what_is_refused_and_why(tokenizer, dataset, error, message):
    with pytest.raises(error, match=re.escape(message)):
        PromptDataset(dataset, tokenizer)


def test_errors_call_the_data_set_by_its_name(tokenizer):
    with pytest.raises(ValueError, match="^eval_dataset is empty"):
        PromptDataset(Dataset.from_dict({"prompt": []}), tokenizer, name="eval_dataset")


@pytest.mark.parametrize("missing", [None, []], ids=["None", "no messages"])
def test_a_missing_prompt_in_a_later_row_is_an_error_of_ours(chat_tokenizer, missing):
    filled = "w5" if missing is None else _said("w5")
    with pytest.raises((ValueError, TypeError), match="prompt"):
        PromptDataset(Dataset.from_dict({"prompt": [filled, missing]}), chat_tokenizer)


def test_the_data_set_is_left_alone(tokenizer):
    dataset = prompts(8)
    with pytest.warns(UserWarning):
        PromptDataset(dataset, tokenizer, max_length=1, overlong="drop")
    assert dataset.column_names == ["prompt"] and len(dataset) == 8


sizes = st.integers(1, 12)
seeds = st.integers(0, 2**31)


@given(rows=sizes, total=sizes, seed=seeds)
@lawful
def test_every_prompt_is_used_once_a_pass(rows, total, seed):
    iterations = 3 * total
    chain = [row for i in range(iterations) for row in iteration_rows(i, rows, total, seed)]
    assert len(chain) == rows * iterations
    for start in range(0, len(chain), total):
        assert sorted(chain[start : start + total]) == list(range(total))


@given(rows=sizes, total=sizes, seed=seeds)
@lawful
def test_the_order_does_not_depend_on_how_it_is_cut(rows, total, seed):
    cut = [row for i in range(6) for row in iteration_rows(i, rows, total, seed)]
    assert cut == iteration_rows(0, 6 * rows, total, seed)


def test_rows_are_a_function_of_their_arguments_alone():
    torch.manual_seed(1)
    first = iteration_rows(5, 4, 10, seed=7)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert iteration_rows(5, 4, 10, seed=7) == first
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_and_passes_are_shuffled_differently():
    orders = [tuple(iteration_rows(i, 50, 50, seed)) for seed in range(4) for i in range(4)]
    assert len(set(orders)) == len(orders)


def test_more_rows_than_prompts_take_several_passes():
    assert sorted(Counter(iteration_rows(0, 8, 3, seed=0)).values()) == [2, 3, 3]
