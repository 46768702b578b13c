"""The trainer's evaluation: several responses a prompt, the same ones in any batch, and the best checkpoint."""

from __future__ import annotations

import itertools
import json
import re
import statistics

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from bases import assert_same_adapter, copied
from builders import prompts, tiny_model, tiny_tokenizer
from ppo_lora import PPOTrainer, Role, StartupError
from ppo_lora.eval_loop import _interleaved
from runs import config, count_w5


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def made(folder, rewards=length, eval_dataset=None, **changes):
    return PPOTrainer(
        tiny_model(),
        rewards,
        config(folder, **changes),
        prompts(32),
        prompts(7) if eval_dataset is None else eval_dataset,
        tiny_tokenizer(),
    )


def timeless(metrics):
    return {name: value for name, value in metrics.items() if "runtime" not in name}


def evaluations(trainer, name="eval_objective/scores"):
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]


def test_scores_are_means_over_all_responses_and_best_of_n_over_all_sets_of_n(tmp_path):
    seen = []

    def note(prompts, completions, **kwargs):
        scores = length(completions)
        seen.extend(zip(prompts, scores, strict=True))
        return scores

    metrics = made(tmp_path, note, num_generations_eval=4).evaluate()
    assert len(seen) == 28
    by_prompt = [[score for _, score in group] for _, group in itertools.groupby(seen, key=lambda pair: pair[0])]
    assert [len(scores) for scores in by_prompt] == [4] * 7
    scores = [score for _, score in seen]
    assert metrics["eval_objective/scores"] == pytest.approx(statistics.mean(scores))
    assert metrics["eval_objective/scores_std"] == pytest.approx(statistics.pstdev(scores))
    assert metrics["eval_rewards/note/mean"] == pytest.approx(statistics.mean(scores))
    for n in (1, 2, 4):
        best = [max(chosen) for own in by_prompt for chosen in itertools.combinations(own, n)]
        assert metrics[f"eval_objective/best_of_{n}"] == pytest.approx(statistics.mean(best))
    assert "eval_objective/best_of_3" not in metrics and len(set(by_prompt[0])) > 1


@pytest.mark.parametrize(("options", "powers"), [({}, []), ({"num_generations": 2}, [1, 2])])
def test_evaluation_takes_as_many_responses_as_training_unless_told(tmp_path, options, powers):
    metrics = made(tmp_path, **options).evaluate()
    assert sorted(name for name in metrics if "best_of" in name) == [f"eval_objective/best_of_{n}" for n in powers]


def test_responses_do_not_depend_on_the_batch_size(tmp_path):
    seen = {}
    for size in (1, 5, 64):

        def note(completions, size=size, **kwargs):
            seen[size] = completions
            return length(completions)

        trainer = made(tmp_path, note, num_generations_eval=3, local_rollout_forward_batch_size=size)
        seen[size, "metrics"] = timeless(trainer.evaluate())
    assert seen[1] == seen[5] == seen[64]
    assert seen[1, "metrics"] == pytest.approx(seen[64, "metrics"], rel=1e-4, abs=1e-5)


def test_responses_do_not_depend_on_the_prompts_after(tmp_path):
    seen = []

    def note(completions, **kwargs):
        seen.append(completions)
        return length(completions)

    for rows in (3, 7):
        made(tmp_path, note, prompts(7).select(range(rows)), num_generations_eval=2).evaluate()
    assert seen[0] == seen[1][:6]


class TwoProcesses:
    """An accelerator's gathering, as the first of two processes sees it."""

    num_processes, device = 2, torch.device("cpu")

    def __init__(self, other):
        self.other = other

    def pad_across_processes(self, rows, dim):
        self.width = max(rows.shape[dim], self.other.shape[dim])
        return torch.nn.functional.pad(rows, (0, self.width - rows.shape[dim]))

    def gather(self, rows):
        other = self.other.to(rows.dtype)
        if rows.dim() > 1:
            other = torch.nn.functional.pad(other, (0, self.width - other.shape[1]))
        return torch.cat([rows, other])


