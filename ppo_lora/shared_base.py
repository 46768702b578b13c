"""One base model, four roles on it. Knows nothing of PPO."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from .adapters import AdapterLike, read_roles
from .heads import OutputHead
from .hub import check_safetensors, hub_errors
from .identity import BaseIdentity
from .logprobs import CHUNK_ELEMENTS, token_logprobs, vocabulary_kl
from .packing import packed_arguments, tell_rows_apart
from .preparation import check_base, fresh_config, neutral_generation_config, remove_dropout
from .role_host import RoleHost
from .roles import Role, RoleName, label
from .rows import Rows, compact_rows
from .sampling import DecodeLoop


class SharedBase(RoleHost):
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
            its head if there is one, else fresh with a zero head), ``"zero"`` for a fresh one in any case, or
            ``"shared"`` for the policy's.
        reward: ``SEQ_CLS`` adapter with its head; None if scores come from elsewhere.
        peft_config: for the fresh adapters; rank 16 on all linear layers if None.
        identity: which base this is, where more is known than the model's name.
        allow_pickle: read adapters that have no safetensors.

    Attributes:
        compute_dtype: of the passes.
        chunk_elements: logits held at once, in numbers.
        packs_rows: whether :class:`PPOTrainer` and :meth:`scores` read rows as one, without padding.

    Warns:
        UserWarning: an adapter was trained on another base, revision or quantization.

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
        identity: BaseIdentity | None = None,
        allow_pickle: bool = False,
    ):
        check_base(model)
        given = {"policy": policy, "reference": reference, "value": value, "reward": reward}
        adapters = read_roles(given, allow_pickle)
        model.requires_grad_(False)
        model.eval()
        remove_dropout(model)
        model.generation_config = neutral_generation_config(model)
        dtype = model.dtype  # as it is without adapters, which are float32
        super().__init__(model, adapters, fresh_config(peft_config, model), identity or BaseIdentity.of(model))
        self.compute_dtype: torch.dtype = dtype
        self.chunk_elements = CHUNK_ELEMENTS
        self.packs_rows = False
        self._takes_positions = "position_ids" in signature(self.backbone.forward).parameters
        self._output_head = OutputHead(model)
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
        allow_pickle: bool = False,
        **model_kwargs: Any,
    ) -> SharedBase:
        """Load the base once and put the roles on it.

        Args:
            name_or_path: model id or folder.
            policy, reference, value, reward, peft_config: see the class.
            quantization_config: a ``BitsAndBytesConfig`` for an 8-bit or 4-bit base.
            allow_pickle: read a base or adapters that have no safetensors.
            model_kwargs: for ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            HubError: the Hub does not give the base or an adapter.
        """
        given = {"policy": policy, "reference": reference, "value": value, "reward": reward}
        adapters = read_roles(given, allow_pickle)
        if quantization_config is not None:
            model_kwargs["quantization_config"] = quantization_config
            if torch.cuda.is_available():
                model_kwargs.setdefault("device_map", {"": torch.cuda.current_device()})
        model_kwargs.setdefault("trust_remote_code", False)  # transformers asks on the terminal otherwise
        revision = model_kwargs.get("revision")
        with hub_errors("base", name_or_path, revision):
            if not allow_pickle:
                if not {"variant", "subfolder", "gguf_file"} & model_kwargs.keys():
                    check_safetensors(name_or_path, revision)
                model_kwargs["use_safetensors"] = True
            model = AutoModelForCausalLM.from_pretrained(name_or_path, **model_kwargs)
        return cls(model, peft_config=peft_config, identity=BaseIdentity.of(model, revision), **adapters)

    # What the roles compute

    def forward(
        self,
        role: RoleName,
        rows: Rows,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        with_values: bool = False,
    ) -> Any:
        """One entry for every differentiable pass, so that DDP and FSDP see it.

        Args:
            role: whose pass.
            rows: what is read.
            temperature: divides the logits, as in sampling.
            entropy_gradient: let a gradient flow through the entropies too.
            with_values: values from the same pass, where the value role has the policy's adapter.

        Returns:
            The value role's values [B, T]; a text role's ``(logprobs, entropy)``, each [B, T], or those and the
            values. All float32, 0 at padding.
        """
        states = rows.states(self._hidden_states(role, rows))
        if self._known(role) is Role.VALUE:
            return rows.scattered(self.value_head(states))
        with self._precision():
            logprobs, entropy = token_logprobs(
                states,
                self._output_head,
                rows.tokens,
                temperature,
                vocab_size=self._output_head.vocab_size,
                entropy_gradient=entropy_gradient,
                chunk_elements=self.chunk_elements,
            )
        seen = (rows.scattered(logprobs), rows.scattered(entropy))
        return (*seen, rows.scattered(self.value_head(states))) if with_values else seen

    def logprobs(
        self,
        role: RoleName,
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
        role: RoleName,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_length: int,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`logprobs`, and the entropy of each position's distribution, [B, T] float32 in nats, 0 at padding.

        The entropy has a gradient only where ``entropy_gradient`` asks for it.
        """
        rows = compact_rows(input_ids, attention_mask, response_length)
        seen: tuple[Tensor, Tensor] = self.forward(role, rows, temperature, entropy_gradient)
        return seen

    @torch.no_grad()
    def exact_kl(self, rows: Rows, temperature: float = 1.0) -> Tensor:
        """KL(policy || reference) of the next-token distributions before each response token, over the vocabulary.

        Returns:
            [B, T] float32, in nats; 0 at padding.
        """
        states = rows.states(self._hidden_states(Role.POLICY, rows))
        ref_states = rows.states(self._hidden_states(Role.REFERENCE, rows))
        with self._precision():
            kl = vocabulary_kl(
                states,
                ref_states,
                self._output_head,
                temperature,
                vocab_size=self._output_head.vocab_size,
                chunk_elements=self.chunk_elements,
            )
        return rows.scattered(kl)

    def values(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
        """V(s_t), the value of the state before each response token.

        Returns:
            [B, T] float32, in units of the score; 0 at padding. Arguments as in :meth:`logprobs`.
        """
        values: Tensor = self.forward(Role.VALUE, compact_rows(input_ids, attention_mask, response_length))
        return values

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
        self._known(Role.REWARD)
        assert self.reward_head is not None
        rows = compact_rows(input_ids, attention_mask, packed=self.packs_rows)
        return self.reward_head(rows.last_states(self._hidden_states(Role.REWARD, rows)))

    @torch.no_grad()
    def sample(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        draws: Tensor,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        role: RoleName = Role.POLICY,
        temperature: float = 1.0,
        **generation: Any,
    ) -> tuple[Tensor, Tensor]:
        """Sample a response to each prompt; what a row says does not depend on the rows beside it.

        Args:
            input_ids: [B, P] int64, left-padded.
            attention_mask: [B, P] bool or 0/1.
            draws: [B, T] float64, uniform random numbers, one a token; T is the most tokens of a response.
            stop_token_ids: ids that end a response.
            pad_token_id: stands after the end.
            role: whose text.
            temperature: divides the logits.
            generation: for ``generate``, which prepares the cache.

        Returns:
            ``(responses, logprobs)``, [B, T'] int64 and float32, T' the longest response: the tokens and the
            log-probabilities (nats) that they were drawn with.

        Raises:
            FloatingPointError: the logits are not finite.
        """
        loop = DecodeLoop(
            self.backbone,
            self._output_head,
            attention_mask,
            draws.to(self.device),
            temperature,
            stop_token_ids,
            pad_token_id,
            self._takes_positions,
        )
        options = {"max_new_tokens": draws.shape[1], "do_sample": False, "pad_token_id": pad_token_id, **generation}
        responses = self.generate(input_ids, attention_mask, role, custom_generate=loop, **options)
        return responses, loop.logprobs[:, : responses.shape[1]]

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, role: RoleName = Role.POLICY, **generation: Any
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
            FloatingPointError: sampling met logits that are not finite.
        """
        if generation.get("do_sample"):
            generation = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **generation}
        self._set_checkpointing_layers(False)
        with self.role(role), self._precision():
            try:
                return self.model.generate(
                    input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=True, **generation
                )
            except (RuntimeError, FloatingPointError) as error:
                if isinstance(error, RuntimeError) and "probability tensor" not in str(error):
                    raise
                raise FloatingPointError(
                    f"The {label(role)}'s logits are not finite, so no token can be sampled. Its weights have "
                    "diverged (lower the learning rate) or the dtype overflows (use bfloat16 or float32)."
                ) from error

    # Passes

    def _precision(self) -> AbstractContextManager[Any]:
        mixed = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype if mixed else None, enabled=mixed)

    def _hidden_states(self, role: RoleName, rows: Rows) -> Tensor:
        """[B, N, H]: the backbone's last hidden states under a role."""
        self._set_checkpointing_layers(torch.is_grad_enabled())
        with self.role(role), self._precision():
            positions = rows.position_ids
            packed = {} if positions is None else packed_arguments(self.model, rows.lengths, positions)
            return self.backbone(rows.input_ids, use_cache=False, **packed).last_hidden_state

    def decide_packing(self, wanted: bool | None = None) -> None:
        """Read rows as one, without padding, from now on or not.

        Args:
            wanted: None for where attention is quick at it and says the same.

        Raises:
            ValueError: it is wanted, and the base cannot tell packed rows apart.
        """
        quick = wanted is not False and tell_rows_apart(self.model)
        self.packs_rows = (quick or bool(wanted)) and self._packed_rows_say_the_same()
        if wanted and not self.packs_rows:
            raise ValueError(
                f"{type(self.model).__name__} cannot tell packed rows apart, at least with this attn_implementation. "
                "Set pack_sequences=False."
            )

    @torch.no_grad()
    def _packed_rows_say_the_same(self) -> bool:
        """Whether packed rows of 3 to 5 tokens say what each says by itself."""
        if not self._takes_positions:
            return False
        ids = torch.arange(15, device=self.device).view(3, 5) % self._output_head.vocab_size
        mask = torch.arange(5) >= torch.tensor([[0], [2], [1]])
        apart, packed = (
            self.forward(Role.REFERENCE, compact_rows(ids, mask, 1, packed))[0] for packed in (False, True)
        )
        return torch.allclose(apart, packed, rtol=1e-2, atol=1e-2)

    @torch.no_grad()
    def _check_logits(self) -> None:
        ids = torch.tensor([[0, 1, 2]], device=self.device)
        with self._precision():
            whole = self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            self._output_head.check(self._hidden_states(Role.POLICY, compact_rows(ids, torch.ones_like(ids))), whole)
