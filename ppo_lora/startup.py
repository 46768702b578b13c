"""What is looked at before the first rollout, on a few sampled responses, and how it is shown."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .collector import Collector
from .config import PPOConfig
from .prompts import PromptSource, PromptStream
from .roles import Role, label
from .rows import compact_rows
from .scorers import Scorer
from .setup import StartupError
from .shared_base import SharedBase
from .types import Experience, Prompts

MOST_ROWS = 32
"""Rows that a process samples at most for the checks."""

_CHECKS = 4  # the stream of random numbers; see trainer.py for the others
_RATIO_TOLERANCE = 1e-5
_STYLES = {"ok": "green", "shown": "cyan", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the panel: its name, ``ok``, ``shown``, ``warning`` or ``error``, and what was seen."""

    name: str
    status: str
    seen: str


@dataclass(frozen=True)
class Sample:
    """What the sampled responses of all processes say.

    Attributes:
        kl: mean KL to the reference, nats a response.
        furthest: largest difference of a token's log-probabilities under policy and reference, nats.
        ratio: largest distance of a token's ratio from 1 between scoring's pass and training's.
        scores: of the responses that were scored, after what is done about missing stop tokens.
        sources: each reward source's values, [B], NaN where it had nothing to say.
        distinct: responses that differ, in this process.
    """

    kl: float
    furthest: float
    ratio: float
    scores: Tensor
    sources: Mapping[str, Tensor]
    distinct: int


def take_sample(
    base: SharedBase,
    collector: Collector,
    prompts: Prompts,
    config: PPOConfig,
    kl_coef: float,
    gather: Callable[[Tensor], Tensor],
    trainer_state: Any = None,
) -> Sample:
    """Answer and score the prompts. All random numbers, also those of reward functions, are put back as they were.

    Args:
        base: the roles.
        collector: samples and scores.
        prompts: of this process; as many in every process.
        config: lengths, temperature.
        kl_coef: weight of the KL penalty.
        gather: puts the tensors of all processes together.
        trainer_state: for the reward functions.
    """
    with _random_numbers_kept():
        rollout = collector.sample(prompts, _CHECKS, 0)
        scored = collector.score(prompts, rollout, kl_coef, trainer_state=trainer_state)
        apart = _ratio_distance(base, scored.experience, config)
    rows, device = scored.experience, rollout.sequences.device
    difference = torch.where(rollout.response_mask, rows.logprobs - rows.ref_logprobs, 0.0)
    numbers = torch.stack([difference.sum(dim=1).mean(), difference.abs().max(), apart]).to(device)[None]
    kl, furthest, ratio = gather(numbers).unbind(dim=1)
    scores = gather(rows.scores)
    return Sample(
        kl=kl.mean().item(),
        furthest=furthest.max().item(),
        ratio=ratio.max().item(),
        scores=scores[~scores.isnan()],
        sources={name: gather(values.to(device)) for name, values in scored.by_source.items()},
        distinct=len(set(map(tuple, scored.responses.completion_ids))),
    )


def judge(
    sample: Sample,
    base: SharedBase,
    scorer: Scorer,
    prompts: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    config: PPOConfig,
    fresh: bool,
) -> list[Check]:
    """All checks, in the order in which they are shown; ``startup_checks="warn"`` makes errors warnings.

    Args:
        sample: what :func:`take_sample` gave.
        base, scorer, prompts, tokenizer, config: the trainer's.
        fresh: whether nothing was trained yet.
    """
    weights = dict(zip(scorer.names, scorer.weights, strict=True))
    checks = [
        check_kl(sample, base, fresh),
        check_ratio(sample, base.compute_dtype),
        check_rewards(sample, weights, scorer.models, fresh),
        check_prompts(prompts, config),
        *check_padding(tokenizer, base),
    ]
    if config.startup_checks == "warn":
        return [replace(check, status="warning") if check.status == "error" else check for check in checks]
    return checks


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    numpy = sys.modules["numpy"].random  # torch's and transformers' dependency, not one of this package
    python_state, numpy_state = random.getstate(), numpy.get_state()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.set_state(numpy_state)


def _ratio_distance(base: SharedBase, rows: Experience, config: PPOConfig) -> Tensor:
    """Scoring's pass and training's over the same rows: one micro-batch."""
    rows = rows.select(torch.arange(min(len(rows), config.per_device_train_batch_size)))
    read = compact_rows(rows.sequences, rows.host_mask, rows.response_length)
    with torch.no_grad():
        scored = base(Role.POLICY, read, config.temperature)[0]
    with torch.enable_grad():
        trained = base(Role.POLICY, read, config.temperature)[0].detach()
    return ((trained - scored).exp() - 1.0).abs().max()


# What the sample means


