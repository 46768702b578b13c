"""What is checked and changed in a base and its adapters before the roles stand on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from .adapters import HEAD_NAMES, role_config

_ZERO_AT_START = (True, "gaussian")
"""`init_lora_weights` that make B = 0 and leave the base's weights alone."""

_LEAVES_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` after which a saved adapter stands on the base as it was published."""


_NOT_PLAIN = {
    "trainable_token_indices": "it changes the embeddings",
    "layer_replication": "it changes the base's layers",
    "target_parameters": "it changes parameters and not modules, which roles cannot switch",
    "alora_invocation_tokens": "it is active after certain tokens only, which roles do not look for",
    "arrow_config": "it routes among several adapters",
    "use_qalora": "it pools its inputs, which is known for other quantizations than the base's only",
    "use_bdlora": "it is a variant that was not tried with roles",
    "kasa_config": "it rewrites the base's weights",
    "monteclora_config": "it samples its weights",
    "velora_config": "it changes what backward sees",
}
"""Options of LoraConfig that make more than B A x of an adapter, and what they do."""


def default_peft_config() -> LoraConfig:
    """LoRA of rank 16 on every linear layer but the output head."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def check_base(model: PreTrainedModel) -> None:
    if isinstance(model, PeftModel):
        raise TypeError(
            "The base is a PeftModel. Save its adapter (model.save_pretrained(folder)); pass the plain model, and the "
            "adapter by role: policy_adapter=folder for PPOTrainer, policy=folder for SharedBase."
        )
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise TypeError(
            f"The base is a {type(model).__name__}; expected a transformers causal language model with an output "
            "head (AutoModelForCausalLM)."
        )
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "The base already has adapters in it. Pass the plain model, and the adapters by role: "
            "SharedBase(model, policy='path/to/adapter')."
        )


def fresh_config(peft_config: LoraConfig | None, model: PreTrainedModel) -> LoraConfig:
    config = default_peft_config() if peft_config is None else peft_config
    if not isinstance(config, LoraConfig):
        raise TypeError(f"peft_config is a {type(config).__name__}; expected a LoraConfig.")
    if config.init_lora_weights not in _ZERO_AT_START:
        raise ValueError(
            f"init_lora_weights is {config.init_lora_weights!r}, which starts away from the base or rewrites its "
            "weights; four roles share them. Use True or 'gaussian'."
        )
    check_lora_config(config, "peft_config")
    whole = sorted(set(config.modules_to_save or []) - set(HEAD_NAMES))
    if whole:
        raise ValueError(
            f"peft_config has modules_to_save={whole}: they would be trained whole, and four roles share the base's. "
            "Leave them out; the value head is trained anyway."
        )
    if config.target_modules is None:
        config = LoraConfig(**{**config.to_dict(), "target_modules": "all-linear"})
    config = role_config(config)
    config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
    return config


def check_lora_config(config: LoraConfig, what: str) -> None:
    """Refuse adapters that change parameters which all roles share.

    Args:
        config: of the adapter.
        what: names it in the message.
    """
    for option, fine, why in (
        ("init_lora_weights", config.init_lora_weights in _LEAVES_THE_BASE, "it rewrites the base's weights"),
        ("bias", config.bias == "none", "it trains the base's own biases"),
        *((name, not getattr(config, name, None), why) for name, why in _NOT_PLAIN.items()),
    ):
        if not fine:
            raise ValueError(
                f"The {what} has {option}={getattr(config, option)!r}: {why}, and four roles share the base. Use an "
                "adapter without it, or one that was converted to plain LoRA."
            )


def check_head_untouched(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    wrapped = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer) and module is head]
    if wrapped or not isinstance(getattr(head, "weight", None), Tensor):
        raise ValueError(
            "An adapter changes the output head; the roles share the base's, which stays frozen. Leave lm_head out of "
            "target_modules."
        )


def remove_dropout(model: PreTrainedModel) -> None:
    """Zero every dropout probability: modules, and attributes that layers hand to functional dropout."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def neutral_generation_config(model: PreTrainedModel) -> GenerationConfig:
    """Special tokens only: a checkpoint's repetition penalty, say, would sample what no log-probability knows."""
    given = model.generation_config
    return GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
    )


def enable_checkpointing(
    model: PreTrainedModel,
    given: Mapping[str, Any],
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
    **options: Any,
) -> list[nn.Module]:
    """Let the model recompute activations in backward, and return the layers that will.

    Args:
        model: the base.
        given: the user's keyword arguments for torch's checkpoint.
        contexts: makes the contexts of a forward and of its recomputation.
        options: further ones of transformers (``every_n_layers``, ``offload``).

    Raises:
        ValueError: for ``use_reentrant=True``, or an architecture without checkpointed layers.
    """
    if given.get("use_reentrant", False):
        raise ValueError(
            "gradient_checkpointing_kwargs has use_reentrant=True; ppo_lora needs use_reentrant=False, because only "
            "then can the recomputation know which role a forward had."
        )
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that transformers can checkpoint; set gradient_checkpointing=False."
        )
    own = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({**given, **own}, **options)
    model.disable_input_require_grads()
    return layers
