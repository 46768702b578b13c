"""Peaks of real PPO runs, counted in live tensor bytes, and the plan of the same runs.

python tests/measured_memory.py [--docs docs/memory.md] prints the table of docs/memory.md, or writes it there.
"""

from __future__ import annotations

import argparse
import gc
import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from bases import quantization
from builders import tiny_config, tiny_tokenizer
from ppo_lora import MemoryPlan, PPOTrainer, plan_memory
from ppo_lora.live_bytes import LiveBytes
from runs import config as run_config
from runs import count_w5

BEGIN, END = "<!-- measured_memory: begin -->", "<!-- measured_memory: end -->"
VOCABULARY = 1024
PHASES = {"sampling": "sampling", "scoring": "scoring", "update": "updating"}
"""The plan's phases and the trainer's."""
PROMPT, RESPONSE = 24, 12
OUTLIERS = (4, 13, 38)
"""Columns over int8's threshold: 3%, 10% and 30% of the hidden size."""
SHAPES = {
    "llama": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_key_value_heads=2),
    "gpt2": dict(n_embd=128, n_layer=2, n_positions=256),
    "gpt_neox": dict(hidden_size=128, intermediate_size=512, num_hidden_layers=2),
    "qwen2": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_key_value_heads=2),
}


def save_model(folder, architecture: str = "llama", **changes) -> str:
    """A small base in a folder."""
    torch.manual_seed(0)
    config = tiny_config(architecture, VOCABULARY, **{**SHAPES[architecture], **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def with_outliers(folder: str, target, columns: int) -> str:
    """The same base with so many columns, of the states that linear layers read, over int8's threshold."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm" in name:
                weight[:columns] = 30.0
    model.save_pretrained(target)
    return str(target)


def long_prompts(rows: int, longest: int = PROMPT) -> Dataset:
    """Prompts of two lengths, so that there is padding; most are the longest."""
    lengths = [longest - (9 if row % 4 == 3 else 0) for row in range(rows)]
    texts = [" ".join(f"w{3 + (row + j) % 900}" for j in range(length)) for row, length in enumerate(lengths)]
    return Dataset.from_dict({"prompt": texts})


def plan_config(folder, **changes):
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "max_steps": 2,
        "health_warnings": False,
        "max_prompt_length": PROMPT,
        "max_completion_length": RESPONSE,
        "local_rollout_forward_batch_size": 8,
        **changes,
    }
    return run_config(folder, **settings)


def measured(model_folder, folder, quantization=None, trainer_options=None, **changes) -> LiveBytes:
    """Train for two iterations; the counter of its live tensor bytes."""
    args = plan_config(folder, **changes)
    live = LiveBytes()
    gc.collect()
    gc.freeze()  # what was there before is not looked at again at each phase
    trainer = PPOTrainer(
        model_folder,
        count_w5,
        args,
        long_prompts(32),
        processing_class=tiny_tokenizer(VOCABULARY),
        quantization_config=quantization,
        **(trainer_options or {}),
    )
    trainer._collector._stop_token_ids = [-1]  # all responses are of full length
    live.count(_tensors_of(trainer.base))
    enter = trainer._enter
    trainer._enter = lambda phase: (gc.collect(), live.enter_phase(phase), enter(phase))[-1]
    try:
        with live:
            trainer.train()
    finally:
        gc.unfreeze()
    return live


def planned(model_folder, folder, quantization=None, trainer_options=None, **changes) -> MemoryPlan:
    """The plan of such a run, from configurations alone."""
    args = plan_config(folder, model_init_kwargs={"dtype": "float32"}, **changes)
    return plan_memory(model_folder, args, quantization_config=quantization, search=False, **(trainer_options or {}))


def _tensors_of(base):
    for tensor in (*base.parameters(), *base.buffers()):
        yield tensor
        yield from (value for value in vars(tensor).values() if isinstance(value, torch.Tensor))
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = getattr(state, "state2", None)


def table() -> str:
    """All cases side by side, as Markdown."""
    lines = ["| base | kind | checkpointing | " + " | ".join([*PHASES, "peak"]) + " |"]
    lines.append("| --- " * (len(PHASES) + 4) + "|")
    for architecture in ("llama", "gpt2", "gpt_neox", "qwen2"):
        model = save_model(tempfile.mkdtemp(), architecture)
        for kind in ("float32", "nf4", "nf4-double", "int8"):
            lines += [table_row(model, architecture, kind, gradient_checkpointing=on) for on in (False, True)]
        lines.append(table_row(model, f"{architecture}, packed", "float32", pack_sequences=True))
    for columns in OUTLIERS:
        model = with_outliers(save_model(tempfile.mkdtemp()), tempfile.mkdtemp(), columns)
        lines += [
            table_row(model, f"llama, {columns} outliers", "int8", gradient_checkpointing=on) for on in (False, True)
        ]
    return "\n".join(lines)


def table_row(model: str, name: str, kind: str, **options) -> str:
    """One case: the plan over what was measured."""
    plan = planned(model, tempfile.mkdtemp(), quantization(kind), **options)
    live = measured(model, tempfile.mkdtemp(), quantization(kind), **options)
    ratios = [f"{plan.phases[phase] / live.peaks[real]:.3f}" for phase, real in PHASES.items()]
    peak = f"{plan.peak / 2**20:.2f} / {live.peak / 2**20:.2f} MiB = {plan.peak / live.peak:.3f}"
    checkpointing = "on" if options.get("gradient_checkpointing") else "off"
    return f"| {name} | {kind} | {checkpointing} | {' | '.join(ratios)} | {peak} |"


def with_table(text: str, made: str) -> str:
    """A document with another table between its markers."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"error: the document has no {BEGIN} ... {END}; put both where the table is to be.")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    """Measure; runs' own logs are not shown."""
    parser = argparse.ArgumentParser(description="The plan of the memory beside what runs take.")
    parser.add_argument("--docs", type=Path, help="write the table into this document, between its markers")
    docs = parser.parse_args().docs
    if docs is not None:
        with_table(docs.read_text(), "")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        made = table()
    if docs is None:
        print(made)
    else:
        docs.write_text(with_table(docs.read_text(), made))


if __name__ == "__main__":
    main()
