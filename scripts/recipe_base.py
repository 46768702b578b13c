"""Base models of the small recipes: a tiny Llama, trained from scratch on a recipe's texts and quantized to NF4."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, processors
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class BaseSettings:
    """What the base depends on; a saved base is used again when all of it is the same."""

    seed: int = 0
    texts: int = 8192
    steps: int = 500
    batch_size: int = 32
    block_tokens: int = 64
    learning_rate: float = 5e-3
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4


def word_tokenizer(
    words: Iterable[str], pre_tokenizer: PreTokenizer, decoder: Decoder | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word and distinct pad, bos and eos tokens, which puts BOS before each text.

    Args:
        words: all that texts can hold.
        pre_tokenizer: cuts a text into words.
        decoder: puts words together again; with spaces between them if None.
    """
    known = [*SPECIAL_TOKENS.values(), *words]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", known.index("<bos>"))]
    )
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **SPECIAL_TOKENS)


def build_model(settings: BaseSettings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama of the settings' size, float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train_model(model: LlamaForCausalLM, blocks: torch.Tensor, labels: torch.Tensor, settings: BaseSettings) -> float:
    """Train `model` in place on next-token prediction and return the last loss, in nats a token.

    Args:
        model: changed in place.
        blocks: [N, block_tokens] int64, what it reads.
        labels: the same, and -100 where nothing is learnt.
        settings: of the training.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, settings.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(settings.seed)
    model.train()
    for _ in range(settings.steps):
        rows = torch.randint(len(blocks), (settings.batch_size,), generator=generator)
        loss = model(input_ids=blocks[rows], labels=labels[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    return loss.item()


def quantize(source: Path, target: Path) -> None:
    """Write the NF4 form of the model in `source` to `target`, with its tokenizer."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=quantization)
    model.save_pretrained(target)
    PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(target)


def is_made(folder: Path, settings: BaseSettings) -> bool:
    """Say whether `folder` holds a finished base made with these settings."""
    record = folder / SETTINGS_FILE
    return record.is_file() and json.loads(record.read_text(encoding="utf-8")) == asdict(settings)


def make_base(
    folder: Path,
    settings: BaseSettings,
    tokenizer: PreTrainedTokenizerFast,
    blocks: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Train a base, write it to `folder/float32` and `folder/nf4`, and return what `train_model` returns."""
    (folder / SETTINGS_FILE).unlink(missing_ok=True)
    torch.manual_seed(settings.seed)
    model = build_model(settings, tokenizer)
    loss = train_model(model, blocks, labels, settings)
    model.save_pretrained(folder / "float32")
    tokenizer.save_pretrained(folder / "float32")
    quantize(folder / "float32", folder / "nf4")
    (folder / SETTINGS_FILE).write_text(json.dumps(asdict(settings), indent=2), encoding="utf-8")
    return loss
