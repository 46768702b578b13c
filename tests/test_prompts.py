"""Prompts of an iteration: several responses each, and streams, which go on where they were."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from datasets import Dataset, IterableDataset

from builders import CHAT_TEMPLATE, prompts, tiny_model, tiny_tokenizer
from ppo_lora import PPOTrainer
from ppo_lora.prompts import PromptStream, evaluation_prompts, iteration_prompts, training_prompts
from runs import config, count_w5, logged

TOKENIZER = tiny_tokenizer()


def stream_of(*texts, **columns) -> IterableDataset:
    return Dataset.from_dict({"prompt": list(texts), **columns}).to_iterable_dataset()


def take(stream, start, count):
    return stream.span(start, count).columns["prompt"]


def words(count):
    return [f"w{3 + i}" for i in range(count)]


def run(folder, dataset, rewards=count_w5, eval_dataset=None, **changes):
    made = PPOTrainer(
        tiny_model(), rewards, config(folder, **changes), dataset, eval_dataset, processing_class=tiny_tokenizer()
    )
    made.train()
    return made


class Watch:
    """A reward that remembers what it saw."""

    __name__ = "watch"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, **columns):
        self.calls.append((prompts, completions, columns))
        return [float(len(text)) for text in completions]

    @property
    def prompts(self):
        return [prompt for call in self.calls for prompt in call[0]]


# Several responses a prompt


def test_responses_to_one_prompt_lie_together_and_differ(tmp_path):
    watch = Watch()
    run(tmp_path, prompts(16, number=list(range(16))), watch, num_generations=4)
    ((seen, completions, columns),) = watch.calls
    assert len(seen) == 16 and len(set(columns["number"])) == 4
    for first in range(0, 16, 4):
        assert len(set(columns["number"][first : first + 4])) == len(set(seen[first : first + 4])) == 1
        assert len(set(completions[first : first + 4])) > 1


def test_every_prompt_is_used_once_a_pass_whatever_is_sampled_of_it(tmp_path):
    """10 prompts, 4 an iteration: five iterations are two passes, and none is cut at its tail."""
    watch = Watch()
    run(tmp_path, prompts(10, number=list(range(10))), watch, num_generations=4, max_steps=20)
    numbers = [number for *_, columns in watch.calls for number in columns["number"][::4]]
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10))


def test_epochs_count_prompts_and_episodes_responses(tmp_path):
    by_epochs = run(tmp_path, prompts(10), num_generations=4, max_steps=-1, num_train_epochs=1)
    assert by_epochs.state.global_step == 3 * 4 and logged(by_epochs)[-1]["episode"] == 3 * 16
    by_episodes = run(tmp_path, prompts(10), num_generations=4, max_steps=-1, total_episodes=33)
    assert by_episodes.state.global_step == 3 * 4


def test_too_few_prompts_for_an_iteration_are_counted_as_prompts(tmp_path):
    run(tmp_path, prompts(4), num_generations=4)
    message = "train_dataset has 3 prompts, one iteration takes 4 (per_device_train_batch_size 4 * "
    with pytest.raises(ValueError, match=re.escape(message) + ".* 1 processes / num_generations 4"):
        run(tmp_path, prompts(3), num_generations=4)


def test_one_response_a_prompt_is_as_without_the_option(tmp_path):
    plain, one = run(tmp_path, prompts(32)), run(tmp_path, prompts(32), num_generations=1)
    for name, parameter in plain.base.named_parameters():
        assert torch.equal(one.base.get_parameter(name), parameter)


def test_processes_take_whole_prompts(tmp_path, monkeypatch):
    settings = config(tmp_path, num_generations=4)
    whole = training_prompts(prompts(16), TOKENIZER, settings)
    everything = iteration_prompts(whole, 1, settings).columns["prompt"]
    monkeypatch.setattr(type(settings), "world_size", property(lambda self: 2))
    settings.num_mini_batches = 1
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(type(settings), "process_index", property(lambda self, rank=rank: rank))
        parts += iteration_prompts(whole, 1, settings).columns["prompt"]
    assert parts == everything


# Streams


def test_a_stream_goes_on_in_its_order_and_starts_again_at_its_end():
    stream = PromptStream(stream_of(*words(5)), TOKENIZER, 8)
    assert take(stream, 0, 3) + take(stream, 3, 3) + take(stream, 6, 6) == (words(5) * 3)[:12]


@pytest.mark.parametrize("start", [0, 4, 7, 13])
@pytest.mark.parametrize("overlong", ["truncate", "drop"])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.filterwarnings("ignore:train_dataset has prompts over")
def test_a_new_stream_finds_its_place(start, overlong, shuffled):
    texts = [text if i % 3 else f"{text} {text} {text}" for i, text in enumerate(words(7))]

    def open_one():
        dataset = stream_of(*texts)
        return PromptStream(dataset.shuffle(seed=3, buffer_size=4) if shuffled else dataset, TOKENIZER, 2, overlong)

    whole, resumed = open_one(), open_one()
    chain = [text for place in range(0, 20, 4) for text in take(whole, place, 4)]
    assert take(resumed, start, 5) == chain[start : start + 5]
    assert take(whole, start, 5) == chain[start : start + 5]


def test_a_shuffled_stream_is_shuffled_anew_for_each_pass():
    stream = PromptStream(stream_of(*words(30)).shuffle(seed=0, buffer_size=30), TOKENIZER, 8)
    first, second = take(stream, 0, 30), take(stream, 30, 30)
    assert sorted(first) == sorted(second) == sorted(words(30)) and first != second


def test_a_stream_has_tokens_and_columns_as_a_data_set_has(tmp_path):
    dataset = prompts(6, number=list(range(6)))
    batch = PromptStream(dataset.to_iterable_dataset(), TOKENIZER, 8).span(0, 6, slice(1, 4))
    expected = training_prompts(dataset, TOKENIZER, config(tmp_path, num_mini_batches=1, num_generations=8))
    expected = expected.batch([1, 2, 3])
    assert batch.columns == expected.columns
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.attention_mask, expected.attention_mask)


@pytest.mark.parametrize(("overlong", "kept"), [("truncate", [[7, 8], [5], [7, 8]]), ("drop", [[5], [6], [5]])])
def test_long_prompts_of_a_stream(overlong, kept):
    stream = PromptStream(stream_of("w6 w7 w8", "w5", "w9 w7 w8", "w6"), TOKENIZER, 2, overlong)
    action = {"truncate": "truncated on the left", "drop": "dropped"}[overlong]
    with pytest.warns(UserWarning, match=f"over max_prompt_length=2 tokens; they are {action}") as caught:
        batch = stream.span(0, 3)
    assert len(caught) == 1 and stream.overlong_count >= 2 and stream.longest == 2
    assert [row[mask].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)] == kept


def test_a_stream_of_long_prompts_alone_ends_in_an_error():
    stream = PromptStream(stream_of("w5 w6", "w7 w8"), TOKENIZER, 1, "drop")
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="All 2 prompts of train_dataset are over max_prompt_length=1 tokens"),
    ):
        stream.span(0, 1)


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (stream_of("w5").take(0), ValueError, "train_dataset is empty; expected rows with a 'prompt' column."),
        (
            Dataset.from_dict({"question": ["w5"]}).to_iterable_dataset(),
            ValueError,
            "train_dataset has the columns ['question']; expected 'prompt'",
        ),
        (stream_of(7), TypeError, "The prompts of train_dataset are of type int"),
        (
            stream_of([{"role": "user", "content": "w5"}]),
            ValueError,
            "train_dataset has chat messages, but the tokenizer has no chat template.",
        ),
    ],
    ids=["empty", "no prompt", "numbers", "no template"],
)
def test_streams_are_refused_as_data_sets_are(tmp_path, dataset, error, message):
    with pytest.raises(error, match=re.escape(message)):
        run(tmp_path, dataset)


def test_a_stream_of_messages():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    stream = PromptStream(stream_of([{"role": "user", "content": "w10"}]), tokenizer, 8)
    assert stream.span(0, 1).input_ids.tolist() == [[3, 10, 4]]


def test_a_stream_needs_a_number_of_steps_and_a_length(tmp_path):
    with pytest.raises(ValueError, match="train_dataset is a stream.*Set total_episodes or max_steps"):
        run(tmp_path, stream_of("w5"), max_steps=-1)
    with pytest.raises(ValueError, match="max_prompt_length is None, but train_dataset is a stream"):
        run(tmp_path, stream_of("w5"), max_prompt_length=None)


def test_training_on_a_stream_takes_its_prompts_in_order(tmp_path):
    watch = Watch()
    made = run(tmp_path, stream_of(*words(9)), watch, max_steps=-1, total_episodes=32, num_generations=2)
    assert watch.prompts[::2] == (words(9) * 2)[:16] and made.state.global_step == 8


def test_a_resumed_stream_goes_on_at_its_place(tmp_path):
    options = {"num_generations": 2, "max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "whole", stream_of(*words(9)), **options)
    resumed = PPOTrainer(
        tiny_model(),
        count_w5,
        config(tmp_path / "again", **options),
        stream_of(*words(9)),
        processing_class=tiny_tokenizer(),
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    for name, parameter in whole.base.named_parameters():
        assert torch.equal(resumed.base.get_parameter(name), parameter), name


def test_a_run_resumes_with_its_number_of_responses(tmp_path):
    run(tmp_path, prompts(32), num_generations=2, save_strategy="steps", save_steps=4)
    again = PPOTrainer(
        tiny_model(),
        count_w5,
        config(tmp_path, num_generations=4, max_steps=8),
        prompts(32),
        processing_class=tiny_tokenizer(),
    )
    with pytest.raises(ValueError, match="'num_generations': 2.*'num_generations': 4"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_evaluation_streams_are_read_to_their_end(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = evaluation_prompts({"a": stream_of(*words(3)), "b": prompts(2)}, TOKENIZER, config(tmp_path))
    assert {name: len(part) for name, part in named.items()} == {"a": 3, "b": 2}
    with pytest.raises(ValueError, match="^eval_dataset is empty"):
        evaluation_prompts(stream_of("w5").take(0), TOKENIZER, config(tmp_path))
