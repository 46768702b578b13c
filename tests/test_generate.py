"""Generation under a role: plain sampling from that role, with the KV cache, from nobody's defaults."""

from __future__ import annotations

import pytest
import torch

from bases import KINDS, full_base, lora_config, make_base
from builders import ARCHITECTURES, EOS, PAD, padded_batch, tiny_model
from ppo_lora import Role, SharedBase

P, T = 5, 6


def _prompts(rows: int = 4):
    ids, mask = padded_batch(rows, P, T)
    return ids[:, :P], mask[:, :P]


def _greedy(base: SharedBase, role: str, ids, mask, steps: int) -> torch.Tensor:
    """The argmax of the whole forward, token by token and row by row, without cache and without padding."""
    rows = []
    for row, real in zip(ids, mask, strict=True):
        text = row[real][None]
        with base.role(role), torch.no_grad():
            for _ in range(steps):
                text = torch.cat([text, base.model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        rows.append(text[:, -steps:])
    return torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_the_argmax_of_its_role(architecture, kind):
    base = full_base(architecture, kind)
    ids, mask = _prompts()
    texts = {}
    for role in ("policy", "reference"):
        given = base.generate(ids, mask, role=role, max_new_tokens=T, do_sample=False, eos_token_id=None)
        assert torch.equal(given[:, :P], ids)
        assert torch.equal(given[:, P:], _greedy(base, role, ids, mask, T))
        texts[role] = given
    assert torch.equal(texts["policy"], base.generate(ids, mask, max_new_tokens=T, eos_token_id=None))
    assert not torch.equal(texts["policy"], texts["reference"])


def test_text_ends_at_the_stop_token_and_is_padded_after_it():
    base = full_base()
    ids, mask = _prompts()
    greedy = _greedy(base, "policy", ids, mask, T)
    stop = greedy[0, 1].item()
    given = base.generate(ids, mask, max_new_tokens=T, eos_token_id=stop)[:, P:]
    for row, free in zip(given, greedy, strict=True):
        ends = (free == stop).nonzero()
        real = int(ends[0]) + 1 if len(ends) else len(row)
        assert torch.equal(row[:real], free[: len(row)][:real]) and (row[real:] == PAD).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_cache_is_used_though_layers_are_checkpointed(architecture, kind):
    base = full_base(architecture, kind)
    base.activation_checkpointing_enable()
    base.train()
    ids, mask = _prompts()
    expected = base.generate(ids, mask, max_new_tokens=T, eos_token_id=None)
    pending = base.logprobs("policy", *padded_batch(4, P, T), T)
    widths = []
    base.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    given = base.generate(ids, mask, max_new_tokens=T, eos_token_id=None)
    assert widths == [P] + [1] * (T - 1)
    assert torch.equal(given, expected)
    pending.sum().backward()
    assert all(p.grad is not None for p in base.trainable_parameters()[Role.POLICY])


# Sampling


def _frequencies(base: SharedBase, draws: int = 4000, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token follows one prompt, and the logits behind it."""
    ids = torch.tensor([[3, 17, 41]])
    torch.manual_seed(0)
    rows = ids.expand(draws, -1)
    given = base.generate(rows, torch.ones_like(rows), do_sample=True, max_new_tokens=1, **options)[:, -1]
    with base.role(options.get("role", "policy")), torch.no_grad():
        logits = base.model(ids, use_cache=False).logits[0, -1]
    return torch.bincount(given, minlength=len(logits)) / draws, logits


def _distance(frequencies: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Total variation."""
    return 0.5 * (frequencies - probabilities).abs().sum().item()


@pytest.mark.parametrize("role", ["policy", "reference"])
@pytest.mark.parametrize("temperature", [None, 0.5, 2.0])
def test_samples_follow_the_roles_distribution(role, temperature):
    base = full_base()
    options = {} if temperature is None else {"temperature": temperature}
    frequencies, logits = _frequencies(base, role=role, **options)
    assert _distance(frequencies, torch.softmax(logits / (temperature or 1.0), dim=-1)) < 0.06
    with base.role("reference" if role == "policy" else "policy"), torch.no_grad():
        others = base.model(torch.tensor([[3, 17, 41]]), use_cache=False).logits[0, -1]
    assert _distance(frequencies, torch.softmax(others / (temperature or 1.0), dim=-1)) > 0.1


def test_samples_come_from_the_whole_vocabulary_unless_asked_otherwise():
    """transformers' own default is the 50 most likely tokens."""
    base = SharedBase(tiny_model(vocab_size=400), peft_config=lora_config())
    assert (_frequencies(base)[0] > 0).sum() > 350
    assert (_frequencies(base, top_k=3)[0] > 0).sum() == 3
    assert (_frequencies(base, top_p=0.1)[0] > 0).sum() < 60


LEAKS = dict(
    do_sample=True,
    temperature=0.01,
    top_k=1,
    top_p=0.1,
    repetition_penalty=5.0,
    no_repeat_ngram_size=1,
    suppress_tokens=[5],
    min_new_tokens=3,
    max_new_tokens=2,
    bad_words_ids=[[7]],
)


def _leaky_base() -> SharedBase:
    model = tiny_model(initializer_range=0.1)
    for name, value in LEAKS.items():
        setattr(model.generation_config, name, value)
    return SharedBase(model, peft_config=lora_config())


def test_a_checkpoints_generation_defaults_do_not_leak_in():
    base = _leaky_base()
    for name in LEAKS:
        assert not getattr(base.generation_config, name)
    assert (base.generation_config.eos_token_id, base.generation_config.pad_token_id) == (EOS, PAD)
    frequencies, logits = _frequencies(base)
    assert _distance(frequencies, torch.softmax(logits, dim=-1)) < 0.06
    ids, mask = _prompts()
    given = base.generate(ids, mask, max_new_tokens=12, eos_token_id=None)[:, P:]
    assert torch.equal(given, _greedy(base, "policy", ids, mask, 12))
    assert any(len(set(row.tolist())) < 12 for row in given), "nothing that a repetition penalty would change"


def test_stop_tokens_of_the_checkpoint_are_kept():
    model = tiny_model()
    model.generation_config.eos_token_id = [EOS, 9]
    assert SharedBase(model, peft_config=lora_config()).generation_config.eos_token_id == [EOS, 9]


# Numbers that are not finite


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_logits_that_are_not_finite_are_named(role):
    base = make_base()
    with torch.no_grad():
        base.model.model.norm.weight.fill_(float("nan"))
    ids, mask = _prompts()
    text = f"The {role}'s logits are not finite, so no token can be sampled. Its weights have diverged"
    with pytest.raises(FloatingPointError, match=text):
        base.generate(ids, mask, role=role, max_new_tokens=2, do_sample=True)
    assert base.active_role is Role.POLICY


def test_other_runtime_errors_pass():
    base = make_base()
    ids, mask = _prompts()

    def fail(*_):
        raise RuntimeError("something else")

    base.backbone.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="something else"):
        base.generate(ids, mask, max_new_tokens=2, do_sample=True)
