"""PPO for language models on one shared, quantized base with a LoRA adapter per role."""

from .adapters import Adapter, read_adapter
from .advantages import generalized_advantage_estimation
from .comparison import Comparison, compare_policies
from .config import PPOConfig
from .evaluation import (
    Evaluation,
    EvaluationConfig,
    PolicySamples,
    choose_reference,
    evaluate_policies,
    load_policies,
    parse_policies,
    provenance,
)
from .function_names import load_function, reward_source
from .heads import ScalarHead
from .hub import AdapterSource, HubError, hub_errors
from .logprobs import token_logprobs
from .losses import clipped_policy_loss, clipped_value_loss, entropy_bonus
from .masking import masked_mean, masked_var, masked_whiten
from .memory_plan import Lever, MemoryPlan, plan_memory
from .plan_display import plan_report
from .preparation import default_peft_config
from .responses import Responses
from .reward_calls import RewardSourceError
from .rewards import kl_penalty, token_rewards
from .roles import Role
from .scorers import Scorer
from .setup import StartupError
from .shared_base import SharedBase
from .statistics import best_of_n, best_of_n_kl, bootstrap_interval, distinct_n, win_rate
from .trainer import PPOTrainer
from .types import Experience, Prompts, Rollout
from .verifiers import format_reward, numeric_answer_reward

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterSource",
    "Comparison",
    "Evaluation",
    "EvaluationConfig",
    "Experience",
    "HubError",
    "Lever",
    "MemoryPlan",
    "PPOConfig",
    "PPOTrainer",
    "PolicySamples",
    "Prompts",
    "Responses",
    "RewardSourceError",
    "Role",
    "Rollout",
    "ScalarHead",
    "Scorer",
    "SharedBase",
    "StartupError",
    "__version__",
    "best_of_n",
    "best_of_n_kl",
    "bootstrap_interval",
    "choose_reference",
    "clipped_policy_loss",
    "clipped_value_loss",
    "compare_policies",
    "default_peft_config",
    "distinct_n",
    "entropy_bonus",
    "evaluate_policies",
    "format_reward",
    "generalized_advantage_estimation",
    "hub_errors",
    "kl_penalty",
    "load_function",
    "load_policies",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "numeric_answer_reward",
    "parse_policies",
    "plan_memory",
    "plan_report",
    "provenance",
    "read_adapter",
    "reward_source",
    "token_logprobs",
    "token_rewards",
    "win_rate",
]
