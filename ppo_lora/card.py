"""The README.md of a saved policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

_BODY = """---
{metadata}
---

# {name}

A LoRA policy trained with PPO by ppo_lora, on {base}{data}.

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{location}")
```

The value role's adapter, with its head, is in the folder `value`.

| role | adapter it started from |
| --- | --- |
{roles}

| option | value |
| --- | --- |
{options}

| last logged | value |
| --- | --- |
{metrics}
"""

_OPTIONS = (
    "learning_rate", "value_learning_rate", "kl_coef", "kl_estimator", "num_ppo_epochs", "num_mini_batches",
    "per_device_train_batch_size", "gradient_accumulation_steps", "cliprange", "cliprange_value", "vf_coef", "gamma",
    "lam", "temperature", "max_completion_length", "missing_eos_penalty", "missing_eos_score", "seed",
)  # fmt: skip


def write_card(
    folder: str | Path,
    name: str,
    base: str,
    location: str,
    roles: Mapping[str, str | None],
    config: Any,
    metrics: Mapping[str, float],
    dataset: str | None = None,
    tags: Iterable[str] = (),
) -> None:
    """Write ``README.md`` with what a reader needs to load and to judge the policy.

    Args:
        folder: where to.
        name: heading.
        base: id or folder of the base.
        location: what to load: the Hub id, or the folder.
        roles: by role, where its adapter started.
        config: the PPOConfig.
        metrics: last logged numbers.
        dataset: id of the prompts' data set.
        tags: for the Hub.
    """
    published = not Path(base).is_dir()
    metadata = ModelCardData(
        base_model=base if published else None,
        library_name="peft",
        datasets=dataset if dataset and not Path(dataset).exists() else None,
        tags=sorted(tags),
    )
    text = _BODY.format(
        metadata=metadata.to_yaml(),
        name=name,
        base=f"`{base}`" if published else "a local base",
        data=f", with prompts of `{dataset}`" if dataset and not Path(dataset).exists() else "",
        location=location,
        roles=_rows((role, "fresh" if source is None else "an adapter") for role, source in roles.items()),
        options=_rows((option, getattr(config, option)) for option in _OPTIONS),
        metrics=_rows((key, f"{value:.4g}") for key, value in metrics.items()),
    )
    (Path(folder) / "README.md").write_text(text)


def _rows(pairs: Iterable[tuple[str, Any]]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in pairs)
