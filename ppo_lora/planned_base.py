"""A shared base of shapes without numbers: what a plan of the memory runs in place of the real one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from .adapters import SHARED
from .heads import ScalarHead
from .preparation import default_peft_config, fresh_config
from .roles import Role
from .shared_base import SharedBase

_BLOCK = 64  # numbers that share a scale in bitsandbytes' 4-bit weights
_SECOND_BLOCK = 256  # scales that share one in their own quantization


@dataclass(frozen=True)
class BaseShape:
    """What decides which tensors a shared base has.

    Attributes:
        config: the base's configuration, as AutoConfig reads it.
        dtype: of its weights where they are not quantized.
        compute_dtype: of its arithmetic.
        quantization_config: a ``BitsAndBytesConfig``, or None.
        adapters: each role's LoRA configuration; None where the role has no adapter, "shared" for the policy's.
        trust_remote_code: build architectures that come with a checkpoint.
    """

    config: Any
    dtype: torch.dtype
    compute_dtype: torch.dtype
    quantization_config: Any
    adapters: Mapping[Role, LoraConfig | str | None]
    trust_remote_code: bool = False

    @property
    def layers(self) -> int:
        """Transformer layers."""
        return int(self.config.get_text_config().num_hidden_layers)

    def with_layers(self, count: int) -> BaseShape:
        """The same with ``count`` layers."""
        config = deepcopy(self.config)
        for name, values in self._by_layer.items():
            setattr(config.get_text_config(), name, values[:count])
        config.get_text_config().num_hidden_layers = count
        return BaseShape(**{**vars(self), "config": config})

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike, so that fewer of them tell what more of them would need."""
        if any(len(set(map(str, values))) > 1 for values in self._by_layer.values()):
            return False
        stacks = [m for m in _meta_model(self).modules() if isinstance(m, nn.ModuleList) and len(m) == self.layers]
        sizes = [{sum(p.numel() for p in layer.parameters()) for layer in stack} for stack in stacks]
        return bool(sizes) and all(len(each) == 1 for each in sizes)

    @property
    def _by_layer(self) -> dict[str, list[Any]]:
        """What the configuration says of each layer, as which of them attend to a window only."""
        given = vars(self.config.get_text_config())
        return {name: each for name, each in given.items() if isinstance(each, list) and len(each) == self.layers}


class PlannedBase(SharedBase):
    """A :class:`SharedBase` whose tensors are fake: they have shapes, types and a device, and no numbers.

    Args:
        shape: what it is made of.
        mode: torch's mode that makes tensors fake.
        device: where they claim to be.

    Raises:
        ValueError: no causal language model can be built from the configuration, or an adapter does not fit it.
    """

    def __init__(self, shape: BaseShape, mode: FakeTensorMode, device: torch.device):
        self._layout = dict(shape.adapters)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real base tells
            super().__init__(_quantized(_meta_model(shape), shape.quantization_config), peft_config=_any_fresh(shape))
        self.compute_dtype = shape.compute_dtype
        _fake(self, mode, device)

    def _add_roles(self, policy: Any, reference: Any, value: Any, reward: Any, config: LoraConfig) -> None:
        for role in (Role.POLICY, Role.REFERENCE, Role.REWARD, Role.VALUE):
            adapter = self._layout.get(role)
            if isinstance(adapter, LoraConfig):
                self.adapters.add(role, fresh_config(_initialised(adapter), self.model))
            elif adapter == SHARED:
                self.adapters.share(role, Role.POLICY)
            elif role in self._layout:
                self.adapters.share(role, None)
        self.value_head = ScalarHead.zeros(self._hidden_size)
        if Role.REWARD in self._layout:
            self.reward_head = ScalarHead.zeros(self._hidden_size)

    def _check_logits(self) -> None:
        """There are no numbers to compare."""


def _any_fresh(shape: BaseShape) -> LoraConfig:
    given = next((each for each in shape.adapters.values() if isinstance(each, LoraConfig)), default_peft_config())
    return _initialised(given)


