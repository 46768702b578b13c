"""A model with roles on it: putting them there, being one of them, what they train, saving and loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from .adapters import SHARED, ZERO, Adapter, AdapterLike, read_roles
from .heads import ScalarHead
from .host import TrainableHost
from .identity import BaseIdentity
from .preparation import check_head_untouched
from .roles import Role, RoleAdapters, RoleName, check_policy_name, label

Self = TypeVar("Self", bound="RoleHost")


class RoleHost(TrainableHost):
    """Holds a model, the adapters of its roles, and the heads of value and reward. Computes nothing.

    Args:
        model: the base, frozen, without adapters; they are put into it.
        adapters: what each role starts from, as :func:`~ppo_lora.adapters.read_roles` gives it.
        config: for the fresh adapters.
        identity: which base it is.

    Attributes:
        model: the base.
        identity: which base it is.
        adapters: which adapter each role has.
        value_head: of the value role.
        reward_head: of the reward role; None where there is none.

    Raises:
        ValueError: an adapter does not fit the base, or lacks its head.
    """

    value_head: ScalarHead

    def __init__(
        self, model: PreTrainedModel, adapters: Mapping[str, Any], config: LoraConfig, identity: BaseIdentity
    ):
        super().__init__()
        self.model = model
        self.identity = identity
        self.adapters = RoleAdapters(model, identity)
        self.reward_head: ScalarHead | None = None
        self._add_roles(**adapters, config=config)
        self._settle()

    # Being a role

    @contextmanager
    def role(self: Self, role: RoleName) -> Iterator[Self]:
        """Be ``role`` inside the ``with``; whatever it was before is restored at the end, also after an exception.

        Raises:
            ValueError: the base does not have that role.
        """
        previous = self.adapters.active
        self.adapters.activate(self._known(role))
        try:
            yield self
        finally:
            self.adapters.activate(previous)

    @property
    def active_role(self) -> RoleName:
        """The role of the moment."""
        return self.adapters.active

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """The roles this base has, and further policies."""
        return self.adapters.roles

    @property
    def shares_value_adapter(self) -> bool:
        """Whether the value role lives on the policy's adapter."""
        return self.adapters.same(Role.VALUE, Role.POLICY)

    def _known(self, role: RoleName) -> RoleName:
        there = {label(known): known for known in self.adapters.roles}
        if label(role) in there:
            return there[label(role)]
        known = list(dict.fromkeys([*(known.value for known in Role), *there]))
        if role not in known:
            raise ValueError(f"Unknown role {role!r}; expected one of {known}.")
        raise ValueError(
            f"This base has no {label(role)} role. Give SharedBase a {label(role)} adapter, or take scores from "
            "reward functions."
        )

    def _recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), self.role(self.adapters.active)

    # Putting roles on the base

    def _add_roles(self, policy: Any, reference: Any, value: Any, reward: Adapter | None, config: LoraConfig) -> None:
        self.adapters.add(Role.POLICY, policy or config)
        if reference is not None:
            self.adapters.add(Role.REFERENCE, reference)
        elif policy is None and not config.use_dora:
            self.adapters.share(Role.REFERENCE, None)
        else:
            self.adapters.copy(Role.POLICY, Role.REFERENCE)
        if reward is not None:
            self.adapters.add(Role.REWARD, reward)
            self.reward_head = reward.scalar_head(self._hidden_size).to(self.device)
        self._add_value(value, config)

    def _add_value(self, value: Any, config: LoraConfig) -> None:
        head = ScalarHead.zeros(self._hidden_size) if self.reward_head is None else deepcopy(self.reward_head)
        if value == SHARED:
            self.adapters.share(Role.VALUE, Role.POLICY)
        elif isinstance(value, Adapter):
            self.adapters.add(Role.VALUE, value)
            head = value.scalar_head(self._hidden_size)
        elif self.reward_head is not None and value != ZERO:
            self.adapters.copy(Role.REWARD, Role.VALUE)
        else:
            self.adapters.add(Role.VALUE, config)
            head = ScalarHead.zeros(self._hidden_size)
        self.value_head = head.to(self.device)

    def add_policy(self, name: str, adapter: AdapterLike | None = None) -> None:
        """Put one more policy on the base, to compare with: a text role of its own name that is never trained.

        Args:
            name: what it is called wherever a role is asked for.
            adapter: a causal adapter; None for the base without one.

        Raises:
            ValueError: the name is taken or cannot be one; the adapter does not fit.
        """
        check_policy_name(name, self.roles)
        read = read_roles({name: adapter})[name]
        try:
            if read is None:
                self.adapters.share(name, None)
            else:
                self.adapters.add(name, read)
        finally:
            self._settle()

    def _settle(self) -> None:
        """After adapters were put on the base."""
        check_head_untouched(self.model)
        self._freeze()
        self.adapters.activate(self.adapters.active)

    # Training

    def trainable_parameters(self) -> dict[Role, list[nn.Parameter]]:
        """The parameters that training changes, by role. With a shared value adapter the value has its head only."""
        value = [] if self.shares_value_adapter else self.adapters.parameters(Role.VALUE)
        return {
            Role.POLICY: self.adapters.parameters(Role.POLICY),
            Role.VALUE: [*value, *self.value_head.parameters()],
        }

    def _freeze(self) -> None:
        """Exactly the policy's and the value's parameters are trainable, from now on and for good."""
        self.requires_grad_(False)
        for parameters in self.trainable_parameters().values():
            for parameter in parameters:
                parameter.requires_grad_(True)

    # Saving and loading

    def adapter(self, role: RoleName) -> Adapter:
        """A role's adapter and head as plain tensors (not copied).

        Raises:
            ValueError: the role has no adapter.
        """
        role = self._known(role)
        head = self._head(role)
        return replace(self.adapters.export(role), head=None if head is None else head.state_dict())

    def load_adapter(self, role: RoleName, adapter: Adapter) -> None:
        """Copy an adapter's tensors, and its head for value and reward, into the role's parameters in place.

        Raises:
            ValueError: names or shapes differ from the role's, or the head is missing.
        """
        role = self._known(role)
        head = self._head(role)
        given = None if head is None else adapter.scalar_head(self._hidden_size)
        if head is not None and given is not None:
            head.check_fits(given, adapter.source)
        self.adapters.load(role, adapter)
        if head is not None and given is not None:
            head.load_state_dict(given.state_dict())

    def _head(self, role: RoleName) -> ScalarHead | None:
        return {"value": self.value_head, "reward": self.reward_head}.get(label(role))

    @property
    def _hidden_size(self) -> int:
        return int(self.config.get_text_config().hidden_size)
