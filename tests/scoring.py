"""What scorers need, made on the spot."""

from __future__ import annotations

import torch

from builders import EOS
from ppo_lora import Prompts, Responses
from ppo_lora.responses import read_responses
from ppo_lora.rollout import assemble


class NoBase:
    """A base without a reward role."""

    roles = ()


def responses_of(prompts, rows, tokenizer) -> Responses:
    """Responses of these token ids, [B][T], each real up to its first EOS."""
    ids = torch.ones(len(rows), 2, dtype=torch.long)
    given = Prompts(ids, torch.ones_like(ids, dtype=torch.bool), {"prompt": prompts})
    return read_responses(given, assemble(given, torch.tensor(rows), [EOS]), tokenizer)
