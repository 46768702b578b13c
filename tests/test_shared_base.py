"""What the roles compute: against plain models, for any batch, in any dtype, and within which memory."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from bases import (
    KINDS,
    assert_close,
    flat,
    full_base,
    lora_config,
    make_base,
    model_folder,
    plain_model,
    policy_adapter,
)
from builders import ARCHITECTURES, EOS, PAD, VOCABULARY, padded_batch, randomize, tiny_model
from ppo_lora import Role, SharedBase, default_peft_config
from ppo_lora.rows import compact_rows

P, T = 5, 6
FURTHER = {
    "opt": dict(
        hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64, init_std=0.1
    ),
    "mpt": dict(d_model=64, n_layers=2, n_heads=4, initializer_range=0.1),
    "bloom": dict(hidden_size=64, n_layer=2, n_head=4, initializer_range=0.1),
    "gemma2": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
        final_logit_softcapping=2.0,
        initializer_range=0.1,
    ),
    "granite": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=3.0,
        initializer_range=0.1,
    ),
    "cohere": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.3,
        initializer_range=0.1,
    ),
}
"""Architectures with functional dropout, without positions, or that change their logits after the head."""


def _rows(ids, mask):
    """Each row's index, its real tokens alone, and where its response starts among them."""
    for i, (row, real) in enumerate(zip(ids, mask, strict=True)):
        yield i, row[real][None], int(real[:P].sum())


def _expected_logprobs(model, ids, mask, temperature: float = 1.0) -> torch.Tensor:
    """One row at a time and without padding, from a whole model's logits."""
    expected = torch.zeros(len(ids), T)
    for i, row, start in _rows(ids, mask):
        with torch.no_grad():
            logits = model(row).logits[0].float()
        for t in range(start, row.shape[1]):
            expected[i, t - start] = torch.log_softmax(logits[t - 1] / temperature, dim=-1)[row[0, t]]
    return expected


# Against plain models


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_the_plain_model(architecture, kind):
    ids, mask = padded_batch()
    base = full_base(architecture, kind, reference=None, policy=None)
    plain = plain_model(architecture, kind)
    for temperature in (1.0, 0.7):
        given = base.logprobs("reference", ids, mask, T, temperature)
        assert given.shape == (4, T) and given.dtype == torch.float32
        assert_close(given, _expected_logprobs(plain, ids, mask, temperature))
    adapted = PeftModel.from_pretrained(plain, policy_adapter(architecture)).eval()
    started = make_base(architecture, kind, policy=policy_adapter(architecture))
    expected = _expected_logprobs(adapted, ids, mask, 0.7)
    for role in ("policy", "reference"):
        assert_close(started.logprobs(role, ids, mask, T, 0.7).detach(), expected)
        assert_close(started.logprobs(role, ids, mask.long(), T, 0.7).detach(), expected)


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_logprobs_are_those_of_the_plain_model_on_other_quantizations(kind):
    ids, mask = padded_batch()
    given = make_base(kind=kind).logprobs("policy", ids, mask, T).detach()
    assert_close(given, _expected_logprobs(plain_model(kind=kind), ids, mask), 1e-4 if kind == "int8" else 1e-5)


@pytest.mark.parametrize("architecture", FURTHER)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_logprobs_of_further_architectures(architecture):
    ids, mask = padded_batch()
    config = AutoConfig.for_model(architecture, vocab_size=VOCABULARY, pad_token_id=PAD, **FURTHER[architecture])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = _expected_logprobs(model, ids, mask)
    base = SharedBase(model, peft_config=lora_config())
    first = base.logprobs("policy", ids, mask, T)
    assert_close(first.detach(), expected)
    base.train()
    base.activation_checkpointing_enable()
    assert torch.equal(base.logprobs("policy", ids, mask, T), first)
    first.sum().backward()
    assert flat(p.grad for p in base.trainable_parameters()[Role.POLICY]).norm() > 0


