"""What reward sources see of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .spans import token_ends
from .types import Prompts, Rollout

_OWN_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")


@dataclass(frozen=True)
class Responses:
    """What a scorer sees of a rollout.

    Attributes:
        prompts: B prompts as the data set has them, text or messages.
        completions: B completions in the same form: text, or one assistant message.
        completion_ids: B lists of token ids, the stop token included.
        columns: the data set's other columns.
        rollout: the tokens.
        tokenizer: that decoded them; only rewards of spans need it.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    rollout: Rollout
    tokenizer: PreTrainedTokenizerBase | None = None

    def text(self, row: int) -> str:
        """The text of a completion, the content of a message."""
        completion = self.completions[row]
        return completion if isinstance(completion, str) else str(completion[0]["content"])

    def token_ends(self, row: int) -> list[int]:
        """How many characters of a completion's text there are after each of its tokens.

        Raises:
            ValueError: there is no tokenizer to know that from.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("rewards of spans need responses with a tokenizer, as read_responses makes them")
        decode = lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))  # noqa: E731
        return token_ends(self.completion_ids[row], self.text(row), decode)


def read_responses(prompts: Prompts, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Responses:
    """Decode a rollout for scorers and for people."""
    given = prompts.columns["prompt"]
    ids = rollout.completion_ids()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(given, texts, strict=True)
    ]
    columns = {name: values for name, values in prompts.columns.items() if name not in _OWN_COLUMNS}
    return Responses(given, completions, ids, columns, rollout, tokenizer)
