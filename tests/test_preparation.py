"""Which bases and adapter configurations are refused, and what is taken out of a base."""

from __future__ import annotations

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from bases import KINDS, full_base, lora_config, make_base, model_folder, plain_model, policy_adapter
from builders import ARCHITECTURES, padded_batch, randomize, tiny_model
from ppo_lora import Role, SharedBase
from ppo_lora.adapters import write_adapter

T = 6


# The base


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_a_base_without_an_output_head_is_refused(auto):
    model = (
        plain_model(auto=auto)
        if auto is AutoModelForSequenceClassification
        else AutoModel.from_pretrained(model_folder())
    )
    with pytest.raises(TypeError, match=f"The base is a {type(model).__name__}; expected a transformers causal"):
        SharedBase(model)


def test_a_base_that_is_no_transformers_model_is_refused():
    with pytest.raises(TypeError, match="The base is a Linear; expected a transformers causal"):
        SharedBase(nn.Linear(3, 3))


def test_a_base_that_already_has_adapters_is_refused():
    adapted = get_peft_model(plain_model(), lora_config())
    with pytest.raises(ValueError, match="already has adapters in it. Pass the plain model, and the adapters by role"):
        SharedBase(adapted.base_model.model)
    with pytest.raises((TypeError, ValueError), match="is a PeftModel.*policy_adapter=folder"):
        SharedBase(adapted)
    with pytest.raises(ValueError, match="already has adapters"):
        SharedBase(make_base().model)


# Configurations of fresh adapters


def test_another_kind_of_adapter_is_refused():
    with pytest.raises(TypeError, match="peft_config is a IA3Config; expected a LoraConfig"):
        make_base(peft_config=IA3Config(task_type="CAUSAL_LM"))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "eva", "loftq", False])
def test_adapters_that_start_away_from_the_base_are_refused(init):
    config = lora_config()
    config.init_lora_weights = init
    with pytest.raises(
        ValueError, match=f"init_lora_weights is {init!r}, which starts away from the base or rewrites"
    ):
        make_base(peft_config=config)


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("role", ["policy", "reference", "value"])
def test_saved_adapters_that_rewrite_the_base_on_loading_do_not(tmp_path, init, role):
    """PEFT replaces the base's weights by their residual when it meets such a configuration; four roles share them."""
    made = full_base().adapter("policy" if role != "value" else "value")
    made.config.init_lora_weights = init
    write_adapter(tmp_path, made)
    plain = plain_model()
    weights = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    try:
        base = SharedBase(plain, **{role: tmp_path}, peft_config=lora_config())
    except ValueError as error:
        assert "init_lora_weights" in str(error)
        return
    state = base.model.state_dict()
    for name, tensor in weights.items():
        wrapped = name.replace(".weight", ".base_layer.weight")
        assert torch.equal(state[wrapped if wrapped in state else name], tensor), name


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["norm"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [None, "shared"])
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_adapters_that_change_what_the_roles_share_are_refused(changes, value):
    text = (
        "modules_to_save=.*they would be trained whole" if "modules_to_save" in changes else "changes the output head"
    )
    with pytest.raises(ValueError, match=text):
        make_base(peft_config=lora_config(**changes), value=value)


def _assert_reference_stays(base: SharedBase) -> None:
    ids, mask = padded_batch()
    reference = base.logprobs("reference", ids, mask, T)
    assert torch.equal(base.logprobs("policy", ids, mask, T).detach(), reference)
    with torch.no_grad():
        for seed, p in enumerate(p for p in base.parameters() if p.requires_grad):
            randomize([p], seed, scale=0.2)
    assert torch.equal(base.logprobs("reference", ids, mask, T), reference)
    assert (base.logprobs("policy", ids, mask, T) - reference).abs().max() > 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {"trainable_token_indices": [3, 4]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"lora_bias": True},
        {"layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed but the targeted layer of type Linear has no bias")
