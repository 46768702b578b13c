"""One base model, four roles on it. Knows nothing of PPO.

A role is a LoRA adapter (or none) and, for value and reward, a scalar head. Switching roles writes two flags of every
LoRA layer and touches neither parameters nor ``requires_grad``: PEFT's own ``set_adapter`` and ``disable_adapter``
freeze and unfreeze adapters as a side effect, which silently drops gradients and optimizer groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .adapters import Adapter, AdapterSource, ScalarHead, read_adapter, role_config
from .logprobs import token_logprobs
from .masking import last_true_index, position_ids


class Role(str, Enum):
    """What the shared base is at the moment."""

    POLICY = "policy"
    REFERENCE = "reference"
    VALUE = "value"
    REWARD = "reward"


SHARED = "shared"
SEPARATE = "separate"
AdapterLike = str | Path | AdapterSource | Adapter

_ZERO_AT_START = (True, "gaussian")
"""`init_lora_weights` that make B = 0 and leave the base's weights alone."""


def default_peft_config() -> LoraConfig:
    """LoRA of rank 16 on every linear layer but the output head."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class SharedBase(nn.Module):
    """One causal language model that is policy, reference, value model and reward model in turn.

    Outside of any :meth:`role` it is the policy. The trainable parameters are the policy's and the value's adapters
    and the value head, whatever role is active.

    Args:
        model: a causal language model, quantized or not, without adapters. It is changed in place: adapters are
            added, its own weights frozen, its dropout and its generation defaults removed.
        policy: adapter to start the policy from; None makes a fresh one (B = 0).
        reference: adapter of the reference; None takes the policy as it starts (no adapter if that is fresh, else a
            frozen copy).
        value: adapter of the value role, ``"separate"`` or None for one of its own (a copy of the reward adapter and
            its head if there is one, else fresh with a zero head), or ``"shared"`` for the policy's.
        reward: ``SEQ_CLS`` adapter with its head; None if scores come from elsewhere.
        peft_config: for the fresh adapters; rank 16 on all linear layers if None.

    Raises:
        ValueError: an adapter that does not fit the base, lacks its head, or would change the base's weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: AdapterLike | None = None,
        reference: AdapterLike | None = None,
        value: AdapterLike | None = None,
        reward: AdapterLike | None = None,
        peft_config: LoraConfig | None = None,
    ):
        super().__init__()
        _check_base(model)
        model.requires_grad_(False)
        model.eval()
        _remove_dropout(model)
        model.generation_config = _neutral_generation_config(model)
        self.model = model
        self.compute_dtype: torch.dtype = model.dtype
        self.sources: dict[str, str | None] = {}
        self._fresh_config = _fresh_config(peft_config)
        self._takes_positions = "position_ids" in signature(self.backbone.forward).parameters
        self._adapter_names: dict[Role, str | None] = {}
        self._active = Role.POLICY
        self._checkpointed: list[nn.Module] = []
        self._add_roles(policy, reference, value, reward)
        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        _check_head_untouched(model)
        self._freeze()
        self._activate(Role.POLICY)
        self.eval()
        self._check_logits()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        policy: AdapterLike | None = None,
        reference: AdapterLike | None = None,
        value: AdapterLike | None = None,
        reward: AdapterLike | None = None,
        peft_config: LoraConfig | None = None,
        quantization_config: Any = None,
        **model_kwargs: Any,
    ) -> SharedBase:
        """Load the base once and put the roles on it.

        Args:
            name_or_path: model id or folder.
            policy, reference, value, reward, peft_config: see the class.
            quantization_config: a ``BitsAndBytesConfig`` for an 8-bit or 4-bit base.
            model_kwargs: for ``AutoModelForCausalLM.from_pretrained``.
        """
        adapters = {"policy": policy, "reference": reference, "value": value, "reward": reward}
        loaded = {role: _read(source) for role, source in adapters.items()}
        if quantization_config is not None:
            model_kwargs["quantization_config"] = quantization_config
            if torch.cuda.is_available():
                model_kwargs.setdefault("device_map", {"": torch.cuda.current_device()})
        model = AutoModelForCausalLM.from_pretrained(name_or_path, **model_kwargs)
        return cls(model, peft_config=peft_config, **loaded)

    # Roles

    @contextmanager
    def role(self, role: Role | str) -> Iterator[SharedBase]:
        """Be ``role`` inside the ``with``; whatever it was before is restored at the end, also after an exception.

        Raises:
            ValueError: the base does not have that role.
        """
        previous = self._active
        self._activate(self._known(role))
        try:
            yield self
        finally:
            self._activate(previous)

    @property
    def active_role(self) -> Role:
        """The role of the moment."""
        return self._active

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles this base has."""
        return tuple(self._adapter_names)

    @property
    def shares_value_adapter(self) -> bool:
        """Whether the value role lives on the policy's adapter."""
        return self._adapter_names[Role.VALUE] == Role.POLICY.value

    def trainable_parameters(self) -> dict[Role, list[nn.Parameter]]:
        """The parameters that training changes, by role. With a shared value adapter the value has its head only."""
        value = [] if self.shares_value_adapter else self._adapter_parameters(Role.VALUE)
        return {
            Role.POLICY: self._adapter_parameters(Role.POLICY),
            Role.VALUE: [*value, *self.value_head.parameters()],
        }

    # What the roles compute

    def forward(
        self, role: Role | str, input_ids: Tensor, attention_mask: Tensor, response_length: int, **options: Any
    ) -> Any:
        """One entry for every differentiable pass, so that DDP and FSDP see it: values, or (logprobs, entropy)."""
        if self._known(role) is Role.VALUE:
            return self.values(input_ids, attention_mask, response_length)
        return self.logprobs_and_entropy(role, input_ids, attention_mask, response_length, **options)

    def logprobs(
        self,
        role: Role | str,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_length: int,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probabilities of the response tokens.

        Args:
            role: policy or reference.
            input_ids: [B, P + T] int64, prompts left-padded, responses right-padded.
            attention_mask: [B, P + T] bool or 0/1, True at real tokens.
            response_length: T.
            temperature: divides the logits, as in sampling.

        Returns:
            [B, T] float32, in nats; 0 at padding.
        """
        return self.logprobs_and_entropy(role, input_ids, attention_mask, response_length, temperature)[0]

    def logprobs_and_entropy(
        self,
        role: Role | str,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_length: int,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`logprobs`, and the entropy of each position's distribution, [B, T] float32 in nats, 0 at padding.

        The entropy has a gradient only where ``entropy_gradient`` asks for it.
        """
        states, mask = self._response_states(role, input_ids, attention_mask, response_length)
        tokens = input_ids[:, -response_length:][mask]
        with self._precision():
            logprobs, entropy = token_logprobs(
                states,
                self._logits,
                tokens,
                temperature,
                vocab_size=self.config.get_text_config().vocab_size,
                entropy_gradient=entropy_gradient,
            )
        return _scattered(logprobs, mask), _scattered(entropy, mask)

    def values(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
        """V(s_t), the value of the state before each response token.

        Returns:
            [B, T] float32, in units of the score; 0 at padding. Arguments as in :meth:`logprobs`.
        """
        states, mask = self._response_states(Role.VALUE, input_ids, attention_mask, response_length)
        return _scattered(self.value_head(states), mask)

    def scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The reward role's score of each row, read at its last real token.

        Args:
            input_ids: [B, N] int64, padded on either side.
            attention_mask: [B, N] bool or 0/1.

        Returns:
            [B] float32.

        Raises:
            ValueError: the base has no reward role.
        """
        hidden = self._hidden_states(Role.REWARD, input_ids, attention_mask)
        last = last_true_index(attention_mask.bool())
        return self.reward_head(hidden[torch.arange(len(last), device=last.device), last])

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, role: Role | str = Role.POLICY, **generation: Any
    ) -> Tensor:
        """``model.generate`` under a role, with the KV cache on, also when gradient checkpointing is.

        Sampling is plain: no top-k and no top-p unless asked for.

        Args:
            input_ids: [B, P] int64, left-padded.
            attention_mask: [B, P] bool or 0/1.
            role: whose text; the policy's by default.
            generation: for ``generate``.

        Returns:
            [B, P + T] int64.

        Raises:
            FloatingPointError: the logits are not finite.
        """
        if generation.get("do_sample"):
            generation = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **generation}
        self._set_checkpointing_layers(False)
        with self.role(role), self._precision():
            try:
                return self.model.generate(
                    input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=True, **generation
                )
            except RuntimeError as error:
                if "probability tensor" not in str(error):
                    raise
                raise FloatingPointError(
                    f"The {Role(role).value}'s logits are not finite, so no token can be sampled. Its weights have "
                    "diverged (lower the learning rate) or the dtype overflows (use bfloat16 or float32)."
                ) from error

    # Saving and loading

    def adapter(self, role: Role | str) -> Adapter:
        """A role's adapter and head as plain tensors (not copied).

        Raises:
            ValueError: the role has no adapter.
        """
        role = self._known(role)
        name = self._adapter_names[role]
        if name is None:
            raise ValueError(f"The {role.value} role is the base without an adapter; there is nothing to save.")
        tensors = get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)
        head = {Role.VALUE: self.value_head, Role.REWARD: self.reward_head}.get(role)
        return Adapter(
            config=self._peft.peft_config[name],
            tensors=tensors,
            head=None if head is None else head.state_dict(),
            source=self.sources.get(role.value),
        )

    def load_adapter(self, role: Role | str, adapter: Adapter) -> None:
        """Copy an adapter's tensors, and its head for value and reward, into the role's parameters in place.

        Raises:
            ValueError: names or shapes differ from the role's, or the head is missing.
        """
        role = self._known(role)
        name = self._adapter_names[role]
        if name is None:
            raise ValueError(f"The {role.value} role is the base without an adapter; nothing can be loaded into it.")
        self._copy_tensors(name, adapter)
        head = {Role.VALUE: self.value_head, Role.REWARD: self.reward_head}.get(role)
        if head is not None:
            head.load_state_dict(adapter.scalar_head(self._hidden_size).state_dict())

    # What transformers.Trainer expects of a model

    @property
    def config(self) -> Any:
        """The base's configuration."""
        return self.model.config

    @property
    def generation_config(self) -> Any:
        """The base's generation configuration; neutral but for the special tokens."""
        return self.model.generation_config

    @property
    def quantization_method(self) -> Any:
        """How the base is quantized, or None; Trainer does not move a quantized model."""
        return getattr(self.model, "quantization_method", None)

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.model.device

    @property
    def backbone(self) -> PreTrainedModel:
        """The base without its output head."""
        return self.model.base_model

    def train(self, mode: bool = True) -> SharedBase:
        """Stay in evaluation mode: no role has dropout. Checkpointing follows whether gradients are wanted."""
        return super().train(False)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Recompute activations in backward, each under the role that its forward had.

        Raises:
            ValueError: for ``use_reentrant=True``, or an architecture without checkpointed layers.
        """
        kwargs = dict(activation_checkpointing_kwargs or {})
        if kwargs.pop("use_reentrant", False):
            raise ValueError(
                "gradient_checkpointing_kwargs has use_reentrant=True; ppo_lora needs use_reentrant=False, because "
                "only then can the recomputation know which role a forward had."
            )
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"{type(self.model).__name__} has no layers that transformers can checkpoint; "
                "set gradient_checkpointing=False."
            )
        kwargs = {
            **kwargs,
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": self._recompute_contexts,
        }
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        if enable is None:
            enable = self.model.gradient_checkpointing_enable
        enable(kwargs, **options)
        self.model.disable_input_require_grads()
        self._checkpointed = layers

    gradient_checkpointing_enable = activation_checkpointing_enable

    # Building

    def _add_roles(
        self,
        policy: AdapterLike | None,
        reference: AdapterLike | None,
        value: AdapterLike | None,
        reward: AdapterLike | None,
    ) -> None:
        start, scorer = _read(policy), _read(reward)
        config = self._fresh_config if start is None else start.config
        self._peft = PeftModel(self.model, config, adapter_name=Role.POLICY.value)
        self._adapter_names[Role.POLICY] = Role.POLICY.value
        if start is not None:
            self._copy_tensors(Role.POLICY.value, start)
        self.sources[Role.POLICY.value] = None if start is None else start.source
        self._add_reference(_read(reference), fresh_policy=start is None)
        self.reward_head = None if scorer is None else scorer.scalar_head(self._hidden_size)
        if scorer is not None:
            self._add_adapter(Role.REWARD, scorer)
        self._add_value(value, scorer)

    def _add_reference(self, reference: Adapter | None, fresh_policy: bool) -> None:
        if reference is not None:
            self._add_adapter(Role.REFERENCE, reference)
        elif fresh_policy and not self._fresh_config.use_dora:
            self._adapter_names[Role.REFERENCE] = None
        else:
            self._add_adapter(Role.REFERENCE, self.adapter(Role.POLICY))

    def _add_value(self, value: AdapterLike | None, scorer: Adapter | None) -> None:
        if value == SHARED:
            head = None if scorer is None else scorer.head
            self._adapter_names[Role.VALUE] = Role.POLICY.value
            self.sources[Role.VALUE.value] = SHARED
        else:
            start = scorer if value in (None, SEPARATE) else _read(value)
            head = None if start is None else start.head
            if start is not None and head is None:
                start.scalar_head(self._hidden_size)
            self._add_adapter(Role.VALUE, start or Adapter(self._fresh_config, {}))
        made = Adapter(self._fresh_config, {}, head).scalar_head(self._hidden_size) if head else None
        self.value_head = (made or ScalarHead.zeros(self._hidden_size)).to(self.device)
        if self.reward_head is not None:
            self.reward_head = self.reward_head.to(self.device)

    def _add_adapter(self, role: Role, adapter: Adapter) -> None:
        """Give ``role`` an adapter of its own: a copy of the tensors, or PEFT's fresh weights where there are none."""
        try:
            self._peft.add_adapter(role.value, role_config(adapter.config))
        except ValueError as error:
            raise ValueError(
                f"The {role.value} adapter {adapter.source or ''} does not fit {type(self.model).__name__}: {error} "
                "Load the base that the adapter was trained on."
            ) from error
        self._adapter_names[role] = role.value
        self.sources[role.value] = adapter.source
        if adapter.tensors:
            self._copy_tensors(role.value, adapter)

    def _copy_tensors(self, name: str, adapter: Adapter) -> None:
        expected = get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)
        _check_tensors(expected, adapter, f"{name} adapter {adapter.source or ''}".strip(), type(self.model).__name__)
        set_peft_model_state_dict(self._peft, dict(adapter.tensors), adapter_name=name)

    def _freeze(self) -> None:
        """Exactly the policy's and the value's parameters are trainable, from now on and for good."""
        self.requires_grad_(False)
        for parameters in self.trainable_parameters().values():
            for parameter in parameters:
                parameter.requires_grad_(True)

    def _adapter_parameters(self, role: Role) -> list[nn.Parameter]:
        name = self._adapter_names[role]
        found = []
        for layer in self._layers:
            for attribute in layer.adapter_layer_names:
                container = getattr(layer, attribute)
                if name in container:
                    entry = container[name]
                    found += [entry] if isinstance(entry, nn.Parameter) else list(entry.parameters())
        return found

    # Switching

    def _known(self, role: Role | str) -> Role:
        if role not in [known.value for known in Role]:
            raise ValueError(f"Unknown role {role!r}; expected one of {[known.value for known in Role]}.")
        if Role(role) not in self._adapter_names:
            raise ValueError(
                f"This base has no {Role(role).value} role. Give SharedBase a {Role(role).value} adapter, or take "
                "scores from reward functions."
            )
        return Role(role)

    def _activate(self, role: Role) -> None:
        # PEFT's public switches change requires_grad; these two flags are all that its forward reads.
        # tests/test_shared_base.py::test_peft_layers_still_read_the_flags_that_roles_write tells when they move.
        name = self._adapter_names[role]
        flags = {"_active_adapter": [] if name is None else [name], "_disable_adapters": name is None}
        for layer in self._layers:
            vars(layer).update(flags)
        self._active = role

    def _recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For torch.utils.checkpoint: nothing around the forward, and its role again around the recomputation."""
        return nullcontext(), self.role(self._active)

    def _set_checkpointing_layers(self, enabled: bool) -> None:
        """transformers checkpoints layers that are in training mode; the modules inside them stay without dropout."""
        for module in self._checkpointed:
            module.training = enabled

    # Passes

    def _precision(self) -> AbstractContextManager[Any]:
        mixed = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype if mixed else None, enabled=mixed)

    def _hidden_states(self, role: Role | str, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, N, H]: the backbone's last hidden states under a role."""
        positions = {"position_ids": position_ids(attention_mask)} if self._takes_positions else {}
        self._set_checkpointing_layers(torch.is_grad_enabled())
        with self.role(role), self._precision():
            output = self.backbone(input_ids, attention_mask=attention_mask.long(), use_cache=False, **positions)
        return output.last_hidden_state

    def _response_states(
        self, role: Role | str, input_ids: Tensor, attention_mask: Tensor, response_length: int
    ) -> tuple[Tensor, Tensor]:
        """The states that predict the real response tokens, [N, H], and the response mask, [B, T]."""
        hidden = self._hidden_states(role, input_ids, attention_mask)
        mask = attention_mask[:, -response_length:].bool()
        return hidden[:, -response_length - 1 : -1][mask], mask

    def _logits(self, hidden: Tensor) -> Tensor:
        """The output head with what some architectures do to its logits; checked once against the whole model."""
        head = self.model.get_output_embeddings()
        config = self.config.get_text_config()
        logits = head(hidden.to(head.weight.dtype))
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def _check_logits(self) -> None:
        ids = torch.tensor([[0, 1, 2]], device=self.device)
        with self._precision():
            whole = self.model(ids, use_cache=False).logits.float()
            ours = self._logits(self._hidden_states(Role.POLICY, ids, torch.ones_like(ids))).float()
        if not torch.allclose(whole, ours, rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits in a way that ppo_lora does not know, so its "
                "log-probabilities would be wrong. Please report the architecture."
            )

    @property
    def _hidden_size(self) -> int:
        return int(self.config.get_text_config().hidden_size)


def _read(source: AdapterLike | None) -> Any:
    """An Adapter from whatever names one; None, "separate" and "shared" pass through."""
    if source is None or isinstance(source, Adapter) or source in (SHARED, SEPARATE):
        return source
    return read_adapter(source)


def _check_base(model: PreTrainedModel) -> None:
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


def _fresh_config(peft_config: LoraConfig | None) -> LoraConfig:
    config = default_peft_config() if peft_config is None else peft_config
    if not isinstance(config, LoraConfig):
        raise TypeError(f"peft_config is a {type(config).__name__}; expected a LoraConfig.")
    if config.init_lora_weights not in _ZERO_AT_START:
        raise ValueError(
            f"init_lora_weights is {config.init_lora_weights!r}, which starts away from the base or rewrites its "
            "weights; four roles share them. Use True or 'gaussian'."
        )
    if config.target_modules is None:
        config = LoraConfig(**{**config.to_dict(), "target_modules": "all-linear"})
    return role_config(config)


def _check_head_untouched(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    wrapped = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer) and module is head]
    if wrapped or not isinstance(getattr(head, "weight", None), Tensor) or _has_saved_modules(model):
        raise ValueError(
            "An adapter changes the output head or has modules_to_save besides its score head; the roles share the "
            "base's head, which stays frozen. Leave lm_head out of target_modules and modules_to_save."
        )


