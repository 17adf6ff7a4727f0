"""Every rule between settings. One function for each rule; each says which keys disagree and what to change.

All but those about the algorithm, whose file needs torch, run before torch is imported. A rule that needs the
number of ranks takes it from the launcher's environment.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from omnirl_hpc.checks.node_rules import (
    NODE_RULES,
    init_adapter_fits,
    step_to_resume_is_there,
    trackers_are_installed,
)
from omnirl_hpc.checks.require import require_class
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import one_of, require
from omnirl_hpc.layout import make_layout
from omnirl_hpc.models.spec import find_spec
from omnirl_hpc.rewards.reward import DEVICE, LATENTS, PLACES, Reward

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
        "evaluation.every": config.evaluation.every,
        "evaluation.seed": config.evaluation.seed,
        "logging.samples_every": config.logging.samples_every,
        "logging.samples_count": config.logging.samples_count,
    }.items():
        require(value >= 0, f"{key}={value} must not be negative")


def image_size_fits(config: Config, world_size: int) -> None:
    multiple = find_spec(config.model.family).pixel_multiple
    for key, value in {"model.height": config.model.height, "model.width": config.model.width}.items():
        nearest = max(multiple, round(value / multiple) * multiple)
        require(
            value > 0 and value % multiple == 0,
            f"{key}={value} must be a multiple of {multiple}; the nearest is {nearest}",
        )


def frames_fit(config: Config, world_size: int) -> None:
    spec, frames, fps = find_spec(config.model.family), config.model.frames, config.model.fps
    step = spec.frame_step
    if step is None:
        require(frames == 1, f"model.frames={frames} must be 1: {spec.title} makes images")
        return
    nearest = max(1, round((frames - 1) / step)) * step + 1
    require(
        frames > 1 and (frames - 1) % step == 0,
        f"model.frames={frames} must be a multiple of {step} and one more; the nearest is {nearest}",
    )
    require(fps > 0, f"model.fps={fps} must be greater than 0")


def choices_are_known(config: Config, world_size: int) -> None:
    one_of("rollout.engine", config.rollout.engine, ENGINES)
    one_of("residency", config.residency, ("swap", "resident", "auto"))
    one_of("determinism", config.determinism, ("fast", "strict"))
    one_of("sampling.transition", config.sampling.transition, ("sde", "cps", "dance"))
    one_of("sampling.window.per", config.sampling.window.per, ("step", "prompt", "sample"))
    one_of("reward.mix", config.reward.mix, ("sum", "normalized"))
    one_of("rollout.dtype", config.rollout.dtype, DTYPES)
    one_of("rollout.lora", config.rollout.lora, ("adapter", "merged"))
    one_of("rollout.attention", config.rollout.attention, ("sdpa", "fa3", "flash_attn"))
    one_of("actor.train", config.actor.train, ("lora", "full"))
    one_of("actor.dtype", config.actor.dtype, DTYPES)
    one_of("actor.lora.dtype", config.actor.lora.dtype, DTYPES)
    one_of("actor.attention", config.actor.attention, ACTOR_ATTENTION)
    one_of("actor.cfg", config.actor.cfg, ("sequential", "batched", None))


def model_is_known(config: Config, world_size: int) -> None:
    require_class("model", "model.family", config.model.family)


def engine_runs_the_family(config: Config, world_size: int) -> None:
    spec = find_spec(config.model.family)
    require(
        config.rollout.engine in spec.numerics,
        f"rollout.engine={config.rollout.engine} does not run model.family={config.model.family}: choose "
        f"{' or '.join(f'rollout={engine}' for engine in spec.numerics)}",
    )


def algorithm_is_known(config: Config, world_size: int) -> None:
    require_class("algorithm", "algorithm.name", config.algorithm.name)


def rewards_are_known(config: Config, world_size: int) -> None:
    for name, part in config.reward.parts.items():
        require_class("reward", f"reward.parts.{name}.name", part.name)


def rewards_get_what_they_need(config: Config, world_size: int) -> None:
    spec = find_spec(config.model.family)
    for name, part in config.reward.parts.items():
        for need in find_class("reward", part.name).needs:
            require(
                need in (*spec.makes, LATENTS),
                f"reward.parts.{name}.name={part.name} needs {need}, and model.family={config.model.family} "
                f"makes {' and '.join(spec.makes)}",
            )


def rewards_run_somewhere(config: Config, world_size: int) -> None:
    for name, part in config.reward.parts.items():
        found = find_class("reward", part.name)
        one_of(f"reward.parts.{name}.name={part.name}: runs_in", found.runs_in, PLACES)
        if found.runs_in != DEVICE:
            continue
        require(
            found.modules is not Reward.modules,
            f"reward.parts.{name}.name={part.name}: runs_in={DEVICE}, and it does not define modules(), the "
            "networks that are moved there",
        )
        require(
            part.workers == 1,
            f"reward.parts.{name}.workers={part.workers}: {part.name} runs on the device of each rank, where "
            f"there is one of it; set reward.parts.{name}.workers=1",
        )
        require(
            config.residency != "auto",
            f"residency=auto: no plan knows what memory reward.parts.{name}.name={part.name} takes on the "
            "device; set residency=swap, or residency=resident where all fits",
        )


def text_lengths_ascend(config: Config, world_size: int) -> None:
    lengths = config.data.text_lengths
    require(
        bool(lengths) and lengths[0] > 0 and all(a < b for a, b in zip(lengths, lengths[1:])),
        f"data.text_lengths={lengths} must be positive token counts in ascending order",
    )
    spec = find_spec(config.model.family)
    require(
        spec.text_width is not None or lengths[-1] <= spec.max_text_tokens,
        f"data.text_lengths={lengths}: {spec.title} takes at most {spec.max_text_tokens} tokens",
    )


def guidance_is_valid(config: Config, world_size: int) -> None:
    scale = config.sampling.true_cfg_scale
    require(scale >= 1, f"sampling.true_cfg_scale={scale} must be 1 (no guidance) or more")


def noise_level_fits_transition(config: Config, world_size: int) -> None:
    eta, kind = config.sampling.noise_level, config.sampling.transition
    require(
        eta > 0,
        f"sampling.noise_level={eta} must be greater than 0: without noise there is no log-probability to "
        "train",
    )
    require(
        kind != "cps" or eta <= 1,
        f"sampling.noise_level={eta} is too large for sampling.transition=cps, whose standard deviation is "
        "sigma' sin(eta pi/2): use 1 or less",
    )


def window_fits_schedule(config: Config, world_size: int) -> None:
    steps, window = config.sampling.num_inference_steps, config.sampling.window
    require(
        steps >= 2,
        f"sampling.num_inference_steps={steps}: at least 2 are needed, since the last step adds no noise",
    )
    last = steps - 1 if window.last is None else window.last
    require(
        0 <= window.first < last <= steps - 1,
        f"sampling.window.first={window.first}, sampling.window.last={window.last} must satisfy 0 <= first < "
        f"last <= sampling.num_inference_steps - 1 = {steps - 1} (the last step adds no noise)",
    )
    size = last - window.first if window.size is None else window.size
    require(
        1 <= size <= last - window.first,
        f"sampling.window.size={window.size} does not fit between sampling.window.first={window.first} and "
        f"sampling.window.last={last}: use 1 to {last - window.first}",
    )


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
        "reference" not in algorithm.policies or config.actor.train != "full",
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
    what = "samples" if algorithm.source == "rollout" else "pairs"
    require(
        share % micro == 0,
        f"actor.micro_batch_size={micro} does not divide the {share} {what} that a rank trains in one update "
        "(data.prompts_per_step x data.samples_per_prompt / ranks / actor.updates_per_step; pairs of a table "
        f"count once for each prompt): use a divisor of {share}, such as {math.gcd(share, micro)}",
    )


def diffusers_engine_is_one_rank(config: Config, world_size: int) -> None:
    rollout = config.rollout
    size = rollout.tensor_parallel_size * rollout.ulysses_degree * rollout.cfg_parallel_size
    require(
        rollout.engine != "diffusers" or size == 1,
        "rollout.engine=diffusers runs on one rank: set rollout.tensor_parallel_size, rollout.ulysses_degree "
        "and rollout.cfg_parallel_size to 1",
    )


def diffusers_engine_has_no_options(config: Config, world_size: int) -> None:
    rollout = config.rollout
    for key, value, default in (
        ("lora", rollout.lora, "adapter"),
        ("attention", rollout.attention, "sdpa"),
        ("compile", rollout.compile, False),
        ("awake", list(rollout.awake), []),
    ):
        require(
            rollout.engine != "diffusers" or value == default,
            f"rollout.{key}={value} is for rollout.engine=vllm_omni: choose rollout=vllm_omni or drop it",
        )


def vllm_omni_engine_is_possible(config: Config, world_size: int) -> None:
    rollout = config.rollout
    if rollout.engine != "vllm_omni":
        return
    require(
        rollout.cfg_parallel_size in (1, 2),
        f"rollout.cfg_parallel_size={rollout.cfg_parallel_size} must be 1 or 2: guidance has two branches",
    )
    require(
        rollout.cfg_parallel_size == 1 or config.sampling.true_cfg_scale > 1,
        f"rollout.cfg_parallel_size={rollout.cfg_parallel_size} needs guidance: set sampling.true_cfg_scale "
        "above 1 or rollout.cfg_parallel_size=1",
    )
    spec = find_spec(config.model.family)
    for name in ("tensor_parallel_size", "ulysses_degree", "cfg_parallel_size"):
        size = getattr(rollout, name)
        require(
            size == 1 or name in spec.engine_parallel,
            f"rollout.{name}={size} must be 1: the engine cannot spread {spec.title} over ranks in this way",
        )
    require(
        rollout.attention == "sdpa" or rollout.dtype != "float32",
        f"rollout.attention={rollout.attention} has no fp32 kernels: "
        "set rollout.dtype=bfloat16 or rollout.attention=sdpa",
    )
    degree = rollout.ulysses_degree
    if degree == 1:
        return
    tokens = spec.latent_tokens(config.model)
    require(
        tokens % degree == 0,
        f"rollout.ulysses_degree={degree} does not divide the {tokens} tokens of a {config.model.height} x "
        f"{config.model.width} image; the engine would attend over padding",
    )


def optimizer_is_valid(config: Config, world_size: int) -> None:
    optimizer = config.actor.optimizer
    for key in ("lr", "eps", "max_grad_norm"):
        value = getattr(optimizer, key)
        require(
            value > 0 and math.isfinite(value), f"actor.optimizer.{key}={value} must be a positive number"
        )
    for key in ("weight_decay", "warmup_updates"):
        value = getattr(optimizer, key)
        require(value >= 0, f"actor.optimizer.{key}={value} must not be negative")
    require(
        len(optimizer.betas) == 2 and all(0 <= b < 1 for b in optimizer.betas),
        f"actor.optimizer.betas={list(optimizer.betas)} must be two numbers in [0, 1)",
    )


def ema_decay_is_valid(config: Config, world_size: int) -> None:
    decay = config.actor.ema_decay
    require(
        decay is None or 0 < decay < 1, f"actor.ema_decay={decay} must be between 0 and 1, or null for none"
    )


def full_training_is_possible(config: Config, world_size: int) -> None:
    if config.actor.train != "full":
        return
    for key, value, off, why in (
        ("actor.ema_decay", config.actor.ema_decay, None, "a running mean is kept of an adapter alone"),
        (
            "evaluation.every",
            config.evaluation.every,
            0,
            "the base that it compares with is the model without its adapter",
        ),
        (
            "init_adapter",
            config.init_adapter,
            None,
            "there is no adapter to start from; merge it into model.path first",
        ),
    ):
        require(
            value == off,
            f"{key}={value} is not for actor.train=full: {why}. Set {key}={'null' if off is None else off}, "
            "or actor.train=lora",
        )


def reward_fraction_is_valid(config: Config, world_size: int) -> None:
    value = config.reward.max_failed_fraction
    require(0 <= value < 1, f"reward.max_failed_fraction={value} must be in [0, 1)")


def reward_parts_are_valid(config: Config, world_size: int) -> None:
    parts = config.reward.parts
    require(
        bool(parts), "reward.parts is empty: choose one by reward=NAME, or several by 'reward=[NAME,NAME]'"
    )
    for name, part in parts.items():
        key = f"reward.parts.{name}"
        require(
            math.isfinite(part.weight) and part.weight != 0,
            f"{key}.weight={part.weight} must be a number other than 0",
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


def attention_heads_divide(config: Config, world_size: int) -> None:
    rollout = config.rollout
    ranks = rollout.tensor_parallel_size * rollout.ulysses_degree
    transformer = Path(config.model.path) / "transformer" / "config.json"
    if ranks == 1 or not transformer.is_file():
        return
    heads = json.loads(transformer.read_text()).get("num_attention_heads")
    require(
        heads is None or heads % ranks == 0,
        f"the {heads} attention heads of model.path={config.model.path} cannot be split over "
        f"rollout.tensor_parallel_size x rollout.ulysses_degree = {ranks} ranks",
    )


RULES = (
    counts_are_positive,
    counts_are_not_negative,
    model_is_known,
    image_size_fits,
    frames_fit,
    choices_are_known,
    engine_runs_the_family,
    algorithm_is_known,
    rewards_are_known,
    rewards_get_what_they_need,
    rewards_run_somewhere,
    text_lengths_ascend,
    guidance_is_valid,
    noise_level_fits_transition,
    window_fits_schedule,
    layout_is_possible,
    updates_divide_the_step,
    algorithm_fits,
    diffusers_engine_is_one_rank,
    diffusers_engine_has_no_options,
    vllm_omni_engine_is_possible,
    optimizer_is_valid,
    ema_decay_is_valid,
    full_training_is_possible,
    reward_fraction_is_valid,
    reward_parts_are_valid,
    evaluation_is_possible,
    attention_heads_divide,
    *NODE_RULES,
)

ALGORITHM_RULES = (algorithm_fits,)

TRAINING_RULES = (
    algorithm_is_known,
    algorithm_fits,
    layout_is_possible,
    updates_divide_the_step,
    init_adapter_fits,
    step_to_resume_is_there,
    trackers_are_installed,
)