def test_configurations_are_refused_or_keep_the_roles_apart(architecture, changes):
    """Whatever PEFT offers: a ValueError that says why, or a reference that the policy does not move."""
    if "target_modules" not in changes:
        changes = {"target_modules": ["q_proj", "v_proj", "down_proj"], **changes}
    model = tiny_model(architecture, initializer_range=0.1)
    try:
        base = SharedBase(model, peft_config=lora_config(**changes))
    except ValueError as error:
        assert any(name in str(error) for name in ("trainable_token", "embed_tokens", "output head"))
        return
    _assert_reference_stays(base)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("value", [None, "shared"])
def test_biases_are_refused(bias, value):
    """They are the base's own parameters, and every role has the same."""
    with pytest.raises(ValueError, match="bias"):
        make_base("qwen2", peft_config=lora_config(bias=bias), value=value)


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_a_saved_adapter_with_biases_does_not_change_the_base(tmp_path, role):
    """LoRA's `bias` puts the base's own biases into the adapter file, and loading writes them back into the base."""
    model = get_peft_model(plain_model("qwen2"), lora_config(bias="all"))
    randomize([p for p in model.parameters() if p.requires_grad], scale=0.3)
    model.save_pretrained(tmp_path)
    plain = plain_model("qwen2")
    biases = {name: tensor.clone() for name, tensor in plain.state_dict().items() if name.endswith("bias")}
    assert biases
    try:
        base = SharedBase(plain, **{role: tmp_path}, peft_config=lora_config())
    except ValueError as error:
        assert "bias" in str(error)
        return
    state = base.model.state_dict()
    for name, tensor in biases.items():
        assert torch.equal(state[name.replace(".bias", ".base_layer.bias")], tensor), name


def test_without_target_modules_all_linear_layers_are_meant():
    base = make_base(peft_config=LoraConfig(r=2))
    assert len(base.trainable_parameters()[Role.POLICY]) == 2 * 2 * 7


def test_the_given_configuration_is_not_changed():
    config = lora_config(modules_to_save=["score"], task_type="SEQ_CLS", inference_mode=True)
    before = config.to_dict()
    make_base(peft_config=config)
    assert config.to_dict() == before


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`")
def test_the_default_configuration_fits_every_architecture(architecture):
    _assert_reference_stays(SharedBase(tiny_model(architecture, initializer_range=0.1)))


# What is taken out of a base


@pytest.mark.parametrize("kind", KINDS)
def test_no_dropout_probability_is_left(kind):
    base = make_base("gpt2", kind, peft_config=lora_config("gpt2", lora_dropout=0.3))
    assert {m.p for m in base.model.modules() if isinstance(m, nn.Dropout)} <= {0.0, 0.3}
    assert not any(m.training for m in base.modules() if isinstance(m, nn.Dropout))
    assert not any(m.p for name, m in base.model.named_modules() if isinstance(m, nn.Dropout) and "lora" not in name)


def test_functional_dropout_is_taken_out_too():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "opt", vocab_size=50, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, dropout=0.5,
        attention_dropout=0.5, layerdrop=0.5, word_embed_proj_dim=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    base = SharedBase(model, peft_config=lora_config())
    base.model.train()
    ids = torch.randint(3, 50, (2, 8))
    assert torch.equal(base.model(ids).logits, base.model(ids).logits)


def test_the_base_is_frozen_and_in_evaluation_mode():
    model = tiny_model().train()
    assert all(p.requires_grad for p in model.parameters())
    base = SharedBase(model, peft_config=lora_config())
    assert not any(p.requires_grad for name, p in base.model.named_parameters() if "lora_" not in name)
    assert not any(module.training for module in base.modules())


def test_all_roles_live_in_one_copy_of_the_base():
    model = tiny_model()
    pointers = {p.data_ptr() for p in model.parameters()}
    base = SharedBase(model, policy=policy_adapter(), peft_config=lora_config())
    others = [(n, p) for n, p in base.named_parameters() if "lora_" not in n and not n.startswith("value_head")]
    assert {p.data_ptr() for _, p in others} == pointers and len(others) == len(pointers)