def _has_saved_modules(model: PreTrainedModel) -> bool:
    return any("modules_to_save" in name for name, _ in model.named_parameters())


def _check_tensors(expected: dict[str, Tensor], adapter: Adapter, what: str, base: str) -> None:
    """Same names and shapes, or a ValueError that shows the first difference."""
    missing = sorted(expected.keys() - adapter.tensors.keys())
    extra = sorted(adapter.tensors.keys() - expected.keys())
    if missing or extra:
        raise ValueError(
            f"The {what} does not fit {base}: {len(missing)} tensors are missing"
            f"{f' (the first: {missing[0]})' if missing else ''} and {len(extra)} have no place"
            f"{f' (the first: {extra[0]})' if extra else ''}. Load the base that the adapter was trained on."
        )
    for key, tensor in expected.items():
        given = adapter.tensors[key]
        if tensor.shape != given.shape:
            raise ValueError(
                f"The {what} does not fit {base}: {key} is {list(given.shape)} in the adapter and "
                f"{list(tensor.shape)} on the base. Load the base that the adapter was trained on (hidden and "
                "vocabulary sizes must agree)."
            )


def _remove_dropout(model: PreTrainedModel) -> None:
    """Zero every dropout probability: modules, and attributes that layers hand to functional dropout."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def _neutral_generation_config(model: PreTrainedModel) -> GenerationConfig:
    """Special tokens only: a checkpoint's repetition penalty, say, would make samples that no log-probability knows."""
    given = model.generation_config
    return GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
    )


def _scattered(values: Tensor, mask: Tensor) -> Tensor:
    """[N] float32 into the True places of a [B, T] mask, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values.float())