def check_kl(sample: Sample, base: SharedBase, fresh: bool) -> Check:
    """A policy that starts as its reference has a KL of exactly 0.

    Args:
        sample: what was sampled.
        base: says where policy and reference come from.
        fresh: whether nothing was trained yet.
    """
    seen = f"{sample.kl:.4g} nats a response (largest difference of a token: {sample.furthest:.3g})"
    if not fresh:
        return Check("KL to the reference", "shown", f"{seen}; some training was done before")
    if sample.furthest == 0.0:
        return Check("KL to the reference", "ok", "exactly 0")
    policy, reference = (base.adapters.origins[role] for role in (Role.POLICY, Role.REFERENCE))
    named = f"policy from {_origin(base, Role.POLICY)}, reference from {_origin(base, Role.REFERENCE)}"
    if policy != reference:
        return Check("KL to the reference", "warning", f"{seen}: {named}. Leave reference_adapter out to start at 0.")
    return Check(
        "KL to the reference",
        "error",
        f"{seen}, but both start from the same ({named}), so it should be 0. Were adapters changed after loading? "
        "Give the reference as reference_adapter if it is meant to differ.",
    )


def check_ratio(sample: Sample, dtype: torch.dtype) -> Check:
    """PPO's ratio starts at 1: scoring and training have to compute the same."""
    seen = f"1 within {sample.ratio:.2g}"
    if sample.ratio == 0.0:
        return Check("first ratio", "ok", "exactly 1")
    if dtype == torch.float32:
        return Check("first ratio", "ok", seen) if sample.ratio <= _RATIO_TOLERANCE else _bad_ratio(seen, "error")
    return _bad_ratio(seen, "warning")


def _bad_ratio(seen: str, status: str) -> Check:
    return Check(
        "first ratio",
        status,
        f"{seen}: scoring and training compute differently. Try attn_implementation='eager' in model_init_kwargs, or "
        "gradient_checkpointing=False.",
    )


def check_rewards(sample: Sample, weights: Mapping[str, float], models: Iterable[str], fresh: bool) -> Check:
    """Advantages need rewards that differ from response to response.

    Args:
        sample: what was sampled.
        weights: of the reward sources.
        models: names of the sources that are models: their scores are never the same for different responses.
        fresh: whether nothing was trained yet.

    Returns:
        An error where different responses all have one score, unless that may be the "no" of a sparse reward: every
        source that counts is a function, and gave 0. Then, and in a resumed run, a warning.
    """
    if not len(sample.scores):
        return Check(
            "reward spread", "warning", "none of the responses was scored: nothing is learned from such ones."
        )
    low, high = sample.scores.min().item(), sample.scores.max().item()
    rows = len(sample.scores)
    if low != high:
        return Check("reward spread", "ok", f"{low:.3g} to {high:.3g} over {rows} responses")
    counted = {name: sample.sources[name] for name, weight in weights.items() if weight}
    given = ", ".join(f"{name} {_range(values)}" for name, values in counted.items())
    seen = f"all {rows} responses have the score {low:.4g} ({given})"
    total = torch.stack([weights[name] * values.nan_to_num(nan=0.0) for name, values in counted.items()]).sum(dim=0)
    if total.min() != total.max():
        text = (
            f"{seen}: the sources differ, and what is done about responses without a stop token, or clipping, makes "
            "them one. Raise max_completion_length or score_clip if that stays so."
        )
        return Check("reward spread", "warning", text)
    if sample.distinct < 2:
        return Check("reward spread", "warning", f"{seen}, and all are the same. Raise temperature.")
    sparse = all(not values.nan_to_num(nan=0.0).any() for values in counted.values()) and not {*models} & {*counted}
    if sparse:
        text = f"{seen}. Fine for a sparse reward, where the policy is right now and then; else nothing is learned."
    else:
        text = (
            f"{seen}, though responses differ: nothing can be learned. Look at what the source reads (columns, answer "
            "format, its head); if this is how a sparse reward says no, let it say 0, or set startup_checks='warn'."
        )
    return Check("reward spread", "error" if fresh and not sparse else "warning", text)


def _range(values: Tensor) -> str:
    known = values[~values.isnan()]
    if not len(known):
        return "None for every row"
    low, high = known.min().item(), known.max().item()
    return f"{low:.4g} for every row" if low == high else f"{low:.4g} to {high:.4g}"


def check_prompts(prompts: PromptSource, config: PPOConfig) -> Check:
    """The share of prompts that is over max_prompt_length; of a stream, how many of those that were read."""
    dropped = config.overlong_prompts == "drop"
    if isinstance(prompts, PromptStream):
        seen = f"{prompts.overlong_count} of those read so far over max_prompt_length={config.max_prompt_length}"
        return Check("prompts", "shown", seen)
    total = len(prompts) + (prompts.overlong_count if dropped else 0)
    share = prompts.overlong_count / total
    seen = f"{share:.1%} of {total} over max_prompt_length={config.max_prompt_length}"
    seen += f" ({'dropped' if dropped else 'truncated'})" if share else ""
    return Check("prompts", "warning" if share > 0.1 else "ok", seen)