def test_rows_of_processes_are_put_into_the_order_of_one():
    """Prompts 0, 2 and 4 in the first process, 1, 3 and 5 in the second, two responses to each."""
    first, second = torch.tensor([0, 1, 20, 21, 40, 41]), torch.tensor([10, 11, 30, 31, 50, 51])
    expected = [0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
    assert _interleaved(first, TwoProcesses(second), 2).tolist() == expected
    wide = _interleaved(first[:, None] > 20, TwoProcesses((second[:, None] > 20).repeat(1, 2)), 2)
    assert wide.dtype == torch.bool and wide.shape == (12, 2)
    assert wide[:, 0].tolist() == [number > 20 for number in expected]


@pytest.mark.parametrize(
    "options",
    [
        {"num_generations": 2, "num_generations_eval": 4},
        {"log_exact_kl": True, "importance_sampling_cap": 2.0},
        {"whiten_rewards": True, "kl_in": "loss"},
    ],
    ids=str,
)
def test_the_names_of_metrics_are_known_beforehand(tmp_path, options):
    trainer = made(tmp_path, [length, count_w5], {"a": prompts(3), "b": prompts(2)}, **options)
    found = {name for name in trainer.evaluate() if "runtime" not in name and name != "epoch"}
    assert found == set(trainer.evaluation_metric_names())


def test_evaluation_leaves_training_alone(tmp_path):
    options = {"num_generations": 2, "max_steps": 8}
    plain = made(tmp_path / "plain", **options)
    watched = made(
        tmp_path / "watched",
        eval_dataset={"a": prompts(5).to_iterable_dataset(), "b": prompts(3)},
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        num_generations_eval=4,
        log_completions=True,
        **options,
    )
    for trainer in (plain, watched):
        trainer.train()
    assert len(evaluations(watched, "eval_a_objective/best_of_4")) == 3
    for name, parameter in plain.base.named_parameters():
        assert torch.equal(watched.base.get_parameter(name), parameter), name


# The best checkpoint

BEST = {
    **{
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
        "max_steps": 20,
        "seed": 1,
    },
    **{"load_best_model_at_end": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant"},
}


def expect_best(trainer, folder, name, choose):
    """The best evaluation's step is the best checkpoint, whose roles are on the base at the end."""
    seen = evaluations(trainer, name)
    assert len({value for _, value in seen}) > 1
    best = choose(value for _, value in seen)
    step = next(step for step, value in seen if value == best)
    assert trainer.state.best_metric == best and trainer.state.best_model_checkpoint == str(
        folder / f"checkpoint-{step}"
    )
    for role, place in ((Role.POLICY, "."), (Role.VALUE, "value")):
        saved = load_file(folder / f"checkpoint-{step}" / place / "adapter_model.safetensors")
        adapter = trainer.base.adapter(role)
        assert all(torch.equal(tensor, saved[key]) for key, tensor in adapter.tensors.items())
    last = load_file(folder / "checkpoint-20" / "adapter_model.safetensors") if step != 20 else None
    if last is not None:
        assert any(
            not torch.equal(tensor, last[key]) for key, tensor in trainer.base.adapter(Role.POLICY).tensors.items()
        )
    return step


@pytest.mark.parametrize(
    ("metric", "choose"),
    [
        (None, max),
        ("eval_objective/scores", max),
        ("objective/kl", min),
        ("eval_objective/kl", min),
        ("rewards/length/mean", max),
        ("objective/best_of_2", max),
    ],
)
def test_the_best_policy_and_value_are_there_at_the_end(tmp_path, metric, choose):
    trainer = made(tmp_path, metric_for_best_model=metric, num_generations_eval=2, **BEST)
    trainer.train()
    name = "eval_" + (metric or "objective/scores").removeprefix("eval_")
    steps = [step for step, _ in evaluations(trainer, name)]
    assert steps == [8, 12, 16, 20]  # 5, 10, 15 and 20, each put off to the end of its iteration
    expect_best(trainer, tmp_path, name, choose)
    again = trainer.evaluate()[name]
    assert again == pytest.approx(trainer.state.best_metric, rel=1e-6)


def test_less_can_be_better(tmp_path):
    trainer = made(tmp_path, greater_is_better=False, **BEST)
    trainer.train()
    expect_best(trainer, tmp_path, "eval_objective/scores", min)


def test_of_a_named_set_the_metric_has_its_name(tmp_path):
    sets = {"a": prompts(5), "b": prompts(3).to_iterable_dataset()}
    trainer = made(tmp_path, eval_dataset=sets, metric_for_best_model="b_objective/kl", **BEST)
    trainer.train()
    expect_best(trainer, tmp_path, "eval_b_objective/kl", min)


def test_the_best_is_saved_where_no_checkpoint_is_due(tmp_path):
    """Evaluated four times as often as saved, and better at first: its checkpoint has to exist all the same."""
    scripted = {"eval_steps": 4, "save_steps": 16, "max_steps": 16}
    scores = iter([1.0, 5.0, 2.0, 0.0])

    class Scripted(PPOTrainer):
        def _evaluate_prompts(self, dataset, prefix):
            return {f"{prefix}_objective/scores": next(scores)}

    trainer = Scripted(
        tiny_model(), length, config(tmp_path, **{**BEST, **scripted}), prompts(32), prompts(3), tiny_tokenizer()
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-8")
    saved = load_file(tmp_path / "checkpoint-8" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, saved[key]) for key, tensor in trainer.base.adapter(Role.POLICY).tensors.items())
    state = json.loads((tmp_path / "checkpoint-16" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 8


def test_only_the_best_are_saved_where_that_is_asked_for(tmp_path):
    options = {**BEST, "save_strategy": "best", "eval_steps": 4}
    trainer = made(tmp_path, **options)
    trainer.train()
    best, expected = float("-inf"), []
    for step, score in evaluations(trainer):
        if score > best:
            best, expected = score, [*expected, step]
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")) == expected
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{expected[-1]}")


@pytest.mark.parametrize("metric", ["loss", "objective/score", "rewards/other/mean", "objective/best_of_8"])
def test_a_metric_that_will_never_be_reported_is_refused_at_once(tmp_path, metric):
    message = f"metric_for_best_model is {metric!r}; expected one of ['objective/kl'"
    with pytest.raises(ValueError, match=re.escape(message)):
        made(tmp_path / "none", metric_for_best_model=metric, num_generations_eval=4, **BEST)
    assert not (tmp_path / "none").exists()


def logging(completions, log_metric, **kwargs):
    log_metric("letters", sum(len(text) for text in completions) / len(completions))
    return length(completions)


@pytest.mark.parametrize("metric", ["letters", "eval_letters"])
def test_what_a_reward_function_logs_can_be_the_metric(tmp_path, metric):
    trainer = made(tmp_path, logging, metric_for_best_model=metric, **BEST)
    trainer.train()
    expect_best(trainer, tmp_path, "eval_letters", max)


def test_of_a_named_set_what_a_function_logs_has_its_name_too(tmp_path):
    trainer = made(tmp_path, logging, {"a": prompts(3)}, metric_for_best_model="a_letters", **{**BEST, "max_steps": 8})
    trainer.train()
    assert trainer.state.best_metric == trainer.state.log_history[-2]["eval_a_letters"]


def test_what_no_reward_function_logs_is_refused_before_anything_is_trained(tmp_path):
    trainer = made(tmp_path, logging, metric_for_best_model="letter", startup_checks="error", **BEST)
    before = copied(trainer.base.adapter(Role.POLICY))
    with pytest.raises(StartupError, match="metric_for_best_model is 'letter'; expected one of .*'letters'"):
        trainer.train()
    assert_same_adapter(trainer.base.adapter(Role.POLICY), before)


def test_with_named_sets_the_metric_needs_a_name(tmp_path):
    with pytest.raises(ValueError, match="metric_for_best_model is 'objective/scores'; expected one of .'a_objective"):
        made(tmp_path, eval_dataset={"a": prompts(3)}, **BEST)


def test_a_metric_is_not_looked_at_where_nothing_is_evaluated(tmp_path):
    made(tmp_path, metric_for_best_model="unknown")


def test_a_data_set_of_one_prompt(tmp_path):
    metrics = made(tmp_path, eval_dataset=Dataset.from_dict({"prompt": ["w5"]}), num_generations_eval=2).evaluate()
    assert metrics["eval_objective/best_of_1"] == pytest.approx(metrics["eval_objective/scores"])
