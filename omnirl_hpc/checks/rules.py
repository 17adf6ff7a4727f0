"""Every rule between settings. One function for each rule; each says which keys disagree and what to change.

All but those about the algorithm, whose file needs torch, run before torch is imported. A rule that needs the
number of ranks takes it from the launcher's environment. Rules lie by subject in the files *_rules.py; those
about any setting are here.
"""

from __future__ import annotations

import math

from omnirl_hpc.checks import actor_rules, engine_rules, model_rules, reward_rules, sampling_rules, step_rules
from omnirl_hpc.checks.node_rules import (
    NODE_RULES,
    given_policies_fit,
    init_adapter_fits,
    step_to_resume_is_there,
    trackers_are_installed,
)
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import one_of, require

DTYPES = ("float32", "bfloat16")
ACTOR_ATTENTION = ("sdpa", "cudnn", "flash_attn", "fa3")
ENGINES = ("diffusers", "vllm_omni")


def check(
    config: Config, world_size: int, files: bool = True, trains: bool = True, algorithm: bool = True
) -> None:
    """Raise ConfigError for the first rule that `config`, run on `world_size` ranks, breaks.

    files=False leaves out the rules about files of the run and of the node, for what is planned elsewhere;
    trains=False those that a command which only samples, on whatever number of ranks, may break;
    algorithm=False those that need the algorithm's file, and with it torch.
    """
    left_out = (() if files else NODE_RULES) + (() if trains else TRAINING_RULES)
    left_out += () if algorithm else ALGORITHM_RULES
    for rule in RULES:
        if rule not in left_out:
            rule(config, world_size)


def counts_are_positive(config: Config, world_size: int) -> None:
    for key, value in {
        "steps": config.steps,
        "timeout_seconds": config.timeout_seconds,
        "threads_per_rank": config.threads_per_rank,
        "data.prompts_per_step": config.data.prompts_per_step,
        "sampling.num_inference_steps": config.sampling.num_inference_steps,
        "rollout.micro_batch_size": config.rollout.micro_batch_size,
        "rollout.embedding_cache_size": config.rollout.embedding_cache_size,
        "rollout.max_log_prob_gap": config.rollout.max_log_prob_gap,
        "actor.micro_batch_size": config.actor.micro_batch_size,
        "actor.updates_per_step": config.actor.updates_per_step,
        "actor.lora.rank": config.actor.lora.rank,
        "actor.lora.alpha": config.actor.lora.alpha,
        "evaluation.num_prompts": config.evaluation.num_prompts,
        "evaluation.samples_per_prompt": config.evaluation.samples_per_prompt,
        "evaluation.num_inference_steps": config.evaluation.num_inference_steps,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        **{f"reward.parts.{name}.workers": part.workers for name, part in config.reward.parts.items()},
        **{
            f"reward.parts.{name}.timeout_seconds": part.timeout_seconds
            for name, part in config.reward.parts.items()
        },
    }.items():
        require(value > 0 and math.isfinite(value), f"{key}={value} must be a number greater than 0")


def counts_are_not_negative(config: Config, world_size: int) -> None:
    for key, value in {
        "seed": config.seed,
        "stop_before": config.stop_before,
        "data.refill_rounds": config.data.refill_rounds,
        "evaluation.every": config.evaluation.every,
        "evaluation.seed": config.evaluation.seed,
        "logging.samples_every": config.logging.samples_every,
        "logging.samples_count": config.logging.samples_count,
    }.items():
        require(value >= 0, f"{key}={value} must not be negative")


def choices_are_known(config: Config, world_size: int) -> None:
    one_of("rollout.engine", config.rollout.engine, ENGINES)
    one_of("residency", config.residency, ("swap", "resident", "auto"))
    one_of("determinism", config.determinism, ("fast", "strict"))
    one_of("sampling.transition", config.sampling.transition, ("sde", "cps", "dance"))
    one_of("sampling.window.per", config.sampling.window.per, ("step", "prompt", "sample"))
    one_of("reward.mix", config.reward.mix, ("sum", "normalized"))
    one_of("sampling.window.solver", config.sampling.window.solver, ("euler", "dpm2"))
    one_of("rollout.dtype", config.rollout.dtype, DTYPES)
    one_of("rollout.lora", config.rollout.lora, ("adapter", "merged"))
    one_of("rollout.attention", config.rollout.attention, ("sdpa", "fa3", "flash_attn"))
    one_of("actor.train", config.actor.train, ("lora", "full"))
    one_of("actor.dtype", config.actor.dtype, DTYPES)
    one_of("actor.lora.dtype", config.actor.lora.dtype, DTYPES)
    one_of("actor.attention", config.actor.attention, ACTOR_ATTENTION)
    one_of("actor.cfg", config.actor.cfg, ("sequential", "batched", None))


RULES = (
    counts_are_positive,
    counts_are_not_negative,
    model_rules.model_is_known,
    model_rules.image_size_fits,
    model_rules.frames_fit,
    choices_are_known,
    engine_rules.engine_runs_the_family,
    step_rules.algorithm_is_known,
    reward_rules.rewards_are_known,
    reward_rules.rewards_get_what_they_need,
    reward_rules.rewards_run_somewhere,
    model_rules.text_lengths_ascend,
    sampling_rules.guidance_is_valid,
    sampling_rules.noise_level_fits_transition,
    sampling_rules.window_fits_schedule,
    sampling_rules.window_can_be_followed_by_fewer_steps,
    step_rules.layout_is_possible,
    step_rules.updates_divide_the_step,
    step_rules.algorithm_fits,
    step_rules.experts_take_turns,
    engine_rules.diffusers_engine_is_one_rank,
    engine_rules.diffusers_engine_has_no_options,
    engine_rules.vllm_omni_engine_is_possible,
    actor_rules.optimizer_is_valid,
    actor_rules.ema_decay_is_valid,
    actor_rules.full_training_is_possible,
    reward_rules.reward_fraction_is_valid,
    reward_rules.reward_parts_are_valid,
    step_rules.evaluation_is_possible,
    model_rules.attention_heads_divide,
    *NODE_RULES,
)

ALGORITHM_RULES = (step_rules.algorithm_fits, step_rules.experts_take_turns, given_policies_fit)

TRAINING_RULES = (
    step_rules.algorithm_is_known,
    step_rules.algorithm_fits,
    step_rules.experts_take_turns,
    step_rules.layout_is_possible,
    step_rules.updates_divide_the_step,
    given_policies_fit,
    init_adapter_fits,
    step_to_resume_is_there,
    trackers_are_installed,
)
