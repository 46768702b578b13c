"""The trainer's evaluation: the same responses whatever the batch size and the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from .collector import Collector, ScoredRollout
from .config import PPOConfig
from .data import PromptDataset
from .draws import uniform_draws
from .metrics import RunningMeans
from .rollout import TokenScores, build_experience, rescaling_metrics, rollout_metrics, source_metrics
from .statistics import best_of_n
from .types import Rollout

_EVALUATIONS = 3  # a stream of random numbers; the trainer's own are 1 and 2, the comparison of policies has 4


def evaluate_prompts(
    collector: Collector, dataset: PromptDataset, config: PPOConfig, accelerator: Any, kl_coef: float, state: Any
) -> tuple[ScoredRollout, dict[str, float]]:
    """Answer every prompt ``samples_per_eval_prompt`` times and measure the responses of all processes together.

    Each response has random numbers of its own, named by the seed, its prompt's place in the data set and its place
    among the prompt's responses.

    Args:
        collector: samples and scores.
        dataset: N prompts.
        config: how.
        accelerator: the trainer's, which gathers from the processes.
        kl_coef: weight of the KL penalty.
        state: the trainer's, for reward functions.

    Returns:
        This process's rollout, and the metrics of all rows: those of a training rollout and, where there are several
        responses a prompt, ``objective/best_of_<n>``, the expected score of the best of n.
    """
    samples, world = config.samples_per_eval_prompt, config.world_size
    # All processes answer equally many prompts, so that they meet when rows are gathered; extra ones are cut off then.
    places = [(config.process_index + row * world) % len(dataset) for row in range(-(-len(dataset) // world))]
    prompts = dataset.batch(places).repeat(samples)
    rollout = collector.sample_drawn(prompts, _draws(places, samples, config))
    scored = collector.score(prompts, rollout, kl_coef, trainer_state=state)
    rows = _Rows.of(scored).gathered(accelerator, samples, len(dataset) * samples)
    metrics = {**_logged_everywhere(scored, accelerator), **rows.metrics(kl_coef, config, samples)}
    return scored, {name: float(value) for name, value in metrics.items() if float(value) == float(value)}


def _logged_everywhere(scored: ScoredRollout, accelerator: Any) -> dict[str, float]:
    """What reward sources logged, the mean over the processes that did."""
    means = RunningMeans()
    means.add(scored.logged)
    return means.pop(lambda totals: accelerator.reduce(totals.to(accelerator.device), reduction="sum"), gather_object)


def evaluation_metrics(sources: Sequence[str], config: PPOConfig) -> list[str]:
    """Names of what :func:`evaluate_prompts` measures, where the reward sources of these names say something."""
    samples = config.samples_per_eval_prompt
    zeros, mask = torch.zeros(samples, 1), torch.ones(samples, 1, dtype=torch.bool)
    exact_kl = zeros if config.log_exact_kl else None
    rows = _Rows(
        rollout=Rollout(zeros, mask, mask, mask[:, 0]),
        tokens=TokenScores(zeros, zeros, zeros, zeros, exact_kl),
        scores=zeros[:, 0],
        raw_scores=zeros[:, 0],
        by_source={name: zeros[:, 0] for name in sources},
    )
    return list(rows.metrics(0.0, config, samples))


def _draws(places: Sequence[int], samples: int, config: PPOConfig) -> Tensor:
    """[R * samples, max_completion_length] uniform numbers, named by each prompt's place."""
    length = config.max_completion_length
    return torch.cat([uniform_draws(samples, length, config.seed, _EVALUATIONS, place) for place in places])


@dataclass(frozen=True)
class _Rows:
    """What metrics are made of, for some rows."""

    rollout: Rollout
    tokens: TokenScores
    scores: Tensor
    raw_scores: Tensor
    by_source: dict[str, Tensor]

    @classmethod
    def of(cls, scored: ScoredRollout) -> _Rows:
        """A rollout's rows, without the prompts, whose padding differs between processes."""
        rollout, mask = scored.responses.rollout, scored.responses.rollout.response_mask
        alone = {"sequences": rollout.responses, "attention_mask": mask}
        scores = (scored.experience.scores, scored.raw_scores)
        return cls(replace(rollout, **alone), scored.tokens, *scores, scored.by_source)

    def gathered(self, accelerator: Any, samples: int, count: int) -> _Rows:
        """The first ``count`` rows of all processes, in the order that one process would have them in."""

        def gather(rows: Tensor) -> Tensor:
            return _interleaved(rows, accelerator, samples)[:count]

        return _Rows(
            rollout=_mapped(gather, self.rollout),
            tokens=_mapped(gather, self.tokens),
            scores=gather(self.scores),
            raw_scores=gather(self.raw_scores),
            by_source={name: gather(values) for name, values in self.by_source.items()},
        )

    def metrics(self, kl_coef: float, config: PPOConfig, samples: int) -> dict[str, Any]:
        """What is logged; NaN where a source had nothing to say."""
        experience = build_experience(self.rollout, self.tokens, self.scores, kl_coef, config)
        found = rollout_metrics(experience, self.tokens, self.rollout, kl_coef, config)
        found |= rescaling_metrics(self.raw_scores, experience, config)
        scores = self.raw_scores.view(-1, samples)
        scores = scores[~scores.isnan().any(dim=1)]
        powers = [2**power for power in range(samples.bit_length())] if samples > 1 and len(scores) else []
        best_of = {f"objective/best_of_{n}": best_of_n(scores, n) for n in powers}
        return {**found, **source_metrics(self.by_source), **best_of}


def _mapped(function: Callable[[Tensor], Tensor], record: Any) -> Any:
    """A record with the function applied to each of its tensors."""
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    return replace(record, **{name: function(value) for name, value in values.items() if isinstance(value, Tensor)})


def _interleaved(rows: Tensor, accelerator: Any, samples: int) -> Tensor:
    """Rows of all processes: the ``samples`` rows of the first prompt of each of them, then of the second.

    Args:
        rows: [R * samples] or [R * samples, T], with T differing between processes.
        accelerator: the trainer's.
        samples: rows a prompt.
    """
    if accelerator.num_processes == 1:
        return rows
    numbers = rows.to(accelerator.device)
    numbers = numbers.int() if rows.dtype == torch.bool else numbers
    if rows.dim() > 1:
        numbers = accelerator.pad_across_processes(numbers, dim=1)
    every = accelerator.gather(numbers.contiguous())
    by_prompt = every.unflatten(0, (accelerator.num_processes, -1, samples)).transpose(0, 1).flatten(0, 2)
    return by_prompt.to(rows.dtype)
