"""What a role, a larger vocabulary and more rows cost ppo_lora: `scripts/benchmark.py --checks`.

As a program, `python benchmark_checks.py WORK.json RESULT.json`, it measures the memory of the roles.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark_summary import NUMBER_BYTES, Summary
from benchmark_work import Work, model_options

VOCABULARY_FACTOR, MORE_ROWS, FEW_ROWS = 4, 64, 8
ROLE_LIMIT, VOCABULARY_LIMIT_MB, ROWS_LIMIT, SWITCH_LIMIT = 0.05, 64, 1.15, 1000
SWITCH = "switch of roles, microseconds"


def role_shares(work: Work) -> dict[str, float]:
    """Bytes of tensors that reference, value and reward each add to a policy, over the base's; and a switch's time.

    The reference is a frozen copy here, as it is for a policy that starts from an adapter; a fresh policy's costs
    nothing. Gradients and the optimizer's moments of the value come on top in training.
    """
    from ppo_lora import SharedBase

    def held(**roles: Any) -> tuple[int, SharedBase]:
        base = SharedBase.from_pretrained(str(work.base), **{"value": "shared", **roles}, **model_options(work))
        return sum(_sizes(base)), base

    policy, base = held()
    own = sum(parameter.nbytes for name, parameter in base.model.named_parameters() if "lora_" not in name)
    given = {
        "reference": {"policy": base.adapter("policy")},
        "value": {"value": "separate"},
        "reward": {"reward": str(work.reward_adapter)},
    }
    shares = {name: (held(**roles)[0] - policy) / own for name, roles in given.items()}
    return {**shares, SWITCH: switch_microseconds(base)}


def switch_microseconds(base: Any, times: int = 200) -> float:
    """How long it takes to be another role."""
    started = time.perf_counter()
    for _ in range(times):
        with base.role("reference"):
            pass
    return (time.perf_counter() - started) / (2 * times) * 1e6


def _sizes(module: Any) -> Iterator[int]:
    """Bytes of each tensor of a module, once, wherever it hangs."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
    return (tensor.nbytes for tensor in tensors.values())


def measure(
    work: Work, run: Callable[[Work], Summary], roles: Callable[[Work], dict[str, float]]
) -> list[dict[str, Any]]:
    """Measure the roles, two vocabularies and two numbers of rows.

    Args:
        work: the fixed workload.
        run: measures a workload with ours in a process of its own.
        roles: :func:`role_shares` in a process of its own.
    """
    few = replace(work, name="fixed", value="separate", prompts=FEW_ROWS)
    wide = replace(few, vocab=VOCABULARY_FACTOR * few.vocab)
    more = replace(few, prompts=MORE_ROWS, iterations=min(2, few.iterations))
    small, large, many = run(few), run(wide), run(more)
    added = 2 * (wide.vocab - few.vocab) * few.hidden * NUMBER_BYTES[few.dtype] / 2**20
    return rows(
        roles(few),
        (small.peak_mib, large.peak_mib, added),
        (1 / small.tokens_per_second, 1 / many.tokens_per_second),
    )


def rows(
    roles: dict[str, float], vocabulary: tuple[float, float, float], seconds_a_token: tuple[float, float]
) -> list[dict[str, Any]]:
    """What was measured beside its limit.

    Args:
        roles: each role's share of the base.
        vocabulary: peaks of the small and of the large one, and what embedding and head weigh more, MiB.
        seconds_a_token: with few rows and with many.
    """
    small, large, weights = vocabulary
    limit_mib = VOCABULARY_LIMIT_MB * 1e6 / 2**20
    few, many = seconds_a_token
    shares = {name: share for name, share in roles.items() if name != SWITCH}
    told = [(f"memory of the {name} role / the base's", share, ROLE_LIMIT) for name, share in shares.items()]
    told.append((SWITCH, roles[SWITCH], SWITCH_LIMIT))
    told.append(
        (f"{VOCABULARY_FACTOR} times the vocabulary: peak beyond its weights, MiB", large - small - weights, limit_mib)
    )
    told.append((f"seconds a real token, {MORE_ROWS} rows / {FEW_ROWS} rows", many / few, ROWS_LIMIT))
    return [
        {
            "workload": "fixed",
            "value adapter": "separate",
            "what": what,
            "measured": measured,
            "wanted": f"<= {limit:.3g}",
            "reached": measured <= limit,
        }
        for what, measured, limit in told
    ]


def main(work_file: str, result_file: str) -> None:
    """Measure the roles' memory of what `work_file` says and write `result_file`."""
    Path(result_file).write_text(json.dumps(role_shares(Work.load(work_file))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
