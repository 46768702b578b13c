"""What a run leaves in folders and on the Hub, and how it goes on from there: roles in place of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerControl
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from .card import CardFacts, write_card
from .checkpoint import Stateful, check_checkpoint, load_roles, load_states, save_roles, save_states
from .collector import Collector
from .config import PPOConfig
from .hub import hub_errors
from .manifest import package_versions
from .roles import Role, label
from .scorers import Scorer
from .setup import StartupError
from .shared_base import SharedBase

_SCORE_OPTIONS = (
    *("score_clip", "missing_eos_penalty", "missing_eos_score"),
    *("overlong_penalty", "overlong_buffer_length"),
)


class SavingTrainer(Trainer):
    """A Trainer whose folders hold the policy as plain PEFT, with the value role, a manifest and a model card.

    What is annotated here is set by the class that extends it.

    Attributes:
        base: whose roles are saved, and loaded into.
        scorer: whose reward sources and weights are told of.
    """

    args: PPOConfig
    control: TrainerControl
    base: SharedBase
    scorer: Scorer
    _tokenizer: PreTrainedTokenizerBase
    _collector: Collector
    _states: dict[str, Stateful]
    _tag_names = ["ppo_lora", "ppo", "trl"]

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The policy as plain PEFT at the top, the value role below it, the tokenizer and a manifest."""
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        resumable = folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
        with_value = self.args.save_value or resumable
        save_roles(folder, self.base, self._schedule(), self._reward_description(), with_value)
        if resumable:
            save_states(folder, self._states)
        self._tokenizer.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Refuse what a run cannot go on from exactly; Trainer would start with a new optimizer without a word.

        Raises:
            StartupError: a file is missing or broken, or the checkpoint is another run's.
        """
        elsewhere = self.is_deepspeed_enabled or self.is_fsdp_enabled
        try:
            check_checkpoint(
                resume_from_checkpoint, TRAINER_STATE_NAME, *(() if elsewhere else (OPTIMIZER_NAME, SCHEDULER_NAME))
            )
            self._load_roles(resume_from_checkpoint)
        except ValueError as error:
            raise StartupError(str(error)) from error

    def _load_roles(self, folder: str | None) -> None:
        """Copy the saved adapters into the parameters in place; PEFT's own loading would freeze and unfreeze them."""
        load_roles(folder or "", self.base, self._schedule())
        load_states(folder or "", self._states)

    def _load_best_model(self) -> None:
        self._load_roles(self.state.best_model_checkpoint)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Trainer's; what is to be loaded at the end has to be saved, also where no checkpoint is due."""
        is_best: bool = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        if is_best and self.control.should_save:
            # transformers 5.0 forgets it with save_strategy="best", and then loads nothing at the end.
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / folder)
        return is_best

    # The Hub

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Trainer's, which copies the policy's files into the output folder: the other files have to go with them."""
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            self._save(self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's; what the Hub refuses is said in one line, before anything is trained."""
        with hub_errors("repository", self._repository):
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save and push the policy, its value role if ``save_value``, and the model card; see Trainer's.

        Raises:
            HubError: the Hub does not take it. Everything is in the output folder by then.
        """
        with hub_errors("repository", self._repository):
            return super().push_to_hub(*args, **kwargs)

    @property
    def _repository(self) -> str:
        return self.args.hub_model_id or Path(self.args.output_dir).name

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the policy's README.md: base, roles, reward, data, options, last metrics, curve, how to load it."""
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        write_card(
            folder,
            CardFacts(
                name=model_name or folder.name,
                location=self.hub_model_id or folder.name,
                base=self.base.identity,
                lora=self.base.adapter(Role.POLICY).config,
                roles={label(role): self.base.adapters.origins[role] for role in self.base.roles},
                reward_weights=self._reward_description()["weights"],
                config=self.args,
                history=self.state.log_history,
                dataset=dataset_name,
                value=self.args.save_value,
                tags={*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])},
                versions=package_versions(),
            ),
        )

    # What manifests tell

    def _schedule(self) -> dict[str, int]:
        """What has to stay as it is for a run to be resumed."""
        args = self.args
        several = {"num_generations": args.num_generations} if args.num_generations > 1 else {}
        return {"steps_per_iteration": args.steps_per_iteration, "batch_size": args.batch_size, **several}

    def _reward_description(self) -> dict[str, Any]:
        """How scores become rewards, for the manifest."""
        args = self.args
        return {
            "weights": dict(zip(self.scorer.names, self.scorer.weights, strict=True)),
            "normalisation": self._collector.normalizer.description(),
            "whitened": args.whiten_rewards,
            **{name: getattr(args, name) for name in _SCORE_OPTIONS},
        }
