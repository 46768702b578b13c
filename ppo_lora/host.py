"""What transformers' Trainer expects of a model, for a module that holds one."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .preparation import enable_checkpointing

Self = TypeVar("Self", bound="TrainableHost")


class TrainableHost(nn.Module):
    """Stands for the model that it holds: configuration, device, gradient checkpointing.

    Attributes:
        model: the base.
    """

    model: PreTrainedModel

    def __init__(self) -> None:
        super().__init__()
        self._checkpointed: list[nn.Module] = []

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

    def train(self: Self, mode: bool = True) -> Self:
        """Stay in evaluation mode: no role has dropout. Checkpointing follows whether gradients are wanted."""
        return super().train(False)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Recompute activations in backward, each under the role that its forward had.

        Raises:
            ValueError: for ``use_reentrant=True``, or an architecture without checkpointed layers.
        """
        self._checkpointed = enable_checkpointing(
            self.model, activation_checkpointing_kwargs or {}, self._recompute_contexts, **options
        )

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """The name of :meth:`activation_checkpointing_enable` in transformers before 5.2x."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    @abstractmethod
    def _recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For torch.utils.checkpoint: what is around a forward, and around its recomputation."""

    def _set_checkpointing_layers(self, enabled: bool) -> None:
        """transformers checkpoints layers that are in training mode; the modules inside them stay without dropout."""
        for module in self._checkpointed:
            module.training = enabled
