"""The quantized bases of scripts/benchmark_gpu.py: random weights in real shapes, written once, layer by layer.

`python benchmark_gpu_base.py WORK.json` writes the base and its reward adapter. It knows nothing of ppo_lora and TRL.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils import logging

from benchmark_measure import PeakMemory
from benchmark_operations import Shape
from benchmark_work import DTYPES, EOS, FIRST_WORD, LORA_RANK, PAD, Work, _digest, _weight_for, lora_options

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architecture": "llama",
        "hidden": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "intermediate": 14336,
        "vocab": 128256,
    },
    "qwen2.5-1.5b": {
        "architecture": "qwen2",
        "hidden": 1536,
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
        "intermediate": 8960,
        "vocab": 151936,
        "tied": True,
    },
}
TINY = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocab": 300}
"""In place of a shape's own sizes, for a trial on the CPU."""

_STD = 0.02
_NEVER = 1e-9
_RECORD = "settings.json"
_INDEX = "model.safetensors.index.json"
_TO_RESIDUAL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class GpuWork(Work):
    """A workload on an NF4 base of another architecture; see Work.

    Attributes:
        architecture: transformers' ``model_type``.
        heads, kv_heads: of attention.
        tied: whether the output head is the embedding.
    """

    architecture: str = "llama"
    heads: int = 32
    kv_heads: int = 8
    tied: bool = False

    @property
    def shape(self) -> Shape:
        """For the arithmetic."""
        kv_width = self.hidden // self.heads * self.kv_heads
        return Shape(self.hidden, self.intermediate, self.layers, self.vocab, LORA_RANK, kv_width)

    @property
    def _base_settings(self) -> dict[str, Any]:
        sizes = ("architecture", "hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "tied", "dtype")
        return {**{name: getattr(self, name) for name in (*sizes, "seed")}, "quantization": "nf4", "format": 1}

    @property
    def base(self) -> Path:
        """Folder of the base; how often EOS comes is set when it is loaded."""
        return Path(self.cache) / f"gpu-base-{_digest(self._base_settings)}"

    @staticmethod
    def load(path: str | Path) -> GpuWork:
        """Read what :meth:`save` wrote."""
        return GpuWork(**json.loads(Path(path).read_text(encoding="utf-8")))


# Writing


def base_config(work: GpuWork) -> Any:
    """The configuration of the base, not quantized."""
    return AutoConfig.for_model(
        work.architecture,
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        max_position_embeddings=8192,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=work.tied,
        dtype=work.dtype,
    )


def quantization(work: GpuWork) -> BitsAndBytesConfig:
    """NF4 with quantized scales."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[work.dtype],
    )


def is_made(work: GpuWork) -> bool:
    """Whether base and reward adapter lie there, whole."""
    return (work.base / _RECORD).is_file()


def make_base(work: GpuWork) -> bool:
    """Write base and reward adapter, unless they lie there already; say whether they had to be made.

    The weights of one layer at a time are drawn and quantized on the device: nothing holds the base in another form
    than it has on the disk.
    """
    if is_made(work):
        return False
    shutil.rmtree(work.base, ignore_errors=True)  # of a run that was stopped
    work.base.mkdir(parents=True)
    torch.manual_seed(work.seed)
    config = base_config(work)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[work.dtype])
    model.tie_weights()  # transformers 5.0 does not, on this device
    _write_shards(work, model)
    config.architectures = [type(model).__name__]
    config.quantization_config = quantization(work).to_dict()
    config.save_pretrained(work.base)
    write_reward_adapter(work, model)
    (work.base / _RECORD).write_text(json.dumps(work._base_settings, indent=2), encoding="utf-8")
    return True


def _write_shards(work: GpuWork, model: PreTrainedModel) -> None:
    linears, weight_map, size = _linears(model), {}, 0
    for number, names in enumerate(_by_layer(model)):
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= _tensors(work, model, name, linears)
        file = f"model-{number:05d}.safetensors"
        tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        save_file(tensors, work.base / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (work.base / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """What is quantized and adapted: all linear layers but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head}


def _by_layer(model: nn.Module) -> Iterator[list[str]]:
    """Names of parameters: what is in no layer, then those of each layer."""
    names: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():  # tied weights once
        before, found, rest = name.partition(".layers.")
        names.setdefault(f"{before}{rest.partition('.')[0]}" if found else "", []).append(name)
    yield from names.values()


