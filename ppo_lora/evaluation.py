"""Several policies on one base answer the same prompts with the same random numbers, and every scorer judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .adapters import SHARED, AdapterLike, read_roles
from .data import PromptDataset
from .draws import uniform_draws
from .manifest import package_versions
from .responses import read_responses
from .reward_calls import RewardFunction
from .roles import Role, check_policy_name, label
from .rollout import sample
from .scorers import Scorer
from .setup import check_lengths, stop_token_ids, tokenizer_for
from .shared_base import SharedBase
from .types import Rollout
from .validation import check_number

BASE = "base"
"""The name of the policy without an adapter."""

_DRAWS = 4  # a stream of random numbers; 1 to 3 are the trainer's
_UNUSED = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
"""SharedBase's own policy role: nobody samples from it here, so it is as small as can be."""


@dataclass
class EvaluationConfig:
    """How policies are sampled and compared; names are PPOConfig's where it has them."""

    num_samples: int = field(default=4, metadata={"help": "Responses of each policy to each prompt."})
    best_of: list[int] | None = field(
        default=None,
        metadata={"help": "Each n of best-of-n, at most num_samples. Default: the powers of two up to that."},
    )
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature; it is in the KL too."})
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
    max_completion_length: int = field(default=256, metadata={"help": "Longest response in tokens."})
    stop_token_ids: list[int] | None = field(
        default=None, metadata={"help": "Token ids that end a response, beside the tokenizer's and the model's EOS."}
    )
    local_rollout_forward_batch_size: int = field(
        default=64, metadata={"help": "Rows per sampling batch and per scoring pass."}
    )
    seed: int = field(default=42, metadata={"help": "Of the sampling and of the bootstrap intervals."})
    bf16: bool | None = field(
        default=None, metadata={"help": "Compute in bfloat16. Default: on where a GPU supports it, else off."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model and tokenizer code that comes with a checkpoint."}
    )
    allow_pickle: bool = field(
        default=False,
        metadata={"help": "Read a base or adapters that have no safetensors. A pickle can run code when it is read."},
    )

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_completion_length", "local_rollout_forward_batch_size", "max_prompt_length"):
            check_number(
                name, getattr(self, name), lambda n: isinstance(n, int) and n >= 1, "an integer of at least 1"
            )
        check_number("temperature", self.temperature, lambda number: number > 0, "a number above 0")
        check_number("seed", self.seed, lambda number: isinstance(number, int) and number >= 0, "a whole number")
        if self.overlong_prompts not in ("truncate", "drop"):
            raise ValueError(f"overlong_prompts is {self.overlong_prompts!r}; expected 'truncate' or 'drop'.")
        if self.best_of is None:
            self.best_of = [2**power for power in range(self.num_samples.bit_length())]
        self.best_of = sorted(set(self.best_of))
        for n in self.best_of:
            if not 1 <= n <= self.num_samples:
                raise ValueError(
                    f"best_of has {n}; expected numbers from 1 to num_samples={self.num_samples}: the best of n is "
                    "estimated from that many samples. Raise num_samples or leave it out."
                )
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()

    @property
    def generation_options(self) -> dict[str, Any]:
        """Keyword arguments for ``generate``, which prepares the cache: none."""
        return {}


@dataclass(frozen=True)
class PolicySamples:
    """What one policy said to N prompts, K times each, and how that was judged.

    Attributes:
        completions: [N][K] texts or messages.
        completion_ids: [N][K] lists of token ids, the stop token included.
        scores: by scorer, [N, K] float32; NaN where it had nothing to say.
        kl: [N, K] float32, log-probability of the response minus the reference's, in nats; the mean estimates the KL.
        stopped: [N, K] bool, True where the response ended with a stop token.
    """

    completions: list[list[Any]]
    completion_ids: list[list[list[int]]]
    scores: dict[str, Tensor]
    kl: Tensor
    stopped: Tensor

    @property
    def lengths(self) -> Tensor:
        """[N, K] float32, tokens of each response, the stop token included."""
        return torch.tensor([[float(len(ids)) for ids in row] for row in self.completion_ids])


@dataclass(frozen=True)
class Evaluation:
    """All policies' samples.

    Attributes:
        prompts: N texts or lists of messages.
        policies: samples by the policy's name.
        reference: the policy that the KL is measured from.
    """

    prompts: list[Any]
    policies: dict[str, PolicySamples]
    reference: str


def parse_policies(given: Sequence[str]) -> dict[str, str | None]:
    """Policies as a command line names them: ``base``, and ``name=adapter`` for adapters.

    Returns:
        Adapters by name; None for the base itself.

    Raises:
        ValueError: none is given, one is not of that form, or a name is not allowed or given twice.
    """
    policies: dict[str, str | None] = {}
    for text in given:
        name, _, adapter = text.partition("=")
        if (name == BASE) == bool(adapter):
            raise ValueError(
                f"policies has {text!r}; expected {BASE!r} for the base without an adapter, or name=adapter with a "
                "folder or id[@revision][:subfolder], such as ppo=runs/ppo."
            )
        check_policy_name(name)
        if name in policies:
            raise ValueError(f"policies has {name!r} twice; give each policy a name of its own.")
        policies[name] = adapter or None
    if not policies:
        raise ValueError(f"There are no policies to compare. Give {BASE!r}, name=adapter, or several of these.")
    return policies


def choose_reference(policies: Mapping[str, Any], given: str | None = None) -> str:
    """The policy that the KL is measured from: ``given``, else the one called "sft", else the base.

    Raises:
        ValueError: ``given`` is none of the policies and not the base.
    """
    if given is not None and given not in {BASE, *policies}:
        raise ValueError(f"reference is {given!r}; expected one of {sorted({BASE, *policies})}.")
    return given or ("sft" if "sft" in policies else BASE)


def load_policies(
    name_or_path: str,
    policies: Mapping[str, AdapterLike | None],
    config: EvaluationConfig,
    reward: AdapterLike | None = None,
    quantization_config: Any = None,
    **model_kwargs: Any,
) -> SharedBase:
    """Load a base once, with each policy's adapter, the base itself as the policy "base", and the reward adapter.

    Args:
        name_or_path: model id or folder.
        policies: adapters by name, as :meth:`SharedBase.add_policy` takes them; None for the base itself.
        config: whether pickles and code of the model's own are allowed, and the dtype.
        reward: ``SEQ_CLS`` adapter with its head; None if only functions score.
        quantization_config: a ``BitsAndBytesConfig`` for an 8-bit or 4-bit base.
        model_kwargs: for ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        ValueError: an adapter cannot be read or does not fit.
        HubError: the Hub does not give the base or an adapter.
    """
    adapters = read_roles({BASE: None, **policies}, config.allow_pickle)
    base = SharedBase.from_pretrained(
        name_or_path,
        value=SHARED,
        reward=reward,
        peft_config=_UNUSED,
        quantization_config=quantization_config,
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
        **model_kwargs,
    )
    for name, adapter in adapters.items():
        base.add_policy(name, adapter)
    if torch.cuda.is_available() and base.quantization_method is None:
        base.to("cuda")
    if config.bf16:
        base.compute_dtype = torch.bfloat16
    return base


def provenance(base: SharedBase) -> dict[str, Any]:
    """What an evaluation stands on: base, adapters with the hashes of their contents, package versions."""
    origins = {label(role): origin for role, origin in base.adapters.origins.items()}
    own = {Role.POLICY.value, Role.REFERENCE.value, Role.VALUE.value}
    return {
        "base": base.identity.entry(),
        "adapters": {name: origin and asdict(origin) for name, origin in origins.items() if name not in own},
        "versions": package_versions(),
    }


def evaluate_policies(
    base: SharedBase,
    policies: Sequence[str],
    dataset: Dataset,
    reward_funcs: Sequence[RewardFunction],
    config: EvaluationConfig,
    reference: str = BASE,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Evaluation:
    """Sample every policy on every prompt, and score the samples.

    Each response has random numbers of its own, named by the seed, its prompt's place in the data set and its place
    among the prompt's samples: they are the same for every policy and do not depend on the batch size, nor on which
    other policies and later prompts there are. What rounding makes of the logits in batches of other shapes can still
    change a token, rarely in float32, more often in bfloat16 or on a quantized base.

    Args:
        base: with these policies on it, as :func:`load_policies` makes it.
        policies: names of roles that answer.
        dataset: TRL's prompt-only format, text or messages; other columns go to the reward functions.
        reward_funcs: functions as :class:`Scorer` takes them; the base's reward adapter scores too, if it has one.
        config: how to sample.
        reference: the role that the KL is measured from.
        tokenizer: the base's own if None.
        progress: called with the policy's name and the number of responses whenever some are finished.

    Raises:
        ValueError, TypeError: there is no scorer, or prompts are not in that format or too long for the base.
        FloatingPointError: a policy's or the reference's logits are not finite.
    """
    tokenizer = tokenizer_for(tokenizer, base.config.name_or_path, base, config)
    prompts = PromptDataset(
        dataset, tokenizer, config.max_prompt_length, config.overlong_prompts, name="the data set of prompts"
    )
    check_lengths([prompts], base, config)
    scorer = Scorer(base, reward_funcs, None, config.local_rollout_forward_batch_size)
    sampler = _Sampler(base, prompts, scorer, tokenizer, config)
    samples = {name: sampler.samples(name, reference, progress or (lambda *_: None)) for name in policies}
    return Evaluation(prompts.batch(range(len(prompts))).columns["prompt"], samples, reference)


@dataclass(frozen=True)
class _Sampler:
    base: SharedBase
    prompts: PromptDataset
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    config: EvaluationConfig

    def samples(self, policy: str, reference: str, progress: Callable[[str, int], None]) -> PolicySamples:
        """One policy's responses, K to each prompt, in batches of rows."""
        completions: list[Any] = []
        ids: list[list[int]] = []
        columns: list[dict[str, Tensor]] = []
        for rollout, responses in self._responses(policy):
            _, scores = self.scorer(responses, trainer_state=None)
            kl = self._kl(policy, reference, rollout)
            columns.append({"kl": kl, "stopped": rollout.stopped, **{f"score {n}": s for n, s in scores.items()}})
            completions += responses.completions
            ids += responses.completion_ids
            progress(policy, len(kl))
        table = {name: torch.cat([piece[name].cpu() for piece in columns]) for name in columns[0]}
        table = {name: column.view(-1, self.config.num_samples) for name, column in table.items()}
        return PolicySamples(
            completions=self._by_prompt(completions),
            completion_ids=self._by_prompt(ids),
            scores={name: table[f"score {name}"] for name in self.scorer.names},
            kl=table["kl"],
            stopped=table["stopped"],
        )

    def _responses(self, policy: str) -> Iterator[tuple[Rollout, Any]]:
        config, count = self.config, self.config.num_samples
        stops = stop_token_ids(self.tokenizer, self.base, config)
        for rows in torch.arange(len(self.prompts) * count).split(config.local_rollout_forward_batch_size):
            places = (rows // count).tolist()
            prompts = self.prompts.batch(places)
            draws = {
                place: uniform_draws(count, config.max_completion_length, config.seed, _DRAWS, place)
                for place in dict.fromkeys(places)
            }
            own = torch.stack([draws[place][row % count] for place, row in zip(places, rows.tolist(), strict=True)])
            rollout = sample(self.base, prompts, config, stops, self.tokenizer.pad_token_id, own, policy)
            yield rollout, read_responses(prompts, rollout, self.tokenizer)

    @torch.no_grad()
    def _kl(self, policy: str, reference: str, rollout: Rollout) -> Tensor:
        """[B] float32: log-probability of each response minus the reference's, both at the sampling temperature."""
        inputs = (rollout.sequences, rollout.attention_mask, rollout.response_length, self.config.temperature)
        own = self.base.logprobs(policy, *inputs).sum(dim=1)
        other = own if policy == reference else self.base.logprobs(reference, *inputs).sum(dim=1)
        for name, logprobs in ((policy, own), (reference, other)):
            if not bool(logprobs.isfinite().all()):
                raise FloatingPointError(
                    f"Log-probabilities under {name} are not finite. Its adapter is broken, or the dtype overflows "
                    "(use bfloat16 or float32)."
                )
        return own - other

    def _by_prompt(self, rows: list[Any]) -> list[list[Any]]:
        count = self.config.num_samples
        return [rows[first : first + count] for first in range(0, len(rows), count)]
