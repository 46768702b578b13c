"""Whether a merged model answers as base and adapter did: greedy outputs, their logits, and the table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Write one sentence about the sea.",
    "How many days are there in a week, and what are they called?",
    "def fibonacci(n):",
)


@dataclass(frozen=True)
class Answer:
    """One prompt and a model's greedy output to it; P prompt tokens, T output tokens, V the vocabulary.

    Args:
        sequence: [1, P + T] int64.
        prompt_length: P.
        logits: [T, V], those that chose each output token, in the model's dtype, on the CPU.
    """

    sequence: Tensor
    prompt_length: int
    logits: Tensor

    @property
    def prompt(self) -> Tensor:
        """[1, P] int64."""
        return self.sequence[:, : self.prompt_length]

    @property
    def output(self) -> list[int]:
        """The T output tokens."""
        return self.sequence[0, self.prompt_length :].tolist()


@dataclass(frozen=True)
class Comparison:
    """What base + adapter said to a prompt and what the merged model says.

    Args:
        before: what base + adapter answered.
        output: the merged model's output tokens.
        logit_difference: the largest over the T tokens and the vocabulary, both models having read `before`.
    """

    before: Answer
    output: list[int]
    logit_difference: float

    @property
    def first_difference(self) -> int | None:
        """Index of the first output token that is not the same; None if all are."""
        if self.output == self.before.output:
            return None
        pairs = zip(self.before.output, self.output, strict=False)
        alike = [one == other for one, other in pairs]
        return alike.index(False) if False in alike else len(alike)

    @property
    def margin(self) -> float:
        """By how much base + adapter's logits preferred their token to the merged model's at the first difference."""
        first = self.first_difference
        if first is None or first >= min(len(self.output), len(self.before.output)):
            return 0.0
        logits = self.before.logits[first].float()
        return (logits[self.before.output[first]] - logits[self.output[first]]).item()


def read_prompts(given: Sequence[str] | None) -> list[str]:
    """Prompts from the command line: texts, or one file with a prompt on each line; None takes the default ones.

    Raises:
        ValueError: there is none.
    """
    if not given:
        return list(DEFAULT_PROMPTS)
    if len(given) == 1 and Path(given[0]).is_file():
        given = Path(given[0]).read_text(encoding="utf-8").splitlines()
    prompts = [prompt for prompt in given if prompt.strip()]
    if not prompts:
        raise ValueError("--prompts has no text in it; give a file with one prompt on each line, or the prompts.")
    return prompts


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[Tensor]:
    """Each prompt as [1, P] token ids; as a user's message where the tokenizer has a chat template.

    Raises:
        ValueError: a prompt has no tokens.
    """
    encoded = [_encode_one(tokenizer, prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids.numel():
            raise ValueError(f"The prompt {prompt!r} has no tokens in this vocabulary; give other --prompts.")
    return encoded


def _encode_one(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
    if not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")["input_ids"].long()
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, tokenize=True
    )
    return encoded["input_ids"].long()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int, pad_token_id: int | None) -> Tensor:
    """The prompt [1, P] and the model's greedy output to it, [1, P + T] int64 on the CPU."""
    prompt = prompt.to(model.device)
    sequence = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad_token_id,
    )
    return sequence.cpu()


@torch.no_grad()
def output_logits(model: PreTrainedModel, sequence: Tensor, prompt_length: int) -> Tensor:
    """The logits before each token after the prompt, [T, V] on the CPU, in the model's dtype."""
    sequence = sequence.to(model.device)
    logits = model(input_ids=sequence, attention_mask=torch.ones_like(sequence), use_cache=False).logits
    return logits[0, prompt_length - 1 : -1].cpu()


def answers(
    model: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int, pad_token_id: int | None
) -> list[Answer]:
    """What the model answers to each prompt [1, P]; all the logits are kept, so a handful of prompts."""
    sequences = [greedy(model, prompt, max_new_tokens, pad_token_id) for prompt in prompts]
    lengths = [prompt.shape[1] for prompt in prompts]
    return [
        Answer(sequence, length, output_logits(model, sequence, length))
        for sequence, length in zip(sequences, lengths, strict=True)
    ]


def compare(
    model: PreTrainedModel, before: Sequence[Answer], max_new_tokens: int, pad_token_id: int | None
) -> list[Comparison]:
    """The merged model beside each answer that base + adapter gave."""
    return [_compare_one(model, answer, max_new_tokens, pad_token_id) for answer in before]


def _compare_one(model: PreTrainedModel, before: Answer, max_new_tokens: int, pad_token_id: int | None) -> Comparison:
    output = greedy(model, before.prompt, max_new_tokens, pad_token_id)[0, before.prompt_length :].tolist()
    logits = output_logits(model, before.sequence, before.prompt_length)
    difference = (logits.float() - before.logits.float()).abs().max().item()
    return Comparison(before, output, difference)


def comparison_table(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], comparisons: Sequence[Comparison]
) -> Table:
    """Prompt, output of base + adapter, and whether the merged model says the same."""
    table = Table(title="Greedy outputs, base + adapter and merged", show_lines=True, title_justify="left")
    for name, style, ratio in (("prompt", "cyan", 2), ("base + adapter", "green", 3), ("merged", None, 2)):
        table.add_column(name, style=style, ratio=ratio)
    for prompt, comparison in zip(prompts, comparisons, strict=True):
        output = tokenizer.decode(comparison.before.output)
        table.add_row(Text(prompt), Text(output), _verdict(tokenizer, comparison))
    return table


def _verdict(tokenizer: PreTrainedTokenizerBase, comparison: Comparison) -> Text:
    first = comparison.first_difference
    if first is None:
        return Text("same", style="green")
    rest = (tokenizer.decode(tokens[first:]) for tokens in (comparison.before.output, comparison.output))
    before, after = (repr(text) if text else "the end" for text in rest)
    close = f"base + adapter's logits for the two tokens are {comparison.margin:.2g} apart"
    return Text(f"from token {first + 1} on {after} instead of {before}; {close}", style="red")
