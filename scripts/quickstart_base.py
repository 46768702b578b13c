"""The quickstart's base model: a word tokenizer and a tiny Llama, trained from scratch and quantized to NF4."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from quickstart_data import base_corpus, vocabulary

SPECIAL_TOKENS = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
SETTINGS_FILE = "quickstart_base.json"


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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer over the reviews' words, with distinct pad, bos and eos tokens."""
    words = [*SPECIAL_TOKENS.values(), *vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", words.index("<bos>"))]
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


def pack_corpus(settings: BaseSettings, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the corpus as token ids [blocks, block_tokens], texts one after the other, each closed with EOS."""
    texts = [f"{text} {tokenizer.eos_token}" for text in base_corpus(settings.texts, settings.seed)]
    ids = torch.tensor([token for row in tokenizer(texts)["input_ids"] for token in row])
    blocks = len(ids) // settings.block_tokens
    return ids[: blocks * settings.block_tokens].view(blocks, settings.block_tokens)


def train_model(model: LlamaForCausalLM, blocks: torch.Tensor, settings: BaseSettings) -> float:
    """Train `model` in place on next-token prediction and return the last loss, in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, settings.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(settings.seed)
    model.train()
    for _ in range(settings.steps):
        rows = torch.randint(len(blocks), (settings.batch_size,), generator=generator)
        loss = model(input_ids=blocks[rows], labels=blocks[rows]).loss
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


def make_base(folder: Path, settings: BaseSettings) -> float:
    """Train the base and write it to `folder/float32` and `folder/nf4`; return the last training loss."""
    (folder / SETTINGS_FILE).unlink(missing_ok=True)
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer)
    loss = train_model(model, pack_corpus(settings, tokenizer), settings)
    model.save_pretrained(folder / "float32")
    tokenizer.save_pretrained(folder / "float32")
    quantize(folder / "float32", folder / "nf4")
    (folder / SETTINGS_FILE).write_text(json.dumps(asdict(settings), indent=2), encoding="utf-8")
    return loss
