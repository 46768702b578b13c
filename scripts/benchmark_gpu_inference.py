"""What scripts/benchmark_gpu.py measures without gradients: sampling, and one pass over the base for several roles."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from benchmark_gpu_base import GpuWork, load_model
from benchmark_measure import wait
from benchmark_work import EOS, PAD, lora_options, prompt_ids
from ppo_lora import SharedBase

ROLES = ("policy", "reference", "value", "reward")
PASS_ROWS = (1, 8)
WARM_UP_TOKENS = 4
_REPEATS, _WARM_UPS = 5, 2

Result = dict[str, Any]


def shared_base(work: GpuWork) -> SharedBase:
    """All four roles on the quantized base."""
    return SharedBase(
        load_model(work),
        value=work.value,
        reward=str(work.reward_adapter),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora_options()),
    )


# Sampling


def left_padded(work: GpuWork, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts [b, P] and their masks, longest first, in batches."""
    ids = sorted(prompt_ids(work), key=len, reverse=True)
    batches = []
    for start in range(0, len(ids), work.rollout_rows):
        rows = ids[start : start + work.rollout_rows]
        padded = torch.tensor([[PAD] * (len(rows[0]) - len(row)) + row for row in rows], device=device)
        batches.append((padded, (padded != PAD).long()))
    return batches


def timed_responses(
    work: GpuWork, device: torch.device, respond: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
) -> Result:
    """Real tokens of responses a second, after a few steps that are not counted.

    Args:
        work: the workload.
        device: where the prompts go.
        respond: from prompts, mask and the most new tokens to responses [b, T].
    """
    batches = left_padded(work, device)
    respond(*batches[0], WARM_UP_TOKENS)
    wait(work.device)
    started = time.perf_counter()
    answers = [respond(ids, mask, work.response_length) for ids, mask in batches]
    wait(work.device)
    seconds = time.perf_counter() - started
    lengths = torch.cat([(answer != PAD).sum(dim=1) for answer in answers]).tolist()
    steps, tokens = sum(answer.shape[1] for answer in answers), sum(lengths)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "steps": steps,
        "mean_response": tokens / len(lengths),
        "tokens_per_second": tokens / seconds,
    }


def plain_generate(work: GpuWork) -> Result:
    """``generate`` of the base with a LoRA adapter, with nothing of ppo_lora."""
    model = get_peft_model(load_model(work), LoraConfig(task_type="CAUSAL_LM", **lora_options())).eval()
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
    options |= {"eos_token_id": EOS, "pad_token_id": PAD}

    def respond(ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
        whole: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, **options)
        return whole[:, ids.shape[1] :]

    with torch.no_grad():
        return timed_responses(work, model.device, respond)


def own_sampling(work: GpuWork) -> Result:
    """The policy's responses from a shared base."""
    base = shared_base(work)
    generator = torch.Generator().manual_seed(work.run_seed)

    def respond(ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
        draws = torch.rand(len(ids), tokens, generator=generator, dtype=torch.float64)
        return base.sample(ids, mask, draws, [EOS], PAD)[0]

    return timed_responses(work, base.device, respond)


def sample(work: GpuWork, tell: Callable[[Result], None]) -> None:
    """Plain ``generate`` and ours on the same prompts."""
    torch.manual_seed(work.run_seed)
    tell({"rows": work.prompts, "rollout_rows": work.rollout_rows})
    tell({"plain": plain_generate(work)})
    gc.collect()
    tell({"ours": own_sampling(work)})


# One pass over the base for several roles


def four_roles(work: GpuWork) -> PeftModel:
    """The base with an adapter for each role but the reference, by PEFT alone."""
    config = LoraConfig(task_type="CAUSAL_LM", **lora_options())
    model = get_peft_model(load_model(work), config, adapter_name=ROLES[0])
    for role in ROLES[2:]:
        model.add_adapter(role, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.eval()


def _acting(model: PeftModel, role: str) -> AbstractContextManager[None]:
    if role == "reference":
        return model.disable_adapter()
    model.set_adapter(role)
    return nullcontext()


def _median_seconds(work: GpuWork, action: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(_WARM_UPS + _REPEATS):
        wait(work.device)
        started = time.perf_counter()
        action()
        wait(work.device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[_WARM_UPS:])


@torch.no_grad()
def compare_passes(model: PeftModel, work: GpuWork, rows: int) -> Result:
    """Seconds of a pass for each role, and of one for all of them; and how far their last logits are apart.

    Switching roles is not counted: it costs a shared base microseconds.
    """
    length = work.prompt_length + work.response_length
    ids = torch.randint(EOS + 1, work.vocab, (rows, length), device=model.device)

    def forward(ids: torch.Tensor, **adapters: Any) -> torch.Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1, **adapters).logits
        return logits

    separate, apart = 0.0, []
    for role in ROLES:
        with _acting(model, role):
            separate += _median_seconds(work, lambda: forward(ids))
            apart.append(forward(ids))
    model.set_adapter(ROLES[0])
    model.requires_grad_(False)
    names = [name for role in ROLES for name in ["__base__" if role == "reference" else role] * rows]
    every = ids.repeat(len(ROLES), 1)
    fused = _median_seconds(work, lambda: forward(every, adapter_names=names))
    difference = (forward(every, adapter_names=names) - torch.cat(apart)).abs().max().item()
    return {"rows": rows, "separate": separate, "fused": fused, "ratio": separate / fused, "difference": difference}


def passes(work: GpuWork, tell: Callable[[Result], None]) -> None:
    """PEFT's mixed batches against a pass for each role, for few rows and for more."""
    model = four_roles(work)
    found: list[Result] = []
    for rows in PASS_ROWS:
        found.append(compare_passes(model, work, rows))
        tell({"passes": found})
