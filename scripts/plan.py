"""How much memory a run of scripts/ppo.py will need, before anything is loaded.

python scripts/plan.py --config configs/quickstart/ppo.yaml [--gpu_gib 24] [--option value ...]

Takes the arguments and the YAML of scripts/ppo.py. Only configurations are read: no weights, no data.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from rich.console import Console
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from ppo import PPOScriptArguments
from ppo_lora import HubError, MemoryPlan, PPOConfig, plan_memory, plan_report


@dataclass
class PlanScriptArguments(PPOScriptArguments):
    """What to plan, against which GPU."""

    gpu_gib: float | None = field(
        default=None,
        metadata={"help": "Memory of the GPU to fit in, GiB. Default: that of the GPU of this machine, if any."},
    )
    json: str | None = field(default=None, metadata={"help": "Write the plan to this file, too."})
    search: bool = field(
        default=True, metadata={"help": "Look for the largest sizes that fit and for what saves memory."}
    )


@dataclass
class PlannedConfig(PPOConfig):
    """The configuration of a run that may be meant for another machine: bf16 is not refused for want of a GPU."""

    def __post_init__(self) -> None:
        wanted = not self.use_cpu if self.bf16 is None else self.bf16
        if not torch.cuda.is_available():
            self.bf16 = self.tf32 = False
        super().__post_init__()
        if not torch.cuda.is_available():
            self.bf16 = wanted


def plan(script_args: PlanScriptArguments, training_args: PPOConfig, model_args: ModelConfig) -> MemoryPlan:
    """The plan of the run that the arguments describe."""
    if model_args.model_name_or_path is None:
        raise ValueError("There is no model to plan for; name one with --model_name_or_path.")
    model_args.use_peft = True
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return plan_memory(
        model_args.model_name_or_path,
        training_args,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        policy_adapter=script_args.policy_adapter,
        reference_adapter=script_args.reference_adapter,
        value_adapter=script_args.value_adapter,
        reward_adapter=script_args.reward_adapter,
        gpu_bytes=gpu_bytes(script_args.gpu_gib),
        search=script_args.search,
    )


def gpu_bytes(gib: float | None) -> int | None:
    """Bytes of the GPU that is named.

    Raises:
        ValueError: it is no size.
    """
    if gib is not None and not 0 < gib < 2**20:
        raise ValueError(f"gpu_gib is {gib:g}; expected the memory of a GPU in GiB, such as 24.")
    return None if gib is None else int(gib * 2**30)


def parsed() -> tuple[PlanScriptArguments, PlannedConfig, ModelConfig]:
    """What the command line and the YAML say.

    Raises:
        ValueError: the YAML is none, or something is not known.
    """
    parser = TrlParser((PlanScriptArguments, PlannedConfig, ModelConfig))
    try:
        made: tuple[PlanScriptArguments, PlannedConfig, ModelConfig] = parser.parse_args_and_config(
            fail_with_unknown_args=True
        )
    except yaml.YAMLError as error:
        raise ValueError(f"The --config file is no YAML: {error}; write an option a line, as 'name: value'.") from None
    except ValueError as error:
        if (unknown := re.search(r"\[('--.*)\]", str(error))) is None:
            raise
        raise ValueError(f"Unknown options: {unknown[1]}. Remove them; docs/options.md has those there are.") from None
    return made


def main() -> None:
    """Read the arguments, plan, print.

    Raises:
        SystemExit: what was given cannot be planned; the message is one line.
    """
    try:
        script_args, training_args, model_args = parsed()
        made = plan(script_args, training_args, model_args)
        Console().print(plan_report(made))
        if made.gpu is None and script_args.search:
            print("\nThere is no GPU here: name one's memory with --gpu_gib for the largest sizes that fit.")
        if script_args.json:
            Path(script_args.json).write_text(json.dumps(made.as_dict(), indent=2) + "\n")
    except (HubError, OSError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {' '.join(str(error).split())}") from None


if __name__ == "__main__":
    main()
