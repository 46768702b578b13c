"""The loop: what a step does to the weights, what is logged, evaluated and saved."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from builders import nf4_config, prompts, randomize, save_tiny_model, tiny_model, tiny_tokenizer
from ppo_lora import PPOTrainer, Role, SharedBase
from runs import config, count_w5, logged, trainer


@pytest.fixture(params=["float32", "nf4"])
def model(request, tmp_path):
    if request.param == "float32":
        return tiny_model()
    folder = save_tiny_model(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4_config())


def test_training_changes_policy_and_value_and_nothing_else(tmp_path, model):
    made = trainer(tmp_path, model)
    before = {name: p.detach().clone() for name, p in made.base.named_parameters()}
    trainable = {id(p) for parameters in made.base.trainable_parameters().values() for p in parameters}
    made.train()
    for name, parameter in made.base.named_parameters():
        changed = not torch.equal(before[name], parameter)
        assert changed == (id(parameter) in trainable), name
        assert parameter.requires_grad == (id(parameter) in trainable), name


def test_the_first_kl_is_zero_and_the_first_ratio_is_one(tmp_path, model):
    made = trainer(tmp_path, model, num_ppo_epochs=1, num_mini_batches=1, max_steps=1)
    made.train()
    first = logged(made)[0]
    assert first["objective/kl"] == 0.0
    assert first["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert first["policy/clipfrac_avg"] == 0.0


@pytest.mark.parametrize(("per_device", "accumulation"), [(8, 1), (4, 2), (1, 8)])
def test_the_micro_batch_size_does_not_change_the_weights(tmp_path, per_device, accumulation):
    whole, split = (
        trainer(tmp_path / name, per_device_train_batch_size=size, gradient_accumulation_steps=steps, optim="sgd")
        for name, size, steps in (("whole", 8, 1), ("split", per_device, accumulation))
    )
    for made in (whole, split):
        made.train()
    for name, parameter in whole.base.named_parameters():
        torch.testing.assert_close(split.base.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_checkpointing_does_not_change_the_weights(tmp_path):
    plain, checkpointed = (trainer(tmp_path, gradient_checkpointing=flag) for flag in (False, True))
    plain.train()
    checkpointed.train()
    for name, parameter in plain.base.named_parameters():
        torch.testing.assert_close(checkpointed.base.get_parameter(name), parameter)


def test_policy_and_value_have_learning_rates_of_their_own(tmp_path):
    made = trainer(tmp_path, learning_rate=1e-3, value_learning_rate=5e-3)
    made.create_optimizer()
    groups = made.optimizer.param_groups
    assert [group["lr"] for group in groups] == [1e-3, 5e-3]
    for group, parameters in zip(groups, made.base.trainable_parameters().values(), strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in parameters]


def test_both_learning_rates_decay_linearly(tmp_path):
    seen = []

    class Rates(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            seen.append([group["lr"] for group in optimizer.param_groups])

    trainer(tmp_path, learning_rate=1e-3, value_learning_rate=4e-3, callbacks=[Rates()]).train()
    assert seen == [pytest.approx([1e-3 * left, 4e-3 * left]) for left in (0.75, 0.5, 0.25, 0.0)]


def test_gradients_are_clipped(tmp_path):
    free = trainer(tmp_path, max_grad_norm=0.0, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant")
    clipped = trainer(tmp_path, max_grad_norm=1e-3, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant")
    for made in (free, clipped):
        made.before = {n: p.detach().clone() for n, p in made.base.named_parameters() if p.requires_grad}
        made.train()
    moved = [
        torch.cat([(p - made.before[n]).flatten() for n, p in made.base.named_parameters() if n in made.before]).norm()
        for made in (free, clipped)
    ]
    assert moved[1] <= 4 * 1e-3 * 1.01 < moved[0]


def test_logs_have_trls_names(tmp_path):
    made = trainer(tmp_path, logging_steps=1)
    made.train()
    history = logged(made)
    assert len(history) == 1
    expected = {
        "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
        "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg",
        "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode",
        "time/sampling", "time/scoring", "time/updating", "time/tokens_per_second", "memory/rss_gib",
        "rewards/count_w5/mean", "completions/mean_length",
    }  # fmt: skip
    assert expected <= set(history[0])
    assert history[0]["episode"] == 16


def test_logging_saving_and_evaluating_wait_for_the_end_of_the_iteration(tmp_path):
    made = trainer(
        tmp_path,
        max_steps=12,
        logging_steps=3,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        trainer_options={"eval_dataset": prompts(4)},
    )
    made.train()
    assert [entry["step"] for entry in logged(made)] == [4, 8, 12]
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")) == [8, 12]
    assert [entry["step"] for entry in made.state.log_history if "eval_objective/scores" in entry] == [8, 12]


def test_every_prompt_is_used_before_one_comes_again(tmp_path):
    seen = []

    def note(prompts, **kwargs):
        seen.extend(kwargs["number"])
        return [0.0] * len(prompts)

    made = PPOTrainer(
        tiny_model(),
        note,
        config(tmp_path, max_steps=4 * 9),
        prompts(24, number=list(range(24))),
        processing_class=tiny_tokenizer(),
    )
    made.train()
    passes = [seen[start : start + 24] for start in range(0, 24 * 6, 24)]
    assert all(sorted(one) == list(range(24)) for one in passes)
    assert passes[0] != passes[1]


def test_epochs_and_episodes_say_how_long_to_train(tmp_path):
    by_epochs = trainer(tmp_path, max_steps=-1, num_train_epochs=2, rows=40)
    by_epochs.train()
    assert by_epochs.state.global_step == 2 * 3 * 4
    by_episodes = trainer(tmp_path, max_steps=-1, total_episodes=33)
    by_episodes.train()
    assert by_episodes.state.global_step == 3 * 4


def test_evaluations_agree_and_leave_training_alone(tmp_path):
    plain = trainer(tmp_path)
    plain.train()
    evaluated = trainer(tmp_path, trainer_options={"eval_dataset": {"a": prompts(5), "b": prompts(3)}})
    first = evaluated.evaluate()
    second = evaluated.evaluate()
    timeless = [{k: v for k, v in metrics.items() if "runtime" not in k} for metrics in (first, second)]
    assert timeless[0] == timeless[1]
    assert {"eval_a_objective/scores", "eval_b_objective/kl", "eval_a_completions/mean_length"} <= set(first)
    evaluated.train()
    for name, parameter in plain.base.named_parameters():
        assert torch.equal(evaluated.base.get_parameter(name), parameter), name


def test_random_numbers_of_reward_functions_leave_training_alone(tmp_path):
    def restless(completions, **kwargs):
        torch.rand(3)
        return count_w5(completions)

    plain, disturbed = trainer(tmp_path, max_steps=8), trainer(tmp_path, max_steps=8, reward_funcs=restless)
    plain.train()
    disturbed.train()
    for name, parameter in plain.base.named_parameters():
        assert torch.equal(disturbed.base.get_parameter(name), parameter), name


def test_completions_are_shown(tmp_path, capsys):
    trainer(tmp_path, log_completions=True, num_completions_to_print=2).train()
    shown = capsys.readouterr().out
    assert "Step 4" in shown and "completion" in shown and "score" in shown


def test_the_policy_starts_from_an_sft_adapter_and_the_reference_stays_there(tmp_path):
    start = SharedBase(tiny_model())
    randomize(start.trainable_parameters()[Role.POLICY])
    adapter = start.adapter(Role.POLICY)
    made = trainer(tmp_path, trainer_options={"policy_adapter": adapter}, learning_rate=1e-2)
    ids, mask = torch.tensor([[2, 9, 4, 8]]), torch.ones(1, 4, dtype=torch.bool)
    expected = start.logprobs("policy", ids, mask, 3)
    assert torch.equal(made.base.logprobs("reference", ids, mask, 3), expected)
    made.train()
    assert logged(made)[0]["objective/kl"] == 0.0
    assert torch.equal(made.base.logprobs("reference", ids, mask, 3), expected)
    assert not torch.equal(made.base.logprobs("policy", ids, mask, 3), expected)


def test_scores_mix_the_reward_adapter_and_functions(tmp_path):
    start = SharedBase(tiny_model())
    for parameters in start.trainable_parameters().values():
        randomize(parameters, scale=0.3)
    made = trainer(tmp_path, trainer_options={"reward_adapter": start.adapter(Role.VALUE)}, reward_weights=[2.0, 0.5])
    assert made.scorer.names == ["reward_adapter", "count_w5"]
    made.train()
    entry = logged(made)[0]
    mixed = 2.0 * entry["rewards/reward_adapter/mean"] + 0.5 * entry["rewards/count_w5/mean"]
    assert entry["objective/scores"] == pytest.approx(mixed, abs=1e-5)


def test_an_unfinished_response_pays(tmp_path):
    def none(prompts, **kwargs):
        return [1.0] * len(prompts)

    subtracted = trainer(tmp_path, reward_funcs=none, missing_eos_penalty=0.75)
    replaced = trainer(tmp_path, reward_funcs=none, missing_eos_score=-3.0)
    for made, unfinished in ((subtracted, 0.25), (replaced, -3.0)):
        made.train()
        entry = logged(made)[0]
        share = entry["completions/clipped_ratio"]
        assert 0 < share < 1
        assert entry["objective/scores"] == pytest.approx(share * unfinished + (1 - share), abs=1e-5)


def test_a_non_finite_gradient_stops_before_the_weights_change(tmp_path):
    made = trainer(tmp_path)
    made.create_optimizer()
    before = {n: p.detach().clone() for n, p in made.base.named_parameters()}
    made.base.value_head.register_forward_hook(
        lambda head, given, values: values * float("nan") if torch.is_grad_enabled() else values
    )
    with pytest.raises(FloatingPointError, match=r"not finite at step 1.*row \d"):
        made.train()
    assert all(torch.equal(p, before[n]) for n, p in made.base.named_parameters())


def test_non_finite_scores_of_tokens_stop_with_the_row(tmp_path):
    made = trainer(tmp_path)
    made.base.value_head.weight.data.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"values of row 0"):
        made.train()


def test_seconds_of_phases_leave_evaluations_out(tmp_path):
    made = trainer(tmp_path, max_steps=8, trainer_options={"eval_dataset": prompts(4)})
    made.train()
    made.evaluate()
    for entry in logged(made):
        phases = entry["time/sampling"] + entry["time/scoring"] + entry["time/updating"]
        assert entry["time/iteration"] == pytest.approx(phases)
    assert sum(entry["time/iteration"] for entry in logged(made)) <= made.state.log_history[-2]["train_runtime"] + 1e-3


def test_a_broken_reward_adapter_is_named(tmp_path):
    start = SharedBase(tiny_model())
    start.value_head.weight.data.fill_(float("nan"))
    made = trainer(tmp_path, trainer_options={"reward_adapter": start.adapter(Role.VALUE)})
    with pytest.raises(FloatingPointError, match="reward adapter's score of row 0 is nan"):
        made.train()


def test_the_value_coefficient_weighs_the_value_loss_alone(tmp_path):
    options = {"optim": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0.0, "max_steps": 4}
    with_value, without = trainer(tmp_path, **options), trainer(tmp_path, vf_coef=0.0, **options)
    before = without.base.value_head.weight.detach().clone()
    with_value.train()
    without.train()
    assert torch.equal(without.base.value_head.weight, before)
    assert not torch.equal(with_value.base.value_head.weight, before)
    first, second = (made.base.trainable_parameters()[Role.POLICY] for made in (with_value, without))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_logged_loss_is_that_of_the_whole_step(tmp_path):
    def length(completions, **kwargs):
        return [float(len(text)) for text in completions]

    made = trainer(tmp_path, vf_coef=0.3, num_mini_batches=1, per_device_train_batch_size=2, reward_funcs=length)
    made.train()
    for entry in logged(made):
        expected = entry["loss/policy_avg"] + 0.3 * entry["loss/value_avg"]
        assert abs(expected) > 1.0
        assert entry["loss"] == pytest.approx(expected, rel=1e-4)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="0 of the 57 that PPO trains"):
        trainer(tmp_path, model, trainer_options={"optimizers": (optimizer, None)})
    base = SharedBase(tiny_model())
    own = torch.optim.SGD([p for ps in base.trainable_parameters().values() for p in ps], lr=0.1)
    trainer(tmp_path, base, trainer_options={"optimizers": (own, None)}).train()


def test_a_callback_that_stops_keeps_what_was_due(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 6

    made = trainer(tmp_path, max_steps=12, save_strategy="steps", save_steps=5, callbacks=[Stop()])
    made.train()
    assert (tmp_path / "checkpoint-6").is_dir()
    assert [entry["step"] for entry in logged(made)] == [4, 6]


def test_a_second_training_forgets_what_the_first_left_unlogged(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    score = [100.0]

    def constant(prompts, **kwargs):
        return [score[0]] * len(prompts)

    made = trainer(tmp_path, reward_funcs=constant, logging_strategy="no", callbacks=[Stop()])
    made.train()
    made.remove_callback(Stop)
    made.args.logging_strategy, score[0] = "steps", 0.0
    made.train()
    assert logged(made)[0]["objective/scores"] == 0.0


def test_evaluation_counts_every_row_once(tmp_path):
    made = trainer(tmp_path, local_rollout_forward_batch_size=3, trainer_options={"eval_dataset": prompts(7)})
    metrics = made.evaluate()
    finished = (1 - metrics["eval_completions/clipped_ratio"]) * 7
    assert metrics["eval_val/num_eos_tokens"] == pytest.approx(finished)


def test_a_function_may_have_nothing_to_say_about_a_batch(tmp_path):
    def nothing(completions, **kwargs):
        return [None] * len(completions)

    made = trainer(tmp_path, reward_funcs=[nothing, count_w5])
    made.train()
    assert "rewards/nothing/mean" not in logged(made)[0] and "rewards/count_w5/mean" in logged(made)[0]


def test_dora_trains_each_parameter_once(tmp_path):
    config = LoraConfig(r=4, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    made = trainer(tmp_path, trainer_options={"peft_config": config})
    made.train()
    parameters = made.base.trainable_parameters()[Role.POLICY]
    assert len({id(p) for p in parameters}) == len(parameters) == 42
    assert logged(made)[0]["objective/kl"] == 0.0


def test_async_functions_keep_their_event_loop(tmp_path):
    loops = []

    async def judge(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    trainer(tmp_path, reward_funcs=judge, max_steps=8).train()
    assert len(loops) == 2 and loops[0] is loops[1]


@pytest.mark.skipif(
    version("bitsandbytes").split(".")[:2] == ["0", "48"], reason="its 8-bit optimizers were for CUDA only until then"
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit"])
def test_eight_bit_optimizers_keep_moments_of_the_adapters_alone(tmp_path, optim):
    large = LoraConfig(r=128, target_modules="all-linear", task_type="CAUSAL_LM")  # small tensors stay in float32
    made = trainer(tmp_path, optim=optim, trainer_options={"peft_config": large})
    frozen = {name: p.detach().clone() for name, p in made.base.named_parameters() if not p.requires_grad}
    before = {name: p.detach().clone() for name, p in made.base.named_parameters() if p.requires_grad}
    made.train()
    state = made.optimizer.state
    assert {id(p) for p in state} == {id(p) for group in made.base.trainable_parameters().values() for p in group}
    moments = [moment for entry in state.values() for moment in (entry["state1"], entry["state2"])]
    assert {moment.dtype for moment in moments if moment.numel() >= 4096} == {torch.uint8}
    assert all(torch.equal(made.base.get_parameter(name), tensor) for name, tensor in frozen.items())
    assert any(not torch.equal(made.base.get_parameter(name), tensor) for name, tensor in before.items())