def check_padding(tokenizer: PreTrainedTokenizerBase, base: SharedBase) -> list[Check]:
    """`trl reward` with pad = EOS trains the head at the token before EOS, while PPO reads it at EOS."""
    if Role.REWARD not in base.roles or tokenizer.pad_token_id != tokenizer.eos_token_id:
        return []
    return [
        Check(
            "padding",
            "warning",
            f"the pad token is EOS ({tokenizer.eos_token!r}). If the reward adapter was trained so, its head never "
            "saw EOS, where PPO reads it: train it with another pad token (`trl reward --pad_token ...`).",
        )
    ]


# What is where


def trainable_counts(base: SharedBase) -> dict[str, int]:
    """Trainable parameters of each role; with a shared value adapter the value has its head only."""
    trained = {label(role): parameters for role, parameters in base.trainable_parameters().items()}
    return {label(role): sum(p.numel() for p in trained.get(label(role), [])) for role in base.roles}


def memory_parts(base: SharedBase) -> dict[str, int]:
    """Bytes of the tensors that are there, by part; what is shared is counted once.

    Returns:
        ``quantized weights`` (with their scales and tables), ``other weights``, ``<role> adapter`` and ``heads``.
    """
    seen: set[int] = set()
    heads = [head for head in (base.value_head, base.reward_head) if head is not None]
    parts = {
        f"{label(role)} adapter": _bytes(base.adapters.parameters(role), seen)
        for role in base.roles
        if base.adapters.parameters(role)
    }
    parts["heads"] = _bytes([p for head in heads for p in head.parameters()], seen)
    weights = [*base.model.parameters(), *base.model.buffers()]
    quantized = [weight for weight in weights if type(weight).__name__ in ("Params4bit", "Int8Params")]
    first = {"quantized weights": _bytes(_with_scales(quantized), seen), "other weights": _bytes(weights, seen)}
    return {name: size for name, size in {**first, **parts}.items() if size}


def _with_scales(weights: Iterable[Tensor]) -> Iterator[Tensor]:
    """The weights, and the tensors that bitsandbytes keeps beside them, in objects in objects too."""
    for weight in weights:
        yield weight
        yield from _held(vars(weight).values())


def _held(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value).__name__ == "QuantState":
            yield from _held(vars(value).values())


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            total += tensor.numel() * tensor.element_size()
    return total


def _origin(base: SharedBase, role: Any) -> str:
    origin = base.adapters.origins[role]
    if origin is None:
        return "a fresh adapter" if base.adapters.parameters(role) else "the base itself"
    source = origin.source
    return f"{source} @ {origin.revision}" if origin.revision else str(source)


# The panel


def startup_panel(base: SharedBase, checks: Iterable[Check], plan: RenderableType | None = None) -> Panel:
    """Roles, memory, the plan of it and checks in one frame."""
    planned = [] if plan is None else [plan, Text()]
    return Panel(
        Group(_roles_table(base), Text(), _memory_table(memory_parts(base)), Text(), *planned, _checks_table(checks)),
        title="ppo_lora: before the first rollout",
        border_style="blue",
        padding=(1, 2),
    )


def _roles_table(base: SharedBase) -> Table:
    table = _table()
    table.add_column("role", style="bold", no_wrap=True)
    table.add_column("from", ratio=1, overflow="fold")
    table.add_column("trained", justify="right", no_wrap=True)
    for role, count in trainable_counts(base).items():
        table.add_row(Text(role), Text(_origin(base, role)), f"{count:,}" if count else "-")
    return table


def _memory_table(parts: Mapping[str, int]) -> Table:
    table = _table()
    table.add_column("memory", style="bold", ratio=1)
    table.add_column("MiB", justify="right", no_wrap=True)
    for name, size in parts.items():
        table.add_row(Text(name), _mebibytes(size))
    table.add_row(Text("together", style="bold"), Text(_mebibytes(sum(parts.values())), style="bold"))
    return table


def _checks_table(checks: Iterable[Check]) -> Table:
    table = _table()
    table.add_column("check", style="bold", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("seen", ratio=1, overflow="fold")
    for check in checks:
        table.add_row(Text(check.name), Text(check.status, style=_STYLES[check.status]), Text(check.seen))
    return table


def _table() -> Table:
    return Table(box=None, expand=True, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size >= 2**20 / 10 else f"{size / 2**20:.3f}"


def raise_for(checks: Iterable[Check]) -> None:
    """Stop where a check failed.

    Raises:
        StartupError: what was seen, and what to do.
    """
    failed = [check for check in checks if check.status == "error"]
    if failed:
        seen = " ".join(f"{check.name}: {check.seen}" for check in failed)
        raise StartupError(f"Startup check failed. {seen} (startup_checks='warn' trains all the same.)")
