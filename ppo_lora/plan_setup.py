"""What a plan of the memory starts from: names and options, or a base that is loaded already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from .adapters import SEPARATE, SHARED, ZERO, Adapter, AdapterLike, read_adapter_config
from .config import PPOConfig
from .hub import hub_errors
from .planned_base import BaseShape
from .preparation import default_peft_config
from .roles import Role
from .shared_base import SharedBase


def named_shape(
    name_or_path: str,
    args: PPOConfig,
    adapters: Mapping[str, AdapterLike | None],
    peft_config: LoraConfig | None = None,
    quantization_config: Any = None,
) -> BaseShape:
    """The shape of a base that is not loaded, from its ``config.json`` and its adapters' ``adapter_config.json``.

    Args:
        name_or_path: model id or folder.
        args: model options, precision.
        adapters: by role, as PPOTrainer takes them.
        peft_config, quantization_config: as PPOTrainer takes them.

    Raises:
        ValueError: there is no configuration, or it cannot be planned with.
        HubError: the Hub does not give it.
    """
    options = args.model_options
    revision = options.get("revision")
    if Path(name_or_path).is_dir() and not (Path(name_or_path) / "config.json").exists():
        raise ValueError(f"There is no config.json in {name_or_path}; name a folder that save_pretrained wrote.")
    with hub_errors("base", name_or_path, revision):
        config = AutoConfig.from_pretrained(
            name_or_path, revision=revision or "main", trust_remote_code=bool(options["trust_remote_code"])
        )
    if options.get("attn_implementation") is not None:
        config._attn_implementation = options["attn_implementation"]
    dtype = _dtype(options.get("dtype", "auto"), config)
    return BaseShape(
        config=config,
        dtype=dtype,
        compute_dtype=torch.bfloat16 if args.bf16 else dtype,
        quantization_config=quantization_config or _stored_quantization(config),
        adapters=role_configs(adapters, peft_config or default_peft_config()),
        trust_remote_code=bool(options["trust_remote_code"]),
    )


def loaded_shape(base: SharedBase) -> BaseShape:
    """The shape of a base that is loaded."""
    adapters: dict[Role, LoraConfig | str | None] = {}
    for role in Role:
        if role in base.roles:
            own = bool(base.adapters.parameters(role))
            adapters[role] = base.adapters.export(role).config if own else None
    if base.shares_value_adapter:
        adapters[Role.VALUE] = SHARED
    config = base.config
    return BaseShape(config, base.model.dtype, base.compute_dtype, _stored_quantization(config), adapters)


def role_configs(given: Mapping[str, AdapterLike | None], fresh: LoraConfig) -> dict[Role, LoraConfig | str | None]:
    """Each role's LoRA configuration, as :class:`SharedBase` would give it its adapter.

    Args:
        given: by role.
        fresh: of adapters that are made.

    Raises:
        ValueError: an adapter has no configuration, or it is broken.
    """
    policy, reference, value, reward = (_read(given.get(role.value)) for role in _ORDER)
    roles: dict[Role, LoraConfig | str | None] = {Role.POLICY: policy or fresh}
    copies = policy is not None or fresh.use_dora
    roles[Role.REFERENCE] = reference or (roles[Role.POLICY] if copies else None)
    if reward is not None:
        roles[Role.REWARD] = reward
    if value == ZERO:
        roles[Role.VALUE] = fresh
    elif value in (None, SEPARATE):
        roles[Role.VALUE] = reward or fresh
    else:
        roles[Role.VALUE] = value
    return roles


_ORDER = (Role.POLICY, Role.REFERENCE, Role.VALUE, Role.REWARD)


def _read(source: AdapterLike | None) -> Any:
    if source is None or (isinstance(source, str) and source in (SHARED, SEPARATE, ZERO)):
        return source
    return source.config if isinstance(source, Adapter) else read_adapter_config(source)


def _dtype(given: Any, config: Any) -> torch.dtype:
    if given in (None, "auto"):
        given = getattr(config.get_text_config(), "dtype", None) or torch.float32
    made = given if isinstance(given, torch.dtype) else getattr(torch, str(given), None)
    if not isinstance(made, torch.dtype):
        raise ValueError(f"dtype is {given!r}; expected 'auto', 'bfloat16' or 'float32'.")
    return made


def _stored_quantization(config: Any) -> Any:
    """How the base was saved quantized, or None.

    Raises:
        ValueError: by something else than bitsandbytes.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    made = AutoQuantizationConfig.from_dict(stored) if isinstance(stored, dict) else stored
    if type(made).__name__ != "BitsAndBytesConfig":
        raise ValueError(
            f"The base is quantized with {type(made).__name__}; the memory of bitsandbytes' 4-bit and 8-bit bases and "
            "of those that are not quantized can be planned."
        )
    return made
