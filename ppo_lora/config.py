"""Every knob of PPO, validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from transformers import TrainingArguments

from .given_options import json_object, more_is_better, take_new_names, without_tokens
from .losses import LOSS_AGGREGATIONS
from .normalization import SCORE_NORMALIZATIONS
from .rewards import KL_ESTIMATORS
from .validation import check_config, check_steps, steps_of_episodes


class SamplingOptions(Protocol):
    """What sampling reads of a configuration, under PPOConfig's names."""

    max_completion_length: int
    stop_token_ids: list[int] | None
    temperature: float
    local_rollout_forward_batch_size: int
    trust_remote_code: bool

    @property
    def generation_options(self) -> dict[str, Any]:
        """Keyword arguments for ``generate``, which prepares the cache."""


@dataclass
class PPOConfig(TrainingArguments):
    r"""Configuration of [`PPOTrainer`]. Everything of [`~transformers.TrainingArguments`] works too.

    One optimizer step is one mini-batch. Rows per process and iteration are `per_device_train_batch_size *
    gradient_accumulation_steps * num_mini_batches`; an iteration takes `num_ppo_epochs * num_mini_batches` steps, and
    logging, evaluation and saving that fall due inside an iteration happen at its end.

    Names are TRL's: those of its former PPOConfig for what is PPO's own, those of its 1.x trainers for the rest.
    """

    # Other defaults than transformers', for PPO.
    metric_for_best_model: str | None = field(
        default=None,
        metadata={
            "help": "Metric of load_best_model_at_end and save_strategy='best', with or without eval_ before it; then "
            "objective/scores unless another is named."
        },
    )
    greater_is_better: bool | None = field(
        default=None,
        metadata={"help": "Whether more of metric_for_best_model is better. Default: yes, but for a KL or a loss."},
    )
    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of the policy adapter."})
    adam_epsilon: float = field(default=1e-5, metadata={"help": "Epsilon of AdamW (arXiv 2403.17031 uses 1e-5)."})
    logging_steps: float = field(
        default=1, metadata={"help": "Log every X optimizer steps, at the end of the iteration they fall in."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Leave off: a non-finite loss stops the run, so there is none to hide."}
    )
    gradient_checkpointing: bool = field(
        default=True, metadata={"help": "Recompute activations in the backward pass to save memory."}
    )
    bf16: bool | None = field(
        default=None,
        metadata={"help": "Compute in bfloat16 with float32 adapters. Default: on where a GPU supports it, else off."},
    )

    # Model and data
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for from_pretrained when `model` is a string."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model and tokenizer code that comes with a checkpoint."}
    )
    allow_pickle: bool = field(
        default=False,
        metadata={"help": "Read a base or adapters that have no safetensors. A pickle can run code when it is read."},
    )
    max_prompt_length: int | None = field(
        default=512, metadata={"help": "Longest prompt in tokens; None for no limit. See overlong_prompts."}
    )
    overlong_prompts: str = field(
        default="truncate",
        metadata={
            "help": "What happens to prompts over max_prompt_length: keep their end, or leave them out.",
            "choices": ["truncate", "drop"],
        },
    )

    # Rollouts
    max_completion_length: int = field(default=256, metadata={"help": "Longest response in tokens."})
    temperature: float = field(
        default=0.7, metadata={"help": "Sampling temperature; it divides the logits in every log-probability too."}
    )
    top_p: float = field(
        default=1.0, metadata={"help": "Only 1.0: PPO's log-probabilities do not know a truncated distribution."}
    )
    top_k: int = field(
        default=0, metadata={"help": "Only 0: PPO's log-probabilities do not know a truncated distribution."}
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "How generate keeps keys and values: cache_implementation, cache_config."},
    )
    stop_token_ids: list[int] | None = field(
        default=None, metadata={"help": "Token ids that end a response, beside the tokenizer's and the model's EOS."}
    )
    local_rollout_forward_batch_size: int = field(
        default=64, metadata={"help": "Rows per sampling batch and per scoring pass."}
    )
    logits_chunk_mib: int = field(
        default=32,
        metadata={"help": "Logits held at once, in MiB of float32; fewer take more passes over lm_head."},
    )
    num_generations: int = field(
        default=1,
        metadata={
            "help": "Responses to each prompt in an iteration (TRL's GRPOConfig): its rows are so many fewer prompts."
        },
    )
    num_generations_eval: int | None = field(
        default=None,
        metadata={
            "help": "Responses to each evaluation prompt, best-of-n is estimated from them (TRL's GRPOConfig). "
            "Default: num_generations."
        },
    )
    total_episodes: int | None = field(
        default=None,
        metadata={"help": "Responses to sample over the whole run, all processes; instead of max_steps or epochs."},
    )

    # Rewards
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each reward source: the reward adapter first, then reward_funcs."}
    )
    reward_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments for from_pretrained of reward models given by name: dtype, revision, ..., and "
            "load_in_4bit or load_in_8bit with other fields of BitsAndBytesConfig."
        },
    )
    reward_server_timeout: float = field(
        default=60.0, metadata={"help": "Seconds to wait for an answer of a reward server."}
    )
    reward_server_retries: int = field(
        default=5,
        metadata={"help": "How often a batch is sent again after a lost connection, a time-out, a 429 or a 5xx."},
    )
    reward_server_concurrency: int = field(
        default=8, metadata={"help": "Batches that are sent to a reward server at the same time."}
    )
    reward_server_batch_size: int = field(
        default=32, metadata={"help": "Completions in one request to a reward server."}
    )
    score_normalization: str = field(
        default="none",
        metadata={
            "help": "Scores by the running mean and standard deviation of all so far (TRL <= 0.11's use_score_scaling "
            "with use_score_norm), or shifted by their mean over demonstration_dataset (arXiv 2403.17031).",
            "choices": list(SCORE_NORMALIZATIONS),
        },
    )
    score_clip: float | None = field(
        default=None,
        metadata={"help": "Clip normalised scores to this on both sides (TRL <= 0.11). Default: no clipping."},
    )
    kl_coef: float = field(
        default=0.05, metadata={"help": "Weight of the KL to the reference; where it starts, if there is a kl_target."}
    )
    kl_estimator: str = field(
        default="k1",
        metadata={
            "help": "Estimator of the KL to the reference (Schulman 2020, Approximating KL divergence).",
            "choices": sorted(KL_ESTIMATORS),
        },
    )
    kl_in: str = field(
        default="reward",
        metadata={
            "help": "Where a token's own KL penalty goes: into its reward (Ziegler et al. 2019, arXiv 1909.08593), or "
            "into the loss, corrected for the ratio (arXiv 2512.02556). The objective is the same.",
            "choices": ["reward", "loss"],
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={
            "help": "Adapt kl_coef so that objective/kl, nats a response, comes to this (Ziegler et al. 2019, section "
            "2.2). Default: kl_coef stays."
        },
    )
    kl_horizon: int = field(
        default=10000, metadata={"help": "Responses over which kl_coef follows kl_target; fewer follow faster."}
    )
    normalize_kl_by_length: bool = field(
        default=False, metadata={"help": "Divide each response's KL penalty in the reward by its number of tokens."}
    )
    log_exact_kl: bool = field(
        default=False,
        metadata={"help": "Log objective/exact_kl too, the KL over the whole vocabulary at every sampled token."},
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Positive number taken off the score of a response without a stop token."}
    )
    missing_eos_score: float | None = field(
        default=None, metadata={"help": "Score that a response without a stop token gets instead of its own."}
    )
    overlong_penalty: float | None = field(
        default=None,
        metadata={
            "help": "Positive number taken off the score of a response of max_completion_length tokens, and ever less "
            "of it over overlong_buffer_length tokens before (DAPO, arXiv 2503.14476, section 3.4)."
        },
    )
    overlong_buffer_length: int | None = field(
        default=None, metadata={"help": "Tokens before max_completion_length over which overlong_penalty grows."}
    )
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Scale the per-token rewards to unit variance; their mean stays."}
    )
    whiten_advantages: bool = field(default=True, metadata={"help": "Scale and shift the advantages to N(0, 1)."})

    # PPO
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over each rollout batch."})
    num_mini_batches: int = field(default=1, metadata={"help": "Mini-batches (optimizer steps) per pass."})
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Put rows of like length together up to so many tokens, padding included, for each forward and "
            "backward (verl's ppo_max_token_len_per_gpu). Default: per_device_train_batch_size rows."
        },
    )
    pack_sequences: bool | None = field(
        default=None,
        metadata={
            "help": "Read the rows of a micro-batch or scoring batch as one, without padding. Default: where the "
            "base's attention is sdpa or flash attention. With true, others pay with a mask of all pairs of tokens."
        },
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalized advantage estimation."})
    cliprange: float = field(
        default=0.2, metadata={"help": "Clip range of the policy's ratio (Schulman et al. 2017, arXiv 1707.06347)."}
    )
    cliprange_high: float | None = field(
        default=None,
        metadata={
            "help": "Clip range above 1, where it differs (clip-higher of arXiv 2503.14476). Default: cliprange."
        },
    )
    dual_clip: float | None = field(
        default=None,
        metadata={
            "help": "Bound of the ratio, over 1, where the advantage is negative (Ye et al. 2020, arXiv 1912.09729). "
            "Default: none."
        },
    )
    target_kl: float | None = field(
        default=None,
        metadata={
            "help": "End an iteration's updates where a mini-batch's policy/approxkl_avg is over 1.5 times this (as "
            "OpenAI Spinning Up). Default: never."
        },
    )
    ratio_threshold: float | None = field(
        default=None,
        metadata={"help": "Skip mini-batches whose mean ratio is over this (TRL's former option). Default: never."},
    )
    loss_aggregation: str = field(
        default="token_mean",
        metadata={
            "help": "How tokens' losses become one: mean over tokens, mean over responses of their token means (arXiv "
            "2402.03300), or sum over responses * max_completion_length (arXiv 2503.20783).",
            "choices": list(LOSS_AGGREGATIONS),
        },
    )
    importance_sampling_cap: float | None = field(
        default=None,
        metadata={
            "help": "Multiply each token's advantage by its probability in training over that in sampling, at most "
            "this (truncated importance sampling, Yao et al. 2025). Default: no correction."
        },
    )
    cliprange_value: float = field(default=0.2, metadata={"help": "Clip range of the value, in units of the score."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    value_warmup_iterations: int = field(
        default=0, metadata={"help": "First iterations that train the value role alone (verl's critic_warmup)."}
    )
    value_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the value adapter and head. Default: learning_rate."}
    )

    # Pretraining mix
    ptx_coef: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the language-model loss, nats a token, on ptx_dataset (gamma of InstructGPT, arXiv "
            "2203.02155, equation 2)."
        },
    )
    ptx_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows of ptx_dataset per process and optimizer step. Default: per_device_train_batch_size."},
    )
    ptx_max_length: int = field(
        default=1024, metadata={"help": "Longest row of ptx_dataset in tokens; what is over it is cut off."}
    )

    # Saving
    save_value: bool = field(
        default=True,
        metadata={
            "help": "Save and push the value role beside the policy, in the folder `value`; checkpoints always have "
            "it."
        },
    )

    # Watching
    startup_checks: str = field(
        default="error",
        metadata={
            "help": "Sample a few responses before the first rollout and look at KL, ratio and rewards: stop where "
            "something is wrong, only warn, or leave it out. Reward functions are called once more.",
            "choices": ["error", "warn", "off"],
        },
    )
    health_warnings: bool = field(
        default=True, metadata={"help": "Say while training what looks unhealthy (docs/watching_a_run.md)."}
    )
    kl_warning: float | None = field(
        default=50.0,
        metadata={"help": "Warn where objective/kl, nats a response, is over this. None: never."},
    )
    sync_timings: bool = field(
        default=False,
        metadata={"help": "Wait for the GPU where a phase ends, so that time/... are exact; training slows a little."},
    )
    log_completions: bool = field(
        default=False, metadata={"help": "Print a table of sample completions at every log and evaluation."}
    )
    num_completions_to_print: int = field(default=3, metadata={"help": "Rows of that table."})

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        take_new_names(self)
        self.model_init_kwargs = json_object("model_init_kwargs", self.model_init_kwargs)
        self.reward_model_init_kwargs = json_object("reward_model_init_kwargs", self.reward_model_init_kwargs)
        self.generation_kwargs = json_object("generation_kwargs", self.generation_kwargs)
        follows = self.save_strategy == "best" or self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        if (self.load_best_model_at_end or follows) and self.metric_for_best_model is None:
            self.metric_for_best_model = "objective/scores"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = more_is_better(self.metric_for_best_model)
        super().__post_init__()
        check_config(self)
        if self.total_episodes is not None:
            self.max_steps = steps_of_episodes(self)
        check_steps(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without tokens: transformers pickles its arguments into folders that it pushes."""
        return without_tokens(vars(self))

    def __repr__(self) -> str:
        """As a dataclass has it, without tokens."""
        shown = ", ".join(f"{name}={value!r}" for name, value in without_tokens(vars(self)).items())
        return f"{type(self).__name__}({shown})"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """See ``TrainingArguments.to_dict``; tokens inside of dicts are taken out too."""
        return without_tokens(super().to_dict())

    @property
    def mini_batch_size(self) -> int:
        """Rows per process and optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def local_batch_size(self) -> int:
        """Rows per process and iteration."""
        return self.mini_batch_size * self.num_mini_batches

    @property
    def batch_size(self) -> int:
        """Rows per iteration, all processes."""
        return self.local_batch_size * self.world_size

    @property
    def prompts_per_iteration(self) -> int:
        """Prompts per iteration, all processes; each is answered `num_generations` times."""
        return self.batch_size // self.num_generations

    @property
    def samples_per_eval_prompt(self) -> int:
        """Responses to each evaluation prompt."""
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration."""
        return self.num_ppo_epochs * self.num_mini_batches

    @property
    def model_options(self) -> dict[str, Any]:
        """Keyword arguments for loading a model by name."""
        given = cast("dict[str, Any]", self.model_init_kwargs or {})
        return {"trust_remote_code": self.trust_remote_code, **given}

    @property
    def generation_options(self) -> dict[str, Any]:
        """Keyword arguments for ``generate``, which prepares the cache."""
        return dict(cast("dict[str, Any]", self.generation_kwargs or {}))
