"""Out of memory is not the end: a batch that does not fit is halved and tried again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

Result = TypeVar("Result")

_ADVICE = {
    "sampling": "Lower max_prompt_length or max_completion_length, or quantize the base (load_in_4bit).",
    "scoring": "Lower max_prompt_length or max_completion_length, or quantize the base (load_in_4bit).",
    "updating": "Set gradient_checkpointing=True, lower max_prompt_length or max_completion_length, take a smaller "
    "logits_chunk_mib, or quantize the base (load_in_4bit).",
}
_OPTIONS = {
    "sampling": "local_rollout_forward_batch_size",
    "scoring": "local_rollout_forward_batch_size",
    "updating": "per_device_train_batch_size",
}


class OutOfMemory(RuntimeError):
    """A single row does not fit."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it is about memory, of the device or of the host."""
    known: bool = isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
    return known or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)


class RowLimit:
    """How many rows at a time a phase was found to have memory for.

    Args:
        phase: sampling, scoring or updating.

    Attributes:
        phase: the same.
        rows: the most at a time; None as long as everything fits.
    """

    def __init__(self, phase: str):
        self.phase = phase
        self.rows: int | None = None

    def run(self, rows: torch.Tensor, work: Callable[[torch.Tensor], Result]) -> list[tuple[torch.Tensor, Result]]:
        """Do ``work`` on the rows, in halves where memory does not suffice; the size that fits is kept for later.

        Args:
            rows: indices, on the CPU.
            work: of some of the indices; leaves nothing behind when it runs out of memory.

        Returns:
            Pieces of the rows with what ``work`` made of each, in order.

        Raises:
            OutOfMemory: a single row does not fit; the message says what to change.
        """
        waiting, done = [rows], []
        while waiting:
            piece, *others = waiting.pop(0).split(self.rows or max(1, len(rows)))
            waiting[:0] = others
            try:
                done.append((piece, work(piece)))
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(piece) == 1:
                    raise OutOfMemory(
                        f"A single row does not fit into memory while {self.phase}. {_ADVICE[self.phase]}"
                    ) from error
            # Outside of the except block: the error holds on to the frames, and so to the memory.
            clear_device_cache(garbage_collection=True)
            self._shrink(len(piece))
            waiting.insert(0, piece)
        return done

    def _shrink(self, rows: int) -> None:
        self.rows = -(-rows // 2)
        warnings.warn(
            f"Out of memory while {self.phase} {rows} rows at a time: from now on {self.rows}. "
            f"{_OPTIONS[self.phase]}={self.rows} saves the attempt.",
            stacklevel=3,
        )
