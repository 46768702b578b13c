"""What the benchmark runs: base, prompts and reward adapter, the same for both libraries. Imports neither of them."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

PAD, EOS, FIRST_WORD = 0, 1, 2
"""Token ids. PAD is 0 because TRL's PPO writes 0 where it finds padding: what is not 0 is real in both libraries."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LORA_RANK = 16
SHORTEST_PROMPT = 8
_HEAD_SIZE = 64
_NEVER = 1e-9
_SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class Work:
    """One workload on one base, with the settings both libraries share.

    Attributes:
        name: ``fixed`` (all responses of full length) or ``ragged`` (prompts and responses of many lengths).
        prompts: rows of an iteration.
        prompt_length: tokens of the longest prompt.
        response_length: the most new tokens.
        micro_rows: rows of a micro-batch in training.
        rollout_rows: rows of a sampling and of a scoring batch, at most.
        iterations: with the first, which is warm-up and not counted.
        value: ours only: ``separate`` or ``shared``.
        config: ours only: further options of PPOConfig.
        seed: of base, prompts and reward adapter.
        run_seed: of sampling and shuffles.
        cache: folder with bases and adapters.
    """

    name: str = "fixed"
    hidden: int = 512
    layers: int = 8
    intermediate: int = 1376
    vocab: int = 32000
    prompts: int = 8
    prompt_length: int = 32
    response_length: int = 64
    dtype: str = "float32"
    quantization: str = "none"
    device: str = "cpu"
    micro_rows: int = 8
    rollout_rows: int = 64
    epochs: int = 4
    iterations: int = 3
    value: str = "separate"
    checkpointing: bool = False
    seed: int = 0
    run_seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    cache: str = ""

    @property
    def eos_rate(self) -> float:
        """Probability of EOS at each step: lengths geometric with a mean of a quarter of the limit, or never."""
        return min(0.5, 4 / self.response_length) if self.name == "ragged" else _NEVER

    @property
    def base(self) -> Path:
        """Folder of the base: one for each shape, dtype and rate of EOS."""
        return Path(self.cache) / f"base-{_digest(self._base_settings)}"

    @property
    def reward_adapter(self) -> Path:
        """Folder of the SEQ_CLS adapter on that base."""
        return self.base / "reward"

    @property
    def _base_settings(self) -> dict[str, Any]:
        sizes = ("hidden", "layers", "intermediate", "vocab", "dtype", "seed")
        return {**{name: getattr(self, name) for name in sizes}, "eos_rate": self.eos_rate, "format": 1}

    def save(self, path: Path) -> None:
        """Write it as JSON, for a process of its own."""
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Work:
        """Read what :meth:`save` wrote."""
        return Work(**json.loads(Path(path).read_text(encoding="utf-8")))


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def prompt_ids(work: Work) -> list[list[int]]:
    """Random prompts of exactly ``prompt_length`` tokens, or of evenly spread lengths from 8 up if ragged."""
    generator = torch.Generator().manual_seed(work.seed)
    lengths = torch.full((work.prompts,), work.prompt_length)
    if work.name == "ragged":
        shortest = min(SHORTEST_PROMPT, work.prompt_length)
        spread = torch.linspace(shortest, work.prompt_length, work.prompts).round().long()
        lengths = spread[torch.randperm(work.prompts, generator=generator)]
    return [torch.randint(FIRST_WORD, work.vocab, (int(n),), generator=generator).tolist() for n in lengths]


def prompt_texts(work: Work) -> list[str]:
    """The same prompts as text; the tokenizer gives the same ids."""
    return [" ".join(f"w{token}" for token in ids) for ids in prompt_ids(work)]


def build_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words w2, w3, ... whose ids are the numbers in the words; it adds no token."""
    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{token}": token for token in range(FIRST_WORD, vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"w{FIRST_WORD}"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def build_model(work: Work) -> LlamaForCausalLM:
    """A Llama of random weights that emits EOS with the workload's rate at every step, and PAD never."""
    torch.manual_seed(work.seed)
    heads = max(1, work.hidden // _HEAD_SIZE)
    config = LlamaConfig(
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_hidden_layers=work.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(2048, work.prompt_length + work.response_length),
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    _set_eos_rate(model, work.eos_rate)
    return model.to(DTYPES[work.dtype])


@torch.no_grad()
def _set_eos_rate(model: LlamaForCausalLM, rate: float) -> None:
    """The first feature is the same at every token and no layer writes to it; only EOS and PAD read it."""
    model.model.embed_tokens.weight[:, 0] = model.config.initializer_range * math.sqrt(model.config.hidden_size)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    head = model.lm_head.weight
    head[:, 0] = 0
    head[[PAD, EOS]] = 0
    tokens = torch.randint(FIRST_WORD, model.config.vocab_size, (4, 64))
    states = model.model(tokens).last_hidden_state[:, 8:].flatten(0, 1)
    others = (states @ head[FIRST_WORD:].T).logsumexp(dim=-1)
    head[PAD, 0] = _weight_for(_NEVER, states[:, 0], others)
    head[EOS, 0] = _weight_for(rate, states[:, 0], others)


def _weight_for(rate: float, feature: torch.Tensor, others: torch.Tensor) -> float:
    """The weight with which a token of that one feature is sampled with ``rate`` on average, by bisection."""
    low, high = -1e3, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        too_often = torch.sigmoid(middle * feature - others).mean() > rate
        low, high = (low, middle) if too_often else (middle, high)
    return (low + high) / 2


def make_base(work: Work) -> bool:
    """Write base, tokenizer and reward adapter, unless they lie there already; say whether they had to be made."""
    record = work.base / _SETTINGS_FILE
    if record.is_file():
        return False
    logging.set_verbosity_error()  # a score head that is "newly initialized" is what is wanted here
    logging.disable_progress_bar()
    build_model(work).save_pretrained(work.base)
    build_tokenizer(work.vocab).save_pretrained(work.base)
    make_reward_adapter(work)
    record.write_text(json.dumps(work._base_settings, indent=2), encoding="utf-8")
    return True


def make_reward_adapter(work: Work) -> None:
    """Write a SEQ_CLS adapter of random weights, as PEFT writes it, on the workload's base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(work.seed + 1)
    model = AutoModelForSequenceClassification.from_pretrained(work.base, num_labels=1, dtype=DTYPES[work.dtype])
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", modules_to_save=["score"], **lora_options()))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(work.reward_adapter)


def lora_options() -> dict[str, Any]:
    """Rank 16 on every linear layer, for all adapters of both libraries."""
    return {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "target_modules": "all-linear", "lora_dropout": 0.0}


def model_options(work: Work, quantized: bool = True) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``: dtype, quantization and device."""
    options: dict[str, Any] = {"dtype": DTYPES[work.dtype]}
    if quantized and work.quantization != "none":
        options["quantization_config"] = _quantization(work)
    if work.device == "cuda":
        options["device_map"] = {"": 0}
    return options


def _quantization(work: Work) -> Any:
    from transformers import BitsAndBytesConfig

    if work.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[work.dtype],
    )
