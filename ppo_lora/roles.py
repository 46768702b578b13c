"""Which adapter each role has on the base, and switching among them.

Switching writes two flags of every LoRA layer and touches neither parameters nor ``requires_grad``: PEFT's own
``set_adapter`` and ``disable_adapter`` freeze and unfreeze adapters as a side effect, which silently drops gradients
and optimizer groups.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from enum import Enum

from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from .adapters import Adapter, role_config
from .fitting import check_saved_modules, fitted, is_lora
from .identity import BaseIdentity, check_belongs
from .lean_lora import make_lean
from .manifest import Origin
from .preparation import check_lora_config


class Role(str, Enum):
    """What the shared base is at the moment."""

    POLICY = "policy"
    REFERENCE = "reference"
    VALUE = "value"
    REWARD = "reward"


RoleName = Role | str
"""A role, or the name of a further policy."""


def label(role: RoleName) -> str:
    """A role's or further policy's name as text."""
    return role.value if isinstance(role, Role) else role


def check_policy_name(name: str, taken: Iterable[RoleName] = ()) -> None:
    """Refuse what a further policy cannot be called.

    Args:
        name: to be.
        taken: names that there are, besides the four roles'.

    Raises:
        ValueError: the name is taken, is not made of letters, digits, ``_`` and ``-``, or torch has other use for it.
    """
    known = sorted({*map(label, Role), *map(label, taken)})
    # PEFT keeps adapters in ModuleDicts, whose keys may not be the names of their methods.
    if not re.fullmatch(r"[\w-]+", name) or name in known or hasattr(nn.ModuleDict(), name):
        raise ValueError(
            f"A policy cannot be called {name!r}: expected letters, digits, _ and -, none of {known}, and no name of "
            "torch's own (as pop or type)."
        )


class RoleAdapters:
    """The LoRA adapters on a base, by role. A role may have one of its own, another role's, or none.

    Args:
        model: the base; adapters are put into it.
        identity: which base that is.

    Attributes:
        active: the role of the moment.
        origins: where each role's adapter came from; None for a fresh one, or where it has none.
    """

    def __init__(self, model: PreTrainedModel, identity: BaseIdentity):
        self._model, self._identity = model, identity
        self._peft: PeftModel | None = None
        self._names: dict[RoleName, str | None] = {}
        self._layers: list[BaseTunerLayer] = []
        self.origins: dict[RoleName, Origin | None] = {}
        self.active: RoleName = Role.POLICY

    # Building

    def add(self, role: RoleName, start: Adapter | LoraConfig) -> None:
        """Give ``role`` an adapter of its own: a copy of one, or a fresh one of a configuration.

        Warns:
            UserWarning: it was trained on another base, revision or quantization, or has a head and the role none.

        Raises:
            ValueError: it does not fit the base.
        """
        config = role_config(start.config if isinstance(start, Adapter) else start)
        if isinstance(start, Adapter):
            what = _named(role, start)
            check_lora_config(config, what)
            if start.head is not None and role not in (Role.VALUE, Role.REWARD):
                warnings.warn(
                    f"The {what} has a head, as reward and value adapters have; it is left out. If this is one, give "
                    f"the {label(role)} role an SFT or policy adapter (CAUSAL_LM) instead.",
                    UserWarning,
                    stacklevel=2,
                )
            check_belongs(start.trained_on, self._identity, what)
            config.init_lora_weights = True  # the tensors take its place
        config.base_model_name_or_path = self._model.config.name_or_path or config.base_model_name_or_path
        config.revision = self._identity.commit or self._identity.revision
        self._wrap(role, config, _named(role, start))
        self._names[role] = label(role)
        self._layers = [module for module in self._model.modules() if isinstance(module, BaseTunerLayer)]
        make_lean(self._layers, label(role))
        for parameter in self.parameters(role):
            parameter.data = parameter.data.float()  # PEFT before 0.19 gives further adapters the base's dtype
        self.origins[role] = start.origin() if isinstance(start, Adapter) else None
        if isinstance(start, Adapter):
            try:
                self.load(role, start)
            except ValueError:
                del self._names[role], self.origins[role]
                raise

    def _wrap(self, role: RoleName, config: LoraConfig, what: str) -> None:
        try:
            with warnings.catch_warnings():
                # PEFT asks transformers for a property by its former name.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                self._put(role, config)
        except ValueError as error:
            raise ValueError(
                f"The {what} does not fit {type(self._model).__name__}: {error} Load the base that the adapter was "
                "trained on."
            ) from error

    def _put(self, role: RoleName, config: LoraConfig) -> None:
        if self._peft is None:
            self._peft = PeftModel(self._model, config, adapter_name=label(role))
        else:
            self._peft.add_adapter(label(role), config)

    def copy(self, source: RoleName, role: RoleName) -> None:
        """Give ``role`` a copy of another role's adapter."""
        self.add(role, self.export(source))
        self.origins[role] = self.origins[source]

    def share(self, role: RoleName, other: RoleName | None) -> None:
        """Let ``role`` use another role's adapter, or none at all."""
        self._names[role] = None if other is None else self._names[other]
        self.origins[role] = None if other is None else Origin(f"the {label(other)}'s")

    def load(self, role: RoleName, adapter: Adapter) -> None:
        """Copy an adapter's tensors into the role's parameters, in place.

        Raises:
            ValueError: the role has no adapter, or names or shapes differ.
        """
        name = self._own(role)
        what, base = _named(role, adapter), type(self._model).__name__
        theirs, ours = adapter.scaling(), self.export(role).scaling()
        if theirs != ours:
            given, own = ({name: each[name] for name in ours if theirs[name] != ours[name]} for each in (theirs, ours))
            raise ValueError(
                f"The {what} has {given}, the role's own adapter {own}, so the same tensors would compute something "
                "else. Give both the same LoRA configuration."
            )
        tensors = fitted({k: v for k, v in adapter.tensors.items() if is_lora(k)}, self._tensors(role), what, base)
        whole = {key: tensor for key, tensor in adapter.tensors.items() if not is_lora(key)}
        check_saved_modules(whole, dict(self._model.named_parameters()), what, base)
        set_peft_model_state_dict(self._peft, tensors, adapter_name=name)

    def export(self, role: RoleName) -> Adapter:
        """The role's configuration and tensors, not copied.

        Raises:
            ValueError: the role has no adapter.
        """
        name = self._own(role)
        assert self._peft is not None
        return Adapter(self._peft.peft_config[name], self._tensors(role), trained_on=self._identity)

    def _own(self, role: RoleName) -> str:
        name = self._names[role]
        if name is None:
            raise ValueError(
                f"The {label(role)} role has no adapter: it is the base itself. There is nothing to load or save."
            )
        return name

    def _tensors(self, role: RoleName) -> dict[str, Tensor]:
        """The role's tensors under the names of PEFT's files."""
        assert self._peft is not None
        # PEFT before 0.19 takes every key that holds the adapter's name, as "query_key_value" holds "value".
        own = {id(parameter) for parameter in self.parameters(role)}
        named = {name: p.detach() for name, p in self._peft.named_parameters() if id(p) in own}
        tensors: dict[str, Tensor] = get_peft_model_state_dict(
            self._peft, state_dict=named, adapter_name=self._own(role), save_embedding_layers=False
        )
        return tensors

    # Asking

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """The roles that there are."""
        return tuple(self._names)

    def same(self, one: RoleName, other: RoleName) -> bool:
        """Whether two roles use one adapter."""
        return self._names[one] == self._names[other]

    def parameters(self, role: RoleName) -> list[nn.Parameter]:
        """The parameters of the role's adapter."""
        found: list[nn.Parameter] = []
        for layer in self._layers:
            for attribute in dict.fromkeys(layer.adapter_layer_names):  # DoRA names its magnitudes twice
                container = getattr(layer, attribute)
                if self._names[role] in container:
                    entry = container[self._names[role]]
                    found += [entry] if isinstance(entry, nn.Parameter) else list(entry.parameters())
        return found

    # Switching

    def activate(self, role: RoleName) -> None:
        """Be ``role`` from now on."""
        # PEFT's public switches change requires_grad; these two flags are all that its forward reads.
        # tests: test_peft_layers_still_read_the_flags_that_roles_write tells when they move.
        name = self._names[role]
        flags = {"_active_adapter": [] if name is None else [name], "_disable_adapters": name is None}
        for layer in self._layers:
            vars(layer).update(flags)
        self.active = role


def _named(role: RoleName, start: Adapter | LoraConfig) -> str:
    """How messages call an adapter."""
    return f"{label(role)} adapter {(start.source or '') if isinstance(start, Adapter) else ''}".strip()