def _initialised(config: LoraConfig) -> LoraConfig:
    """The configuration with the start of fresh adapters: an adapter that is read has tensors in place of it."""
    config = deepcopy(config)
    config.init_lora_weights = True
    config.modules_to_save = None
    return config


def _meta_model(shape: BaseShape) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                deepcopy(shape.config), dtype=shape.dtype, trust_remote_code=shape.trust_remote_code
            )
    except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        kind = getattr(shape.config, "model_type", None) or type(shape.config).__name__
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"No causal language model can be built from this {kind} configuration: {text}") from error


# Quantization


def _quantized(model: PreTrainedModel, quantization_config: Any) -> PreTrainedModel:
    """The layers replaced as transformers does it, and their weights as bitsandbytes stores them."""
    if quantization_config is None:
        return model
    quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map={"": "cpu"})
    quantizer.postprocess_model(model)
    for module in model.modules():
        store = {"Linear4bit": _store_4bit, "Linear8bitLt": _store_8bit}.get(quantized_kind(module))
        if store is not None:
            store(module)
    return model


def quantized_kind(module: nn.Module) -> str:
    """The class name of one of bitsandbytes' layers, "" of other modules; PEFT's wrappers have the same names."""
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith("bitsandbytes") else ""


def _store_4bit(module: Any) -> None:
    from bitsandbytes.functional import QuantState

    given = module.weight
    shape, numbers = torch.Size([module.out_features, module.in_features]), given.numel()
    packed = torch.empty(-(-numbers // 2) // given.quant_storage.itemsize, 1, dtype=given.quant_storage)
    blocks, options = -(-numbers // _BLOCK), {"quant_type": given.quant_type, "dtype": given.dtype}
    state = QuantState(absmax=torch.empty(blocks), shape=shape, code=torch.empty(16), blocksize=_BLOCK, **options)
    if given.compress_statistics:
        second = QuantState(
            absmax=torch.empty(-(-blocks // _SECOND_BLOCK)),
            code=torch.empty(256),
            blocksize=_SECOND_BLOCK,
            dtype=torch.float32,
        )
        state.absmax, state.offset = torch.empty(blocks, dtype=torch.uint8), torch.empty(())
        state.state2, state.nested = second, True
    module.weight = type(given)(
        packed,
        quant_state=state,
        bnb_quantized=True,
        module=module,
        **{name: getattr(given, name) for name in ("compress_statistics", "quant_type", "quant_storage")},
    )
    module.quant_state = state


def _store_8bit(module: Any) -> None:
    weight = torch.empty(module.out_features, module.in_features, dtype=torch.int8)
    module.weight = type(module.weight)(weight, requires_grad=False)
    module.state.CB, module.state.SCB = weight, torch.empty(module.out_features)


# From tensors without a device to tensors that claim one


def _fake(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
    """Put fake tensors in the place of all parameters, buffers and scales; those that are shared stay so."""
    done: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made: Tensor = FakeTensor(mode, tensor.data.as_subclass(Tensor).to("meta"), device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            done[id(tensor)] = made
            if getattr(tensor, "quant_state", None) is not None:
                made.quant_state = tensor.quant_state  # type: ignore[attr-defined]
            keep.append(tensor)
        return done[id(tensor)]

    keep: list[Tensor] = []  # an id stands for a tensor as long as it is there
    for part in module.modules():
        for tensors in (cast("dict[str, Any]", part._parameters), part._buffers):
            tensors.update({name: fake(each) for name, each in tensors.items() if each is not None})
        _fake_scales(part, fake)


def _fake_scales(part: Any, fake: Callable[[Tensor], Tensor]) -> None:
    if quantized_kind(part) == "Linear8bitLt":
        part.state.CB, part.state.SCB = part.weight, fake(part.state.SCB)
        part.weight.CB = part.weight.SCB = None
    elif quantized_kind(part) == "Linear4bit":
        _fake_state(part.weight.quant_state, fake)
        part.quant_state = part.weight.quant_state


def _fake_state(state: Any, fake: Callable[[Tensor], Tensor]) -> None:
    for name, value in vars(state).items():
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            setattr(state, name, fake(value))
    if getattr(state, "state2", None) is not None:
        _fake_state(state.state2, fake)


# What bitsandbytes' kernels allocate


def gemm_4bit(
    states: Tensor,
    weight: Tensor,
    shape: Any,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """A product with a 4-bit weight: the weight is unpacked whole, but for few rows on a GPU."""
    few = math.prod(states.shape[:-1]) <= 256 and shape[1] % blocksize == 0
    if states.device.type == "cuda" and few:
        return states.new_empty(*states.shape[:-1], shape[0])
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None and absmax_offset is not None:
        absmax = ops.dequantize_blockwise(absmax_8bit, absmax, absmax_code, _SECOND_BLOCK, torch.float32)
        absmax = absmax + absmax_offset
    whole = ops.dequantize_4bit(weight, absmax, blocksize, quant_type, shape, states.dtype)
    return nn.functional.linear(states, whole, bias)


def int8_vectorwise_quant(states: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows to int8. No column is taken for an outlier: how many there are depends on the numbers."""
    outliers = states.new_empty(0, dtype=torch.int64) if threshold else None
    if states.device.type == "cuda":
        rows = states.new_empty(states.shape[0], dtype=torch.float32)
        return states.new_empty(states.shape, dtype=torch.int8), rows, outliers
    marks = states.abs() >= threshold if threshold else None
    rows = states.abs().amax(dim=1).float()
    quantized = torch.round(states * (127.0 / rows.unsqueeze(-1))).to(torch.int8)
    del marks
    return quantized, rows, outliers


def int8_linear_matmul(states: Tensor, weight: Tensor) -> Tensor:
    """int8 products summed up in int32; CPUs without the instructions for it compute in float32."""
    if states.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return torch.matmul(states.float(), weight.float().t()).to(torch.int32)
    return states.new_empty(*states.shape[:-1], weight.shape[0], dtype=torch.int32)


def int8_scaled_mm(
    states: Tensor, weight: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Any = None, dtype: Any = None
) -> Tensor:
    """The product and its scaling."""
    product = torch.ops.bitsandbytes.int8_linear_matmul(states, weight)
    if states.device.type == "cuda":
        scaled = product.new_empty(product.shape, dtype=torch.float16)
        return scaled.to(dtype or torch.float16)
    scaled = product * (row_scales.reshape(-1).unsqueeze(-1) * column_scales.reshape(-1).unsqueeze(0)) * 6.2e-05
    if bias is not None:
        scaled += bias
    return scaled.to(dtype or torch.float16)


def int8_mixed_scaled_mm(
    states: Tensor,
    quantized: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    outliers: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The product without outliers."""
    empty = states.new_empty(0)
    ops = torch.ops.bitsandbytes
    return ops.int8_scaled_mm(quantized, weight, row_scales, column_scales, bias=bias, dtype=states.dtype), empty


def index(values: Tensor, indices: list[Tensor | None]) -> Any:
    """Indexing; of a mask every place is taken for chosen."""
    masks = [each for each in indices if each is not None and each.dtype == torch.bool]
    if not masks:
        return NotImplemented
    (mask,) = masks
    return values.new_empty(mask.numel(), *values.shape[mask.dim() :])


KERNELS: dict[str, Callable[..., Any]] = {
    **{
        f"bitsandbytes::{kernel.__name__}": kernel
        for kernel in (
            gemm_4bit,
            int8_vectorwise_quant,
            int8_linear_matmul,
            int8_scaled_mm,
            int8_mixed_scaled_mm,
        )
    },
    "aten::index": index,
}
"""For :class:`~ppo_lora.live_bytes.LiveBytes` where tensors are fake."""