def test_logits_that_are_changed_in_an_unknown_way_are_refused():
    class DoubledLogits(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model = DoubledLogits.from_pretrained(model_folder())
    with pytest.raises(ValueError, match="DoubledLogits changes its logits in a way that ppo_lora does not know"):
        SharedBase(model, peft_config=lora_config())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_are_read_before_each_token(architecture, kind):
    """values[:, t] sees the tokens before response token t and no later one."""
    ids, mask = padded_batch()
    base = full_base(architecture, kind)
    given = base.values(ids, mask, T).detach()
    assert given.shape == (4, T) and given.dtype == torch.float32
    head = base.value_head.weight[0].detach()
    for i, row, start in _rows(ids, mask):
        with base.role("value"), torch.no_grad():
            states = base.model(row, output_hidden_states=True).hidden_states[-1][0]
        expected = torch.zeros(T)
        for t in range(start, row.shape[1]):
            expected[t - start] = states[t - 1] @ head
        assert_close(given[i], expected)


def test_a_token_changes_later_values_only():
    base = full_base()
    ids, mask = torch.randint(3, 50, (1, P + T)), torch.ones(1, P + T, dtype=torch.bool)
    before = base.values(ids, mask, T)[0]
    for t in range(T):
        changed = ids.clone()
        changed[0, P + t] = 3 + (changed[0, P + t] - 2) % 47
        differs = base.values(changed, mask, T)[0] != before
        assert differs.tolist() == [False] * (t + 1) + [True] * (T - t - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_read_at_the_last_real_token(architecture, kind):
    ids, mask = padded_batch()
    base = full_base(architecture, kind)
    head = base.reward_head.weight[0]
    given = base.scores(ids, mask)
    assert given.shape == (4,) and given.dtype == torch.float32
    for i, row, _ in _rows(ids, mask):
        with base.role("reward"), torch.no_grad():
            state = base.model(row, output_hidden_states=True).hidden_states[-1][0, -1]
        assert_close(given[i], state @ head)


def test_a_pad_id_inside_a_response_is_a_token_like_any_other():
    base = full_base()
    ids, mask = torch.randint(3, 50, (2, P + T)), torch.ones(2, P + T, dtype=torch.bool)
    ids[:, P + 2], ids[:, -1], ids[0, 1] = PAD, PAD, EOS
    expected = _expected_logprobs(plain_model(), ids, mask)
    reference = make_base()
    assert_close(reference.logprobs("reference", ids, mask, T), expected)
    assert (base.values(ids, mask, T) != 0).all()
    assert_close(base.scores(ids, mask)[0], base.scores(pad(ids, (0, 2)), pad(mask, (0, 2)))[0])
    assert (base.scores(ids, mask) - base.scores(ids[:, :-1], mask[:, :-1])).abs().min() > 1e-3


def test_padding_gets_zeros():
    base = full_base()
    ids, mask = padded_batch()
    real = mask[:, -T:]
    logprobs, entropy = base("policy", compact_rows(ids, mask, T))
    for given in (logprobs, entropy, base("value", compact_rows(ids, mask, T))):
        assert torch.equal(given != 0, real)


def test_one_entry_for_every_differentiable_pass():
    base = full_base()
    ids, mask = padded_batch()
    assert torch.equal(base("value", compact_rows(ids, mask, T)), base.values(ids, mask, T))
    assert torch.equal(base(Role.VALUE, compact_rows(ids, mask, T)), base.values(ids, mask, T))
    logprobs, entropy = base("policy", compact_rows(ids, mask, T), temperature=0.5)
    assert torch.equal(logprobs, base.logprobs("policy", ids, mask, T, 0.5))
    assert torch.equal(entropy, base.logprobs_and_entropy("policy", ids, mask, T, 0.5)[1])
    with torch.no_grad():
        logits = base.model(ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    distribution = torch.distributions.Categorical(logits=logits[:, P - 1 : -1] / 0.5)
    assert_close(entropy, torch.where(mask[:, -T:], distribution.entropy(), 0.0))


# Batches and padding (invariant 4)


def _everything(base: SharedBase, ids, mask, response_length: int = T) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            "policy": base.logprobs("policy", ids, mask, response_length),
            "reference": base.logprobs("reference", ids, mask, response_length),
            "values": base.values(ids, mask, response_length),
            "scores": base.scores(ids, mask)[:, None],
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_depends_on_the_batch_size(architecture, kind):
    base = full_base(architecture, kind)
    ids, mask = padded_batch(rows=5)
    together = _everything(base, ids, mask)
    for size in (1, 2):
        parts = [_everything(base, ids[rows], mask[rows]) for rows in torch.arange(5).split(size)]
        for name, expected in together.items():
            assert_close(torch.cat([part[name] for part in parts]), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_depends_on_padding(architecture, kind):
    base = full_base(architecture, kind)
    ids, mask = padded_batch()
    expected = _everything(base, ids, mask)
    for left, right in ((3, 0), (0, 4), (2, 5)):
        wider = pad(ids, (left, right), value=PAD), pad(mask, (left, right), value=False)
        for name, given in _everything(base, *wider, T + right).items():
            assert_close(given[:, :T], expected[name])
    for filler in (7, 49):
        for name, given in _everything(base, torch.where(mask, ids, filler), mask).items():
            assert_close(given, expected[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_take_padding_on_either_side(kind, side):
    base = full_base(kind=kind)
    lengths = (3, 8, 1, 5)
    rows = [torch.randint(3, 50, (1, length)) for length in lengths]
    expected = torch.cat([base.scores(row, torch.ones_like(row)) for row in rows])
    widths = [(8 - length, 0) if side == "left" else (0, 8 - length) for length in lengths]
    ids = torch.cat([pad(row, width, value=PAD) for row, width in zip(rows, widths, strict=True)])
    mask = torch.cat([pad(torch.ones_like(row), width) for row, width in zip(rows, widths, strict=True)])
    assert_close(base.scores(ids, mask), expected)
    assert_close(base.scores(ids, mask.bool()), expected)
    assert expected.std() > 0.01


# Building


def test_from_pretrained_passes_model_options_on():
    base = SharedBase.from_pretrained(model_folder(), dtype=torch.bfloat16, attn_implementation="eager")
    assert base.model.dtype == torch.bfloat16 and base.config._attn_implementation == "eager"
    assert base.quantization_method is None and base.device.type == "cpu"
    assert make_base(kind="nf4").quantization_method is not None


def test_the_default_adapter_is_rank_16_on_all_linear_layers_but_the_head():
    base = SharedBase(tiny_model())
    config = default_peft_config()
    assert (config.r, config.lora_alpha, config.target_modules) == (16, 32, "all-linear")
    shapes = {tuple(p.shape) for p in base.trainable_parameters()[Role.POLICY]}
    assert len(base.trainable_parameters()[Role.POLICY]) == 2 * 2 * 7
    assert shapes == {(16, 64), (64, 16), (32, 16), (128, 16), (16, 128)}


def test_randomized_roles_differ():
    """The tests above would prove nothing with roles that are alike."""
    base = full_base()
    ids, mask = padded_batch()
    everything = _everything(base, ids, mask)
    assert (everything["policy"] - everything["reference"]).abs().max() > 0.1
    with torch.no_grad():
        base.value_head.load_state_dict(base.reward_head.state_dict())
        last = base.values(pad(ids, (0, 1)), pad(mask, (0, 1), value=True), 1)[:, 0]
    randomize(base.trainable_parameters()[Role.VALUE], seed=9)
    assert (last - everything["scores"][:, 0]).abs().max() > 0.01
