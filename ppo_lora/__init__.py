"""PPO for language models on one shared, quantized base with a LoRA adapter per role."""

from .adapters import Adapter, AdapterSource, read_adapter
from .advantages import generalized_advantage_estimation
from .config import PPOConfig
from .heads import ScalarHead
from .logprobs import token_logprobs
from .losses import clipped_policy_loss, clipped_value_loss, entropy_bonus
from .masking import masked_mean, masked_var, masked_whiten
from .preparation import default_peft_config
from .rewards import kl_penalty, token_rewards
from .roles import Role
from .scorers import Responses, Scorer
from .shared_base import SharedBase
from .trainer import PPOTrainer
from .types import Experience, Prompts, Rollout
from .verifiers import format_reward, numeric_answer_reward

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterSource",
    "Experience",
    "PPOConfig",
    "PPOTrainer",
    "Prompts",
    "Responses",
    "Role",
    "Rollout",
    "ScalarHead",
    "Scorer",
    "SharedBase",
    "__version__",
    "clipped_policy_loss",
    "clipped_value_loss",
    "default_peft_config",
    "entropy_bonus",
    "format_reward",
    "generalized_advantage_estimation",
    "kl_penalty",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "numeric_answer_reward",
    "read_adapter",
    "token_logprobs",
    "token_rewards",
]
