"""PPO on transformers' Trainer: the train dataloader is the stream of experience."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import TrainOutput

from .adapters import AdapterLike
from .callbacks import IterationEndCallback, PhaseProgressCallback
from .checkpoint import LOGS, Stateful
from .collector import Collector, ScoredRollout
from .config import PPOConfig
from .data import PromptDataset
from .demonstrations import demonstrations
from .display import completions_table, print_table, print_warning
from .eval_loop import evaluate_prompts, evaluation_metrics
from .health import HealthMonitor, Limits, kl_bound
from .kl_control import kl_controller
from .metrics import PhaseClock, RunningMeans, memory_metrics
from .normalization import DatasetNormalizer
from .plan_display import measured_peak, startup_plan
from .pretraining import PretrainingMix
from .prompts import evaluation_prompts, iteration_prompts, iterations_of_epoch, training_prompts
from .reward_models import ModelReward, RewardSource, reward_functions
from .roles import Role
from .saving import SavingTrainer
from .scorers import Scorer
from .setup import (
    check_best_metric,
    check_dtype,
    check_lengths,
    check_one_device,
    check_optimizer,
    model_name,
    shared_base,
    stop_token_ids,
    tokenizer_for,
)
from .shared_base import SharedBase
from .startup import MOST_ROWS, judge, raise_for, startup_panel, take_sample
from .stream import ExperienceStream
from .types import Experience, Prompts
from .update import MicroBatch, PolicyValueUpdate, micro_batches_of_step

EvalDataset: TypeAlias = Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None

_LOSS = "loss of a step"  # measured here too: after resuming, Trainer's lacks the steps before the checkpoint
_ROLLOUTS = 1  # a stream of random numbers; the shuffles' is 2, the startup checks' 4


class PPOTrainer(SavingTrainer):
    """Proximal policy optimization of a LoRA policy, with reference, value and reward on the same base.

    Args:
        model: a model id or folder, a causal language model without adapters, or a :class:`SharedBase`.
        reward_funcs: one or several functions ``f(prompts, completions, completion_ids, **columns)``,
            sequence-classification models with one output, by name or loaded, or URLs of reward servers.
        args: the configuration.
        train_dataset: TRL's prompt-only format, text or messages; streams too.
        eval_dataset: the same, or a dict of such, for :meth:`evaluate`.
        processing_class: the tokenizer; the model's own if None.
        reward_processing_classes: tokenizers of the reward models among ``reward_funcs``; their own if None.
        callbacks, optimizers: as for ``Trainer``.
        peft_config: of fresh adapters.
        quantization_config: for a model given by name.
        policy_adapter, reference_adapter, value_adapter, reward_adapter: as in :class:`SharedBase`.
        demonstration_dataset: TRL's prompt-completion format, for ``score_normalization="dataset"``.
        ptx_dataset: text, messages, or prompts with completions to mix in with ``ptx_coef``.

    Raises:
        ValueError, TypeError: what was given cannot be trained with. Nothing is written then.
    """

    optimizer: Any

    def __init__(
        self,
        model: str | Path | PreTrainedModel | SharedBase,
        reward_funcs: RewardSource | list[RewardSource] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: EvalDataset = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: LoraConfig | None = None,
        policy_adapter: AdapterLike | None = None,
        reference_adapter: AdapterLike | None = None,
        value_adapter: AdapterLike | None = None,
        reward_adapter: AdapterLike | None = None,
        demonstration_dataset: Dataset | None = None,
        ptx_dataset: Dataset | None = None,
    ):
        model = str(model) if isinstance(model, Path) else model
        args = PPOConfig(output_dir=f"{model_name(model)}-PPO") if args is None else args
        if not isinstance(args, PPOConfig):
            raise TypeError(f"args is a {type(args).__name__}; expected a PPOConfig.")
        check_one_device(args)
        set_seed(args.seed)
        adapters = {
            "policy": policy_adapter,
            "reference": reference_adapter,
            "value": value_adapter,
            "reward": reward_adapter,
        }
        self.base = shared_base(model, args, adapters, peft_config, quantization_config)
        if args.bf16:
            self.base.compute_dtype = torch.bfloat16
        self.base.chunk_elements = args.logits_chunk_mib * 2**20 // 4
        check_dtype(self.base)
        self.base.decide_packing(args.pack_sequences)
        check_optimizer(optimizers[0], self.base)
        tokenizer = tokenizer_for(processing_class, model, self.base, args)
        functions = reward_functions(reward_funcs, reward_processing_classes, args)
        self.scorer = Scorer(self.base, functions, args.reward_weights, args.local_rollout_forward_batch_size)
        self._tokenizer = tokenizer
        self._collector = Collector(
            self.base, self.scorer, tokenizer, stop_token_ids(tokenizer, self.base, args), args
        )
        self._demonstrations = demonstrations(demonstration_dataset, tokenizer, args)
        self._train_prompts = training_prompts(train_dataset, tokenizer, args)
        self._eval_prompts = evaluation_prompts(eval_dataset, tokenizer, args)
        self._pretraining = PretrainingMix.of(ptx_dataset, tokenizer, self.base, args)
        check_lengths([self._train_prompts, *self._eval_prompts.values()], self.base, args)
        self.args = args
        self._best_metric_known = check_best_metric(self.evaluation_metric_names(), args, self.scorer.logs)

        self._progress = PhaseProgressCallback()
        self._means = RunningMeans()
        self._clock = PhaseClock(self._wait_for_device)
        self._scored: ScoredRollout | None = None
        self._checks_due = self._trained = False
        self._health: HealthMonitor | None = None
        self.kl_controller = kl_controller(args.kl_coef, args.kl_target, args.kl_horizon)
        scores = self._collector.normalizer
        self._states: dict[str, Stateful] = {"kl": self.kl_controller, "scores": scores, LOGS: self._means}
        super().__init__(
            model=self.base,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=[*(callbacks or []), IterationEndCallback(args.steps_per_iteration)],
            optimizers=optimizers,
        )
        self._update = self._new_update()
        for function in functions:
            if isinstance(function, ModelReward):
                function.to(self.accelerator.device)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(self._progress)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """See ``Trainer.train``. What an earlier call left unlogged is forgotten."""
        self._means = self._states[LOGS] = RunningMeans()
        self._clock, self._health = PhaseClock(self._wait_for_device), None
        self._scored, self._checks_due = None, self.args.startup_checks != "off"
        self._update = self._new_update()
        try:
            output: TrainOutput = super().train(*args, **kwargs)
        finally:
            self._trained = True
        if self.args.startup_checks != "off" and self.is_world_process_zero():
            print_table(measured_peak())
        return output

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback; what holds things back until an iteration's end stays the last, so it sees every wish."""
        super().add_callback(callback)
        last = self.pop_callback(IterationEndCallback)
        if last is not None:
            super().add_callback(last)

    # The stream of experience

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The experience stream; an epoch is as many iterations as it takes to use every prompt."""
        stream = ExperienceStream(
            self.collect,
            lambda: self.state.global_step // self.args.steps_per_iteration,
            iterations_of_epoch(self._train_prompts, self.args),
            self.args,
            self.args.seed + self.args.process_index,
            self.base.packs_rows,
        )
        return DataLoader(stream, batch_size=None)

    def collect(self, iteration: int) -> Experience:
        """Sample a response to each prompt of an iteration, score them, and estimate the advantages."""
        self._close_iteration()
        self._measure_demonstrations()
        prompts = iteration_prompts(self._train_prompts, iteration, self.args)
        if self._checks_due:
            self._check_startup(prompts.first(MOST_ROWS), iteration)
        self._enter("sampling")
        rollout = self._collector.sample(prompts, _ROLLOUTS, iteration)
        self._enter("scoring")
        kl_coef = self.kl_controller.value
        reduce = self._sum_over_processes
        self._scored = self._collector.score(prompts, rollout, kl_coef, reduce, self.state, learns=True)
        if not self._best_metric_known:
            names = self.evaluation_metric_names(gather_object(list(self._scored.logged)))
            self._best_metric_known = check_best_metric(names, self.args)
        self._means.add({**self._scored.metrics, "objective/kl_coef": kl_coef})
        self._update.begin_iteration(iteration)
        self._adapt_kl(self._scored.metrics["objective/kl"])
        self._enter("updating")
        return self._scored.experience

    def _check_startup(self, prompts: Prompts, iteration: int) -> None:
        """Answer some of the first prompts, show what is seen, and stop where it is wrong."""
        self._checks_due = False
        sample = take_sample(
            self.base,
            self._collector,
            prompts,
            self.args,
            self.kl_controller.value,
            self.accelerator.gather,
            self.state,
        )
        fresh = iteration == 0 and not self._trained
        checks = judge(sample, self.base, self.scorer, self._train_prompts, self._tokenizer, self.args, fresh)
        if self.is_world_process_zero():
            self._progress.clear()
            plan = startup_plan(self.base, self.args, self._train_prompts.longest)
            print_table(startup_panel(self.base, checks, plan))
        raise_for(checks)

    def _adapt_kl(self, kl: Tensor) -> None:
        """Let the coefficient of the next iteration follow from the KL of this one, the mean over all processes."""
        if self.args.kl_target is not None:
            mean = self._sum_over_processes(kl) / self.accelerator.num_processes
            self.kl_controller.update(mean.item(), self.args.batch_size)

    def _measure_demonstrations(self) -> None:
        """Measure the demonstrations' mean score, unless that was done in this run or the one that it resumes."""
        normalizer = self._collector.normalizer
        if isinstance(normalizer, DatasetNormalizer) and self._demonstrations is not None and normalizer.mean is None:
            reduce = self._sum_over_processes
            normalizer.mean = self._collector.measure_demonstrations(self._demonstrations, reduce, self.state)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Experience]], num_batches: int, device: torch.device
    ) -> tuple[list[list[MicroBatch]], None]:
        """The micro-batches of one optimizer step; see :func:`~ppo_lora.update.micro_batches_of_step`."""
        slots = [slot for _, slot in zip(range(num_batches), epoch_iterator, strict=False)]
        return micro_batches_of_step(slots, self.args, self._sum_over_processes, self.base.packs_rows), None

    # One optimizer step

    def training_step(
        self, model: nn.Module, inputs: list[MicroBatch], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add one micro-batch's gradients; at the last one of a step, decide whether the step is taken.

        Raises:
            FloatingPointError: the loss or a gradient is not finite; the weights are as before the step.
        """
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers have a mode
        loss = self._update.gradients(model, inputs)
        self._enter("updating")
        if self.accelerator.sync_gradients:
            loss = loss + self._update.finish_step(model, self.state.global_step)
        self._means.add({_LOSS: loss * self.args.gradient_accumulation_steps})  # the mean over steps of their sums
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One parameter group a role: the policy's learning rate and the value's."""
        if self.optimizer is None:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.base)
            rates = {Role.POLICY: self.args.learning_rate, Role.VALUE: self.args.value_learning_rate}
            groups = [
                {
                    "params": parameters,
                    "lr": self.args.learning_rate if rates[role] is None else rates[role],
                    "weight_decay": self.args.weight_decay,
                }
                for role, parameters in self.base.trainable_parameters().items()
            ]
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: ``total_flos`` in the trainer's state stays 0."""
        return 0

    # Evaluation

    def evaluate(
        self,
        eval_dataset: EvalDataset = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Sample a response to every evaluation prompt and report scores, KL and lengths.

        The random numbers are the evaluation's own and the same each time: two evaluations of one policy agree, and
        training goes on as if there had been none.

        Returns:
            ``{prefix}_objective/scores``, ``{prefix}_objective/kl`` (nats a response), ``{prefix}_completions/...``.
        """
        given = eval_dataset is not None
        prompts = evaluation_prompts(eval_dataset, self._tokenizer, self.args) if given else self._eval_prompts
        if not prompts:
            raise ValueError("evaluate() needs prompts: give eval_dataset to the trainer or to this call.")
        self._close_iteration()
        self._measure_demonstrations()
        metrics: dict[str, float] = {}
        for name, dataset in prompts.items():
            metrics |= self._evaluate_prompts(dataset, f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation_metric_names(self, logged: Sequence[str] = ()) -> list[str]:
        """What :meth:`evaluate` reports of the trainer's own evaluation prompts, where every reward source scores and
        reward functions log the metrics ``logged``."""
        names = [*evaluation_metrics(self.scorer.names, self.args), *sorted(set(logged))]
        return [f"eval_{part}_{name}" if part else f"eval_{name}" for part in self._eval_prompts for name in names]

    def _evaluate_prompts(self, dataset: PromptDataset, prefix: str) -> dict[str, float]:
        started = time.perf_counter()
        scored, seen = evaluate_prompts(
            self._collector, dataset, self.args, self.accelerator, self.kl_controller.value, self.state
        )
        if self.args.log_completions:
            self._print_completions(scored, f"Evaluation at step {self.state.global_step}")
        return {f"{prefix}_{name}": value for name, value in seen.items()} | {
            f"{prefix}_runtime": time.perf_counter() - started
        }

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the iteration measured to the training logs, under TRL's names."""
        if "loss" in logs:
            self._close_iteration()
            measured = self._means.pop(self._sum_over_processes, gather_object)
            loss = {"loss": measured.pop(_LOSS, logs["loss"])}
            limits = (*self._collector.limits, self._update.limit)
            logs = {**measured, **logs, **loss, **memory_metrics(limits)}
            logs["lr"] = logs["learning_rate"]
            logs["episode"] = self.state.global_step // self.args.steps_per_iteration * self.args.batch_size
            if self.args.health_warnings:
                logs["health/warnings"] = float(self._warn_of_health(logs))
            if self.args.log_completions and self._scored is not None:
                self._print_completions(self._scored, f"Step {self.state.global_step}")
        super().log(logs, start_time)

    def _warn_of_health(self, logs: dict[str, float]) -> int:
        """Say what is unhealthy since this log; how many warnings that are."""
        if self._health is None:
            unweighted = [n for n, weight in zip(self.scorer.names, self.scorer.weights, strict=True) if not weight]
            history = [entry for entry in self.state.log_history if "loss" in entry]
            limits = Limits(kl_bound(self.args.kl_warning, self.args.kl_target), unweighted)
            self._health = HealthMonitor(limits, self.args.steps_per_iteration, history)
        told = self._health.observe({**logs, "step": self.state.global_step})
        for text in told if self.is_world_process_zero() else []:
            self._progress.clear()
            print_warning(text)
        return len(told)

    def _enter(self, phase: str) -> None:
        self._clock.enter(phase)
        self._progress.show_phase(phase)

    def _wait_for_device(self) -> None:
        if self.args.sync_timings and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _new_update(self) -> PolicyValueUpdate:
        enter = lambda phase: self._clock.enter(phase)  # noqa: E731  a later train() has another clock
        return PolicyValueUpdate(self.base, self.args, self.accelerator, self._means, enter, self._pretraining)

    def _close_iteration(self) -> None:
        """Note how long the iteration's phases took, in seconds; nothing if that was done already."""
        seconds = self._clock.stop()
        if seconds:
            total = sum(seconds.values())
            seconds["updating"] = total - seconds.get("sampling", 0.0) - seconds.get("scoring", 0.0)
            self._means.add({f"time/{phase}": value for phase, value in seconds.items()})
            tokens = int(self._scored.experience.attention_mask.sum()) if self._scored else 0
            self._means.add({"time/iteration": total, "time/tokens_per_second": tokens / total})

    def _print_completions(self, scored: ScoredRollout, title: str) -> None:
        if not self.is_world_process_zero():
            return
        self._progress.clear()
        rows = slice(self.args.num_completions_to_print)
        seen, scores = scored.responses, {"score": scored.experience.scores[rows].tolist()}
        extras = {name: values[rows] for name, values in scored.extras.items()}
        print_table(completions_table(seen.prompts[rows], seen.completions[rows], scores, title, extras))

    def _sum_over_processes(self, totals: Tensor) -> Tensor:
        summed: Tensor = self.accelerator.reduce(totals.to(self.accelerator.device), reduction="sum")
        return summed

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's; what is measured and not logged yet is saved too, the same in each process."""
        self._close_iteration()
        self._means.spread(self._sum_over_processes, gather_object, self.accelerator.num_processes)
        super()._save_checkpoint(*args, **kwargs)
