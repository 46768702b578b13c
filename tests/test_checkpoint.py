"""What a saved folder holds, and what is refused when it is read back."""

from __future__ import annotations

import json

import pytest
import torch

from builders import nf4_config, padded_batch, randomize, save_tiny_model, tiny_model
from ppo_lora import SharedBase
from ppo_lora.checkpoint import load_roles, save_roles

SCHEDULE = {"steps_per_iteration": 4, "batch_size": 16}


@pytest.fixture
def base():
    made = SharedBase(tiny_model())
    for parameters in made.trainable_parameters().values():
        randomize(parameters)
    return made


def test_both_roles_come_back_bit_for_bit(tmp_path, base):
    save_roles(tmp_path, base, SCHEDULE)
    again = SharedBase(tiny_model())
    load_roles(tmp_path, again, SCHEDULE)
    ids, mask = padded_batch()
    assert torch.equal(again.logprobs("policy", ids, mask, 6), base.logprobs("policy", ids, mask, 6))
    assert torch.equal(again.values(ids, mask, 6), base.values(ids, mask, 6))


def test_the_manifest_says_what_the_roles_stand_on(tmp_path):
    folder = save_tiny_model(tmp_path / "base")
    base = SharedBase.from_pretrained(folder, quantization_config=nf4_config(), value="shared")
    save_roles(tmp_path / "run", base, SCHEDULE)
    manifest = json.loads((tmp_path / "run" / "ppo_lora.json").read_text())
    assert manifest["base"]["name"] == folder and manifest["schedule"] == SCHEDULE
    assert manifest["base"]["quantization"] == "nf4" and manifest["base"]["vocab_size"] == 50
    shared = {"source": "the policy's", "revision": None, "sha256": None}
    assert manifest["roles"] == {"policy": None, "reference": None, "value": shared}
    assert {"torch", "peft", "ppo_lora"} <= set(manifest["versions"])


def test_iterations_of_another_size_are_refused_before_anything_is_read(tmp_path, base):
    save_roles(tmp_path, base, SCHEDULE)
    again = SharedBase(tiny_model())
    before = {name: p.detach().clone() for name, p in again.named_parameters()}
    with pytest.raises(ValueError, match="made with .*16.* this run has .*32"):
        load_roles(tmp_path, again, {**SCHEDULE, "batch_size": 32})
    assert all(torch.equal(p, before[name]) for name, p in again.named_parameters())


def test_an_adapter_is_no_checkpoint(tmp_path, base):
    save_roles(tmp_path, base, SCHEDULE, value=False)
    with pytest.raises(ValueError, match=rf"resume_from_checkpoint is '{tmp_path}', which has no folder value/.*save"):
        load_roles(tmp_path, base, SCHEDULE)


def test_a_folder_that_is_none_is_refused(tmp_path, base):
    with pytest.raises(ValueError, match="resume_from_checkpoint is ''; expected a checkpoint folder"):
        load_roles("", base, SCHEDULE)
    with pytest.raises(ValueError, match="expected a checkpoint folder"):
        load_roles(tmp_path / "nothing", base, SCHEDULE)