def _tensors(work: GpuWork, model: nn.Module, name: str, linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """A parameter as it lies in the checkpoint: of a quantized weight its scales too."""
    weight = _random(work, name, model.get_parameter(name).shape)
    if name.removesuffix(".weight") not in linears:
        return {name: weight}
    packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    return {name: packed, **{f"{name}.{part}": each for part, each in state.as_dict(packed=True).items()}}


def _random(work: GpuWork, name: str, shape: torch.Size) -> Tensor:
    """Random numbers; ones for norms, none for biases.

    The first feature is the same at every token and no layer writes to it, so that EOS can read it.
    """
    options: dict[str, Any] = {"device": work.device, "dtype": DTYPES[work.dtype]}
    if len(shape) == 1:
        return torch.zeros(shape, **options) if name.endswith("bias") else torch.ones(shape, **options)
    to_residual = name.removesuffix(".weight").endswith(_TO_RESIDUAL)
    weight = torch.randn(shape, **options).mul_(_STD / math.sqrt(2 * work.layers) if to_residual else _STD)
    if to_residual:
        weight[0] = 0
    if "embed" in name:
        weight[:, 0] = _STD * math.sqrt(work.hidden)
    return weight


def write_reward_adapter(work: GpuWork, model: nn.Module) -> None:
    """A SEQ_CLS adapter of random weights in PEFT's files."""
    linears, options = _linears(model), lora_options()
    names = sorted({name.rpartition(".")[2] for name in linears})
    config = LoraConfig(**{**options, "target_modules": names}, task_type="SEQ_CLS", modules_to_save=["score"])
    config.base_model_name_or_path, config.inference_mode = str(work.base), True
    config.save_pretrained(work.reward_adapter)
    tensors = {"base_model.model.score.weight": torch.randn(1, work.hidden) * _STD}
    for name, linear in linears.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(LORA_RANK, linear.in_features) / math.sqrt(linear.in_features)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(linear.out_features, LORA_RANK) * 0.01
    save_file(tensors, work.reward_adapter / "adapter_model.safetensors", {"format": "pt"})


# Reading


class Memory:
    """The peak since it was made or read, in GiB: what the allocator had given out, the resident set on the CPU."""

    def __init__(self, device: str):
        if device == "cuda":
            torch.cuda.init()  # there are no statistics to reset before
        self._device = device
        self._peak = PeakMemory(device)

    def read(self) -> float:
        """The peak; from now on a new one is looked for."""
        peak = (self._peak.before + self._peak.read() * 2**20) / 2**30
        self._peak = PeakMemory(self._device)
        return peak


def load_options(work: GpuWork) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``; the quantization is the checkpoint's own."""
    place = {"device_map": {"": 0}} if work.device == "cuda" else {}
    return {"dtype": DTYPES[work.dtype], "use_safetensors": True, **place}


def load_model(work: GpuWork) -> PreTrainedModel:
    """The base as a plain causal language model that ends responses with the workload's rate."""
    model = AutoModelForCausalLM.from_pretrained(work.base, **load_options(work)).eval()
    set_eos_rate(model, work.eos_rate)
    return model


@torch.no_grad()
def set_eos_rate(model: PreTrainedModel, rate: float) -> None:
    """Let EOS come with this probability at each step, on average, and PAD never: only they read the first feature."""
    head = model.get_output_embeddings().weight
    if head is not model.get_input_embeddings().weight:
        head[:, 0] = 0
    head[[PAD, EOS]] = 0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(FIRST_WORD, len(head), (4, 64), generator=generator).to(head.device)
    states = model.base_model(tokens, use_cache=False).last_hidden_state[:, 8:].flatten(0, 1)
    others = (states @ head[FIRST_WORD:].T).float().logsumexp(dim=-1)
    feature = states[:, 0].float()
    head[PAD, 0], head[EOS, 0] = (_weight_for(each, feature, others) for each in (_NEVER, rate))


def main(work_file: str) -> None:
    """Make the base that `work_file` wants."""
    logging.set_verbosity_error()
    make_base(GpuWork.load(work_file))


if __name__ == "__main__":
    main(*sys.argv[1:])
