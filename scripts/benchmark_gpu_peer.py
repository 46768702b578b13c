"""Measures TRL 1.12's PPO on a base of scripts/benchmark_gpu.py, in a process with that TRL first on PYTHONPATH.

`python benchmark_gpu_peer.py CASE WORK.json RESULT.json`. It knows nothing of ppo_lora.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import trl
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging

from benchmark_gpu_base import GpuWork, Memory, base_config, load_model, load_options
from benchmark_measure import write_result
from benchmark_peer import PACKAGES, TRL_VERSION, build
from benchmark_work import DTYPES, FIRST_WORD, PAD

_WARM_UP_TOKENS = 4


def policy_model(work: GpuWork) -> PreTrainedModel:
    """The quantized base, warm: it has answered a few tokens."""
    model = load_model(work)
    ids = _some_tokens(work, model)
    mask = torch.ones_like(ids)
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=_WARM_UP_TOKENS, pad_token_id=PAD)
    return model


def scalar_model(work: GpuWork, quantized: bool) -> PreTrainedModel:
    """The quantized base with one output, or a model of its shape in the work's dtype, warm, to be trained in full."""
    torch.manual_seed(work.seed + 1)
    if quantized:
        return AutoModelForSequenceClassification.from_pretrained(work.base, num_labels=1, **load_options(work))
    config = base_config(work)
    config.num_labels = 1
    with torch.device(work.device):
        model = AutoModelForSequenceClassification.from_config(config, dtype=DTYPES[work.dtype])
    model(_some_tokens(work, model)).logits.sum().backward()
    model.zero_grad(set_to_none=True)
    return model


def _some_tokens(work: GpuWork, model: PreTrainedModel) -> torch.Tensor:
    return torch.randint(FIRST_WORD, work.vocab, (1, work.prompt_length), device=model.device)


def measure(work: GpuWork) -> dict[str, Any]:
    """Train for an iteration; its seconds and peaks."""
    memory = Memory(work.device)
    trainer, watch = build(work, policy_model, scalar_model)
    loading = memory.read()
    trainer.train()
    peak = memory.read()
    return {
        "rows": work.prompts,
        "loading_gib": loading,
        "peak_gib": peak,
        "iterations": watch.seen,
        "seconds": watch.seen[-1]["seconds"],
    }


def main(case: str, work_file: str, result_file: str) -> None:
    """Measure what `work_file` says and write `result_file`."""
    if trl.__version__ != TRL_VERSION:
        raise SystemExit(f"TRL is {trl.__version__}; expected {TRL_VERSION}, the last with PPO, first on PYTHONPATH.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    work = GpuWork.load(work_file)
    result = {"case": case, **measure(work), "finished": True}
    write_result(result_file, work, result, PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
