"""What a run leaves on disk, how others load it, and how it is resumed or pushed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from builders import prompts, save_tiny_model, tiny_model
from ppo_lora import PPOTrainer, Role, SharedBase, StartupError, read_adapter
from runs import logged, trainer


def test_the_saved_policy_is_plain_peft(tmp_path):
    folder = save_tiny_model(tmp_path / "base")
    made = trainer(tmp_path / "run", AutoModelForCausalLM.from_pretrained(folder))
    made.train()
    made.save_model()
    ids = torch.tensor([[2, 9, 4, 8]])
    with torch.no_grad(), made.base.role(Role.POLICY):
        expected = made.base.model(ids).logits
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), made.args.output_dir)
    automatic = AutoPeftModelForCausalLM.from_pretrained(made.args.output_dir)
    for loaded in (plain, automatic):
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=0)
    manifest = json.loads((tmp_path / "run" / "ppo_lora.json").read_text())
    assert manifest["base"]["name"] == folder and set(manifest["roles"]) == {"policy", "reference", "value"}


def test_the_saved_value_role_comes_back_bit_for_bit(tmp_path):
    made = trainer(tmp_path)
    made.train()
    made.save_model()
    again = SharedBase(tiny_model(), policy=tmp_path, value=tmp_path / "value")
    ids, mask = torch.tensor([[2, 9, 4, 8]]), torch.ones(1, 4, dtype=torch.bool)
    assert torch.equal(again.values(ids, mask, 3), made.base.values(ids, mask, 3))
    assert torch.equal(again.logprobs("policy", ids, mask, 3), made.base.logprobs("policy", ids, mask, 3))


def test_no_secret_is_saved(tmp_path):
    made = trainer(tmp_path, hub_token="hf_secret")
    made.save_model()
    assert not any(b"hf_secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_shared_value_adapter_trains(tmp_path):
    made = trainer(tmp_path, trainer_options={"value_adapter": "shared"})
    head = made.base.value_head.weight.detach().clone()
    made.train()
    assert not torch.equal(made.base.value_head.weight, head)
    assert len(made.optimizer.param_groups[1]["params"]) == 1
    made.save_model()
    again = SharedBase(tiny_model(), policy=tmp_path, value=tmp_path / "value")
    ids, mask = torch.tensor([[2, 9, 4, 8]]), torch.ones(1, 4, dtype=torch.bool)
    assert torch.equal(again.values(ids, mask, 3), made.base.values(ids, mask, 3))


def test_the_peft_adapter_on_disk_is_the_policy(tmp_path):
    made = trainer(tmp_path)
    made.train()
    made.save_model()
    saved = read_adapter(tmp_path)
    for key, tensor in made.base.adapter(Role.POLICY).tensors.items():
        assert torch.equal(saved.tensors[key], tensor)


def test_the_policy_is_pushed_with_its_value_role_and_card(tmp_path, monkeypatch):
    pushed = {}

    def upload_folder(*hub, repo_id, folder_path, **kwargs):
        pushed[repo_id] = sorted(str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*") if p.is_file())

    def init_hf_repo(self, **kwargs):
        self.hub_model_id = f"someone/{self.args.hub_model_id}"

    monkeypatch.setattr(PPOTrainer, "init_hf_repo", init_hf_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    # transformers 5.0 imported the function.
    monkeypatch.setattr("transformers.trainer.upload_folder", upload_folder, raising=False)
    made = trainer(tmp_path, hub_model_id="policy", hub_token="hf_secret")
    made.train()
    made.push_to_hub(dataset_name="someone/prompts")
    (files,) = pushed.values()
    assert {"adapter_model.safetensors", "value/adapter_model.safetensors", "README.md", "ppo_lora.json"} <= set(files)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets == "someone/prompts" and "objective/scores" in card.text
    assert "hf_secret" not in card.content


def test_the_value_role_can_be_kept_back(tmp_path):
    made = trainer(tmp_path, save_value=False, save_strategy="steps", save_steps=4)
    made.train()
    made.save_model()
    made.create_model_card()
    assert not (tmp_path / "value").exists() and ":value" not in (tmp_path / "README.md").read_text()
    assert read_adapter(tmp_path / "checkpoint-4" / "value").head is not None
    again = trainer(tmp_path, save_value=False, max_steps=8)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.global_step == 8


def test_the_best_checkpoint_comes_back_at_the_end(tmp_path):
    made = trainer(
        tmp_path,
        max_steps=12,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
        learning_rate=3e-2,
        trainer_options={"eval_dataset": prompts(8)},
    )
    made.train()
    evaluations = {
        entry["step"]: entry["eval_objective/scores"]
        for entry in made.state.log_history
        if "eval_objective/scores" in entry
    }
    best = max(evaluations, key=evaluations.get)
    saved = read_adapter(tmp_path / f"checkpoint-{best}")
    for key, tensor in made.base.adapter(Role.POLICY).tensors.items():
        assert torch.equal(saved.tensors[key], tensor)


@pytest.mark.parametrize("changes", [{"num_ppo_epochs": 3}, {"per_device_train_batch_size": 2}])
def test_resuming_with_other_iterations_is_refused(tmp_path, changes):
    trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    other = trainer(tmp_path / "other", **{"max_steps": 12, **changes})
    with pytest.raises(ValueError, match="a run resumes with the iterations it began with"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_resuming_from_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a checkpoint folder"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-99"))


def test_resuming_from_a_final_folder_is_refused(tmp_path):
    made = trainer(tmp_path)
    made.train()
    made.save_model(tmp_path / "final")
    with pytest.raises(ValueError, match=f"'{tmp_path / 'final'}', which has no trainer_state.json.*checkpoint-"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "final"))


def test_a_resumed_run_logs_what_was_measured_before_its_checkpoint(tmp_path):
    """The checkpoint falls between two logs: what the iterations before it measured belongs to the second."""
    options = {"max_steps": 24, "logging_steps": 12, "save_strategy": "steps", "save_steps": 8}

    def run(name, **given):
        made = trainer(tmp_path / name, reward_funcs=noted, **options)
        made.train(**given)
        assert made.state.log_history[-1]["step"] == 24
        return logged(made), made.state.log_history[-1]["train_loss"]

    def noted(completions, trainer_state, log_metric, **kwargs):
        log_metric(f"seen/after_{trainer_state.global_step}", len(completions[0]))
        return [float(len(text)) for text in completions]

    whole, mean_loss = run("whole")
    assert mean_loss == pytest.approx((whole[0]["loss"] + whole[1]["loss"]) / 2, rel=1e-6)  # Trainer's own
    for step in (8, 16):
        resumed, _ = run(f"from_{step}", resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert [entry["step"] for entry in resumed] == [12, 24]
        assert [entry.keys() for entry in resumed] == [entry.keys() for entry in whole]
        for one, other in zip(whole, resumed, strict=True):
            timed = {name for name in one if name.startswith(("time/", "memory/"))}
            assert {name: one[name] for name in one if name not in timed} == {
                name: other[name] for name in other if name not in timed
            }


def test_a_checkpoint_from_before_logs_were_kept_resumes(tmp_path):
    options = {"max_steps": 8, "logging_steps": 8, "kl_target": 6.0, "kl_horizon": 1000}
    trainer(tmp_path, save_strategy="steps", save_steps=4, **options).train()
    state = tmp_path / "checkpoint-4" / "ppo_state.json"
    assert {"kl", "logs"} == json.loads(state.read_text()).keys()
    state.write_text(json.dumps({"kl": json.loads(state.read_text())["kl"]}))
    again = trainer(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [entry["step"] for entry in logged(again)] == [8]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("optimizer.pt", None, "which has no optimizer.pt; expected a folder checkpoint-N that a run saved"),
        ("scheduler.pt", None, "which has no scheduler.pt; expected a folder"),
        ("trainer_state.json", "{", "trainer_state.json is broken .*Resume from another checkpoint"),
        ("ppo_state.json", "{", "ppo_state.json is broken"),
        ("adapter_model.safetensors", "", "adapter_model.safetensors of .* is broken"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, name, content, message):
    """Trainer itself goes on without an optimizer's state, and so from another place than where the run was."""
    trainer(tmp_path, save_strategy="steps", save_steps=4, kl_target=6.0, kl_horizon=1000).train()
    file = tmp_path / "checkpoint-4" / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    again = trainer(tmp_path / "again", max_steps=8, kl_target=6.0, kl_horizon=1000)
    with pytest.raises(StartupError, match=message):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_the_best_policy_comes_back_from_a_checkpoint_without_an_optimizer(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "max_steps": 8}
    made = trainer(
        tmp_path,
        save_only_model=True,
        load_best_model_at_end=True,
        trainer_options={"eval_dataset": prompts(4)},
        **options,
    )
    made.train()
    saved = read_adapter(made.state.best_model_checkpoint)
    for key, tensor in made.base.adapter(Role.POLICY).tensors.items():
        assert torch.equal(saved.tensors[key], tensor)
