"""What turns hidden states into numbers: the base's output head, and scalar heads for value and reward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_FEW = 32
"""Rows: a step of decoding, and not a batch of text."""


class ScalarHead(nn.Module):
    """One number from each hidden state: a linear map to one output, in float32 whatever the base's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().float().clone())

    @classmethod
    def zeros(cls, hidden_size: int) -> ScalarHead:
        """The head that says 0 everywhere."""
        return cls(torch.zeros(1, hidden_size))

    def check_fits(self, given: ScalarHead, source: str | None) -> None:
        """Refuse another head's weights where one of the two has a bias and the other not."""
        if (self.bias is None) != (given.bias is None):
            raise ValueError(
                f"The head of {source or 'the adapter'} has {'no' if given.bias is None else 'a'} bias, the role's "
                f"head has {'no' if self.bias is None else 'a'} bias; they have to agree."
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] of any float dtype to [...] float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(-1)


class OutputHead:
    """The base's output head, with what some architectures do to its logits afterwards.

    Args:
        model: the causal language model, whose head stays frozen.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config()
        self._name = type(model).__name__
        self._linear = model.get_output_embeddings()
        self._scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self._cap = getattr(config, "final_logit_softcapping", None)
        self.vocab_size = int(config.vocab_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., H] to logits [..., V], each row independently of the others."""
        weight = self._linear.weight
        logits = self._product(hidden.to(weight.dtype) if weight.is_floating_point() else hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def _product(self, hidden: Tensor) -> Tensor:
        few = hidden.dim() == 2 and len(hidden) <= _FEW and hidden.device.type == "cpu"
        if few and type(self._linear) is nn.Linear:
            # The CPU's matrix product first lays out the right-hand matrix anew: it had better be the small one.
            logits = (self._linear.weight @ hidden.t()).t()
            return logits if self._linear.bias is None else logits + self._linear.bias
        whole: Tensor = self._linear(hidden)
        return whole

    def check(self, hidden: Tensor, logits: Tensor) -> None:
        """Compare with the whole model's logits for the same hidden states.

        Raises:
            FloatingPointError: the model's are not finite.
            ValueError: they differ, so log-probabilities would be wrong.
        """
        if not bool(logits.isfinite().all()):
            raise FloatingPointError(
                f"{self._name} gives logits that are not finite for a sequence of three tokens. Its weights are "
                "broken, or the dtype overflows (use bfloat16 or float32)."
            )
        if not torch.allclose(self(hidden).float(), logits.float(), rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{self._name} changes its logits in a way that ppo_lora does not know, so its log-probabilities "
                "would be wrong. Please report the architecture."
            )
