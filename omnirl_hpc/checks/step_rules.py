"""The rules about what makes a step: the algorithm, and how its samples are spread over ranks and updates."""

from __future__ import annotations

import math

from omnirl_hpc.checks.require import require_class
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import require
from omnirl_hpc.layout import make_layout
from omnirl_hpc.models.spec import find_spec


def algorithm_is_known(config: Config, world_size: int) -> None:
    require_class("algorithm", "algorithm.name", config.algorithm.name)


def layout_is_possible(config: Config, world_size: int) -> None:
    layout = make_layout(config, rank=0, world_size=world_size)
    prompts = config.data.prompts_per_step
    require(
        prompts % layout.num_replicas == 0,
        f"data.prompts_per_step={prompts} cannot be dealt evenly to {layout.num_replicas} rollout replicas "
        f"({world_size} ranks): use a multiple of {layout.num_replicas}",
    )


def updates_divide_the_step(config: Config, world_size: int) -> None:
    layout = make_layout(config, rank=0, world_size=world_size)
    prompts, updates = config.data.prompts_per_step // layout.num_replicas, config.actor.updates_per_step
    require(
        prompts % updates == 0,
        f"actor.updates_per_step={updates} does not divide the {prompts} prompts of a replica "
        f"(data.prompts_per_step={config.data.prompts_per_step} over {layout.num_replicas} replicas)",
    )


def algorithm_fits(config: Config, world_size: int) -> None:
    """Its own rules about other settings, and those that depend on what it trains on."""
    algorithm = find_class("algorithm", config.algorithm.name)(config)
    n = config.data.samples_per_prompt
    require(
        algorithm.source != "rollout" or n >= 2,
        f"data.samples_per_prompt={n}: advantages compare samples of one prompt, so at least 2 are needed",
    )
    require(
        algorithm.needs == "trajectory" or not config.sampling.shared_noise,
        f"sampling.shared_noise=true is not for algorithm.name={config.algorithm.name}, which samples by ODE "
        "steps alone: all samples of a group would be equal; set it to false",
    )
    require(
        "reference" not in algorithm.policies or config.actor.adapter is not None,
        f"algorithm.name={config.algorithm.name} is to compare with the reference, the model without its "
        "adapter, and actor.train=full has none: set algorithm.kl_coef=0 where the algorithm has it, "
        "or actor.train=lora",
    )
    layout = make_layout(config, rank=0, world_size=world_size)
    updates = config.actor.updates_per_step
    units = config.data.prompts_per_step // layout.num_replicas // updates * algorithm.units_per_prompt
    require(
        units % layout.replica_size == 0,
        f"the {units} samples of an update cannot be split over the {layout.replica_size} ranks of a "
        "replica: change data.samples_per_prompt or actor.updates_per_step",
    )
    share, micro = units // layout.replica_size, config.actor.micro_batch_size
    what = "pairs" if algorithm.needs == "pairs" else "samples"
    require(
        share % micro == 0,
        f"actor.micro_batch_size={micro} does not divide the {share} {what} that a rank trains in one update "
        "(data.prompts_per_step x data.samples_per_prompt / ranks / actor.updates_per_step; pairs count once "
        f"for each prompt): use a divisor of {share}, such as {math.gcd(share, micro)}",
    )


def experts_take_turns(config: Config, world_size: int) -> None:
    spec, window = find_spec(config.model.family), config.sampling.window
    if len(spec.experts) == 1:
        return
    networks = (
        f"{spec.title} has {len(spec.experts)} networks that take turns, of which one is trained at a time"
    )
    require(
        find_class("algorithm", config.algorithm.name).needs == "trajectory",
        f"algorithm.name={config.algorithm.name} draws a timestep for each sample, and {networks}: choose an "
        "algorithm on trajectories, such as algorithm=flow_grpo",
    )
    require(
        window.per == "step",
        f"sampling.window.per={window.per} draws windows that differ between samples, and {networks}: set "
        "sampling.window.per=step",
    )


def evaluation_is_possible(config: Config, world_size: int) -> None:
    evaluation = config.evaluation
    if not evaluation.every:
        return
    layout = make_layout(config, rank=0, world_size=world_size)
    require(
        evaluation.num_prompts % layout.num_replicas == 0,
        f"evaluation.num_prompts={evaluation.num_prompts} cannot be dealt evenly to {layout.num_replicas} "
        f"rollout replicas ({world_size} ranks): use a multiple of {layout.num_replicas}",
    )
    samples = evaluation.num_prompts // layout.num_replicas * evaluation.samples_per_prompt
    require(
        samples % layout.replica_size == 0,
        f"the {samples} images of a replica (evaluation.num_prompts x evaluation.samples_per_prompt / "
        f"replicas) cannot be split over its {layout.replica_size} ranks: "
        "change evaluation.samples_per_prompt",
    )
