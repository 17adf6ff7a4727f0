"""Every rule between settings. One function for each rule; each says which keys disagree and what to change.

All of them run before torch is imported. A rule that needs the number of ranks takes it from the launcher's environment.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from omnirl_hpc.adapters import PEFT_FILE, adapter_file, read_adapter_config
from omnirl_hpc.config.classes import BUILT_IN, find_class, is_import_path, settings_class
from omnirl_hpc.config.schema import Config, FlowGRPOConfig, OcrConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.layout import make_layout

IMAGE_MULTIPLE = 16  # the VAE halves three times, then latents are packed two by two
MAX_TEXT_TOKENS = 1024
DTYPES = ("float32", "bfloat16")
ACTOR_ATTENTION = ("sdpa", "cudnn", "flash_attn", "fa3")
ENGINES = ("diffusers", "vllm_omni")
TRACKERS = ("tensorboard", "wandb", "trackio")


def check(config: Config, world_size: int, files: bool = True, trains: bool = True) -> None:
    """Raise ConfigError for the first rule that `config`, run on `world_size` ranks, breaks.

    files=False leaves out the rules about files of the run and of the node, for what is planned elsewhere; trains=False those that
    a command which only samples, on whatever number of ranks, may break.
    """
    left_out = (() if files else FILE_RULES) + (() if trains else TRAINING_RULES)
    for rule in RULES:
        if rule not in left_out:
            rule(config, world_size)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _one_of(key: str, value: object, allowed: tuple[object, ...]) -> None:
    shown = ", ".join("null" if a is None else str(a) for a in allowed)
    _require(value in allowed, f"{key}={value} is not known; it must be one of: {shown}")


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
        **{f"reward.parts.{name}.timeout_seconds": part.timeout_seconds for name, part in config.reward.parts.items()},
    }.items():
        _require(value > 0 and math.isfinite(value), f"{key}={value} must be a number greater than 0")


def counts_are_not_negative(config: Config, world_size: int) -> None:
    for key, value in {
        "seed": config.seed,
        "stop_before": config.stop_before,
        "evaluation.every": config.evaluation.every,
        "evaluation.seed": config.evaluation.seed,
        "logging.samples_every": config.logging.samples_every,
        "logging.samples_count": config.logging.samples_count,
    }.items():
        _require(value >= 0, f"{key}={value} must not be negative")


def group_has_two_samples(config: Config, world_size: int) -> None:
    n = config.data.samples_per_prompt
    _require(n >= 2, f"data.samples_per_prompt={n}: advantages compare samples of one prompt, so at least 2 are needed")


def image_size_fits(config: Config, world_size: int) -> None:
    for key, value in {"model.height": config.model.height, "model.width": config.model.width}.items():
        _require(
            value > 0 and value % IMAGE_MULTIPLE == 0,
            f"{key}={value} must be a multiple of {IMAGE_MULTIPLE}; the nearest is {max(IMAGE_MULTIPLE, round(value / IMAGE_MULTIPLE) * IMAGE_MULTIPLE)}",
        )


def choices_are_known(config: Config, world_size: int) -> None:
    _one_of("rollout.engine", config.rollout.engine, ENGINES)
    _one_of("residency", config.residency, ("swap", "resident", "auto"))
    _one_of("determinism", config.determinism, ("fast", "strict"))
    _one_of("sampling.transition", config.sampling.transition, ("sde", "cps", "dance"))
    _one_of("sampling.window.per", config.sampling.window.per, ("step", "prompt", "sample"))
    _one_of("rollout.dtype", config.rollout.dtype, DTYPES)
    _one_of("rollout.lora", config.rollout.lora, ("adapter", "merged"))
    _one_of("rollout.attention", config.rollout.attention, ("sdpa", "fa3", "flash_attn"))
    _one_of("actor.train", config.actor.train, ("lora", "full"))
    _one_of("actor.dtype", config.actor.dtype, DTYPES)
    _one_of("actor.lora.dtype", config.actor.lora.dtype, DTYPES)
    _one_of("actor.attention", config.actor.attention, ACTOR_ATTENTION)
    _one_of("actor.cfg", config.actor.cfg, ("sequential", "batched"))


def classes_are_known(config: Config, world_size: int) -> None:
    named = [("model", "model.family", config.model.family), ("algorithm", "algorithm.name", config.algorithm.name)]
    named += [("reward", f"reward.parts.{name}.name", part.name) for name, part in config.reward.parts.items()]
    for group, key, name in named:
        if is_import_path(name):
            find_class(group, name)
        else:
            _one_of(key, name, (*BUILT_IN[group], "your own as module:Class"))


def settings_are_those_of_their_class(config: Config, world_size: int) -> None:
    chosen = [("algorithm", "algorithm.name", config.algorithm)]
    chosen += [("reward", f"reward.parts.{name}.name", part) for name, part in config.reward.parts.items()]
    for group, key, settings in chosen:
        _require(
            isinstance(settings, settings_class(group, settings.name)),
            f"{key}={settings.name} has other settings than {type(settings).__name__}: choose it by {group}={settings.name}",
        )


def text_lengths_ascend(config: Config, world_size: int) -> None:
    lengths = config.data.text_lengths
    _require(
        bool(lengths) and lengths[0] > 0 and all(a < b for a, b in zip(lengths, lengths[1:])),
        f"data.text_lengths={lengths} must be positive token counts in ascending order",
    )
    _require(lengths[-1] <= MAX_TEXT_TOKENS, f"data.text_lengths={lengths}: pipelines take at most {MAX_TEXT_TOKENS} tokens")


def guidance_is_valid(config: Config, world_size: int) -> None:
    scale = config.sampling.true_cfg_scale
    _require(scale >= 1, f"sampling.true_cfg_scale={scale} must be 1 (no guidance) or more")


def noise_level_fits_transition(config: Config, world_size: int) -> None:
    eta, kind = config.sampling.noise_level, config.sampling.transition
    _require(eta > 0, f"sampling.noise_level={eta} must be greater than 0: without noise there is no log-probability to train")
    _require(
        kind != "cps" or eta <= 1,
        f"sampling.noise_level={eta} is too large for sampling.transition=cps, whose standard deviation is "
        "sigma' sin(eta pi/2): use 1 or less",
    )


def window_fits_schedule(config: Config, world_size: int) -> None:
    steps, window = config.sampling.num_inference_steps, config.sampling.window
    _require(steps >= 2, f"sampling.num_inference_steps={steps}: at least 2 are needed, since the last step adds no noise")
    last = steps - 1 if window.last is None else window.last
    _require(
        0 <= window.first < last <= steps - 1,
        f"sampling.window.first={window.first}, sampling.window.last={window.last} must satisfy 0 <= first < last <= "
        f"sampling.num_inference_steps - 1 = {steps - 1} (the last step adds no noise)",
    )
    size = last - window.first if window.size is None else window.size
    _require(
        1 <= size <= last - window.first,
        f"sampling.window.size={window.size} does not fit between sampling.window.first={window.first} and "
        f"sampling.window.last={last}: use 1 to {last - window.first}",
    )


def layout_is_possible(config: Config, world_size: int) -> None:
    layout = make_layout(config, rank=0, world_size=world_size)
    prompts = config.data.prompts_per_step
    _require(
        prompts % layout.num_replicas == 0,
        f"data.prompts_per_step={prompts} cannot be dealt evenly to {layout.num_replicas} rollout replicas "
        f"({world_size} ranks): use a multiple of {layout.num_replicas}",
    )


def updates_divide_the_step(config: Config, world_size: int) -> None:
    layout = make_layout(config, rank=0, world_size=world_size)
    prompts, updates = config.data.prompts_per_step // layout.num_replicas, config.actor.updates_per_step
    _require(
        prompts % updates == 0,
        f"actor.updates_per_step={updates} does not divide the {prompts} prompts of a replica "
        f"(data.prompts_per_step={config.data.prompts_per_step} over {layout.num_replicas} replicas)",
    )
    samples = prompts // updates * config.data.samples_per_prompt
    _require(
        samples % layout.replica_size == 0,
        f"the {samples} samples of an update cannot be split over the {layout.replica_size} ranks of a replica: "
        "change data.samples_per_prompt or actor.updates_per_step",
    )
    share, micro = samples // layout.replica_size, config.actor.micro_batch_size
    _require(
        share % micro == 0,
        f"actor.micro_batch_size={micro} does not divide the {share} samples that a rank trains in one update "
        f"(data.prompts_per_step x data.samples_per_prompt / ranks / actor.updates_per_step): use a divisor of {share}, "
        f"such as {math.gcd(share, micro)}",
    )


def diffusers_engine_is_one_rank(config: Config, world_size: int) -> None:
    rollout = config.rollout
    size = rollout.tensor_parallel_size * rollout.ulysses_degree * rollout.cfg_parallel_size
    _require(
        rollout.engine != "diffusers" or size == 1,
        "rollout.engine=diffusers runs on one rank: set rollout.tensor_parallel_size, rollout.ulysses_degree and "
        "rollout.cfg_parallel_size to 1",
    )


def diffusers_engine_has_no_options(config: Config, world_size: int) -> None:
    rollout = config.rollout
    for key, value, default in (
        ("lora", rollout.lora, "adapter"),
        ("attention", rollout.attention, "sdpa"),
        ("compile", rollout.compile, False),
        ("awake", list(rollout.awake), []),
    ):
        _require(
            rollout.engine != "diffusers" or value == default,
            f"rollout.{key}={value} is for rollout.engine=vllm_omni: choose rollout=vllm_omni or drop it",
        )


def vllm_omni_engine_is_possible(config: Config, world_size: int) -> None:
    rollout = config.rollout
    if rollout.engine != "vllm_omni":
        return
    _require(
        rollout.cfg_parallel_size in (1, 2),
        f"rollout.cfg_parallel_size={rollout.cfg_parallel_size} must be 1 or 2: guidance has two branches",
    )
    _require(
        rollout.cfg_parallel_size == 1 or config.sampling.true_cfg_scale > 1,
        f"rollout.cfg_parallel_size={rollout.cfg_parallel_size} needs guidance: set sampling.true_cfg_scale above 1 or "
        "rollout.cfg_parallel_size=1",
    )
    _require(
        rollout.attention == "sdpa" or rollout.dtype != "float32",
        f"rollout.attention={rollout.attention} has no fp32 kernels: set rollout.dtype=bfloat16 or rollout.attention=sdpa",
    )
    tokens, degree = config.model.height // IMAGE_MULTIPLE * (config.model.width // IMAGE_MULTIPLE), rollout.ulysses_degree
    _require(
        tokens % degree == 0,
        f"rollout.ulysses_degree={degree} does not divide the {tokens} tokens of a {config.model.height} x {config.model.width} "
        "image; the engine would attend over padding",
    )


def compiler_is_there(config: Config, world_size: int) -> None:
    asked = [
        key for key, value in (("rollout.compile", config.rollout.compile), ("actor.compile", config.actor.compile)) if value
    ]
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    _require(
        not asked or compiler is not None,
        f"{' and '.join(asked)}: torch.compile needs a C compiler, and there is no gcc or clang here: load one (module load gcc), "
        f"set CC, or set {' and '.join(f'{key}=false' for key in asked)}",
    )


def optimizer_is_valid(config: Config, world_size: int) -> None:
    optimizer = config.actor.optimizer
    for key in ("lr", "eps", "max_grad_norm"):
        value = getattr(optimizer, key)
        _require(value > 0 and math.isfinite(value), f"actor.optimizer.{key}={value} must be a positive number")
    for key in ("weight_decay", "warmup_updates"):
        value = getattr(optimizer, key)
        _require(value >= 0, f"actor.optimizer.{key}={value} must not be negative")
    _require(
        len(optimizer.betas) == 2 and all(0 <= b < 1 for b in optimizer.betas),
        f"actor.optimizer.betas={list(optimizer.betas)} must be two numbers in [0, 1)",
    )


def ema_decay_is_valid(config: Config, world_size: int) -> None:
    decay = config.actor.ema_decay
    _require(decay is None or 0 < decay < 1, f"actor.ema_decay={decay} must be between 0 and 1, or null for none")


def full_training_is_possible(config: Config, world_size: int) -> None:
    if config.actor.train != "full":
        return
    for key, value, off, why in (
        ("algorithm.kl_coef", getattr(config.algorithm, "kl_coef", 0), 0, "the reference is the model without its adapter"),
        ("actor.ema_decay", config.actor.ema_decay, None, "a running mean is kept of an adapter alone"),
        ("evaluation.every", config.evaluation.every, 0, "the base that it compares with is the model without its adapter"),
        ("init_adapter", config.init_adapter, None, "there is no adapter to start from; merge it into model.path first"),
    ):
        _require(
            value == off,
            f"{key}={value} is not for actor.train=full: {why}. Set {key}={'null' if off is None else off}, or actor.train=lora",
        )


def flow_grpo_is_valid(config: Config, world_size: int) -> None:
    algorithm = config.algorithm
    if not isinstance(algorithm, FlowGRPOConfig):
        return
    for key in ("clip_range", "advantage_clip"):
        value = getattr(algorithm, key)
        _require(value > 0, f"algorithm.{key}={value} must be greater than 0")
    _require(algorithm.kl_coef >= 0, f"algorithm.kl_coef={algorithm.kl_coef} must not be negative")
    _one_of("algorithm.old_log_prob", algorithm.old_log_prob, ("recompute", "rollout"))
    _one_of("algorithm.advantage_std", algorithm.advantage_std, ("batch", "group", None))


def reward_fraction_is_valid(config: Config, world_size: int) -> None:
    value = config.reward.max_failed_fraction
    _require(0 <= value < 1, f"reward.max_failed_fraction={value} must be in [0, 1)")


def reward_parts_are_valid(config: Config, world_size: int) -> None:
    parts = config.reward.parts
    _require(bool(parts), "reward.parts is empty: choose one by reward=NAME, or several by 'reward=[NAME,NAME]'")
    for name, part in parts.items():
        key = f"reward.parts.{name}"
        _require(math.isfinite(part.weight) and part.weight != 0, f"{key}.weight={part.weight} must be a number other than 0")
        if isinstance(part, OcrConfig):
            value = part.min_confidence
            _require(0 <= value <= 1, f"{key}.min_confidence={value} must be in [0, 1]")


def reward_packages_are_installed(config: Config, world_size: int) -> None:
    for name, part in config.reward.parts.items():
        missing = [package for package in find_class("reward", part.name).packages if not find_spec(package)]
        _require(
            not missing,
            f"reward.parts.{name}: {part.name} needs {', '.join(missing)}, not installed: pip install {' '.join(missing)}",
        )


def paths_exist(config: Config, world_size: int) -> None:
    for key, value in {"run_dir": config.run_dir, "model.path": config.model.path, "data.prompts": config.data.prompts}.items():
        _require(bool(value.strip()), f"{key} is empty: a shell variable that is not set?")
    model = Path(config.model.path)
    _require(
        (model / "model_index.json").is_file(),
        f"model.path={model} is not a diffusers checkpoint: {model / 'model_index.json'} does not exist",
    )
    prompts = config.evaluation.prompts
    _require(prompts is None or Path(prompts).is_file(), f"evaluation.prompts={prompts} does not exist")
    _require(Path(config.data.prompts).is_file(), f"data.prompts={config.data.prompts} does not exist")


def init_adapter_fits(config: Config, world_size: int) -> None:
    adapter, lora = config.init_adapter, config.actor.lora
    if adapter is None:
        return
    _require(
        adapter_file(Path(adapter)) is not None,
        f"init_adapter={adapter} is not an adapter: {adapter}/{PEFT_FILE} does not exist",
    )
    found = read_adapter_config(Path(adapter))
    _require(
        (found["r"], found["lora_alpha"]) == (lora.rank, lora.alpha),
        f"init_adapter={adapter} has rank {found['r']} and alpha {found['lora_alpha']}: set actor.lora.rank and actor.lora.alpha "
        "to them",
    )


def trackers_are_installed(config: Config, world_size: int) -> None:
    for name in config.logging.trackers:
        _one_of("logging.trackers", name, TRACKERS)
        _require(
            find_spec(name) is not None,
            f"logging.trackers={list(config.logging.trackers)}: {name} is not installed; pip install 'omnirl_hpc[{name}]', or drop it",
        )


def evaluation_is_possible(config: Config, world_size: int) -> None:
    evaluation = config.evaluation
    if not evaluation.every:
        return
    layout = make_layout(config, rank=0, world_size=world_size)
    _require(
        evaluation.num_prompts % layout.num_replicas == 0,
        f"evaluation.num_prompts={evaluation.num_prompts} cannot be dealt evenly to {layout.num_replicas} rollout replicas "
        f"({world_size} ranks): use a multiple of {layout.num_replicas}",
    )
    samples = evaluation.num_prompts // layout.num_replicas * evaluation.samples_per_prompt
    _require(
        samples % layout.replica_size == 0,
        f"the {samples} images of a replica (evaluation.num_prompts x evaluation.samples_per_prompt / replicas) cannot be split "
        f"over its {layout.replica_size} ranks: change evaluation.samples_per_prompt",
    )


def step_to_resume_is_there(config: Config, world_size: int) -> None:
    step, folder = config.checkpoint.resume_step, Path(config.run_dir) / "checkpoints"
    if step is None:
        return
    there = sorted(path.name for path in folder.glob("step_*[0-9]"))
    _require(
        f"step_{step:06d}" in there,
        f"checkpoint.resume_step={step}: there is no such checkpoint in {folder}; it has: {', '.join(there) or 'none'}",
    )


def attention_heads_divide(config: Config, world_size: int) -> None:
    rollout = config.rollout
    ranks = rollout.tensor_parallel_size * rollout.ulysses_degree
    transformer = Path(config.model.path) / "transformer" / "config.json"
    if ranks == 1 or not transformer.is_file():
        return
    heads = json.loads(transformer.read_text()).get("num_attention_heads")
    _require(
        heads is None or heads % ranks == 0,
        f"the {heads} attention heads of model.path={config.model.path} cannot be split over rollout.tensor_parallel_size x "
        f"rollout.ulysses_degree = {ranks} ranks",
    )


RULES = (
    counts_are_positive,
    counts_are_not_negative,
    group_has_two_samples,
    image_size_fits,
    choices_are_known,
    classes_are_known,
    settings_are_those_of_their_class,
    text_lengths_ascend,
    guidance_is_valid,
    noise_level_fits_transition,
    window_fits_schedule,
    layout_is_possible,
    updates_divide_the_step,
    diffusers_engine_is_one_rank,
    diffusers_engine_has_no_options,
    vllm_omni_engine_is_possible,
    compiler_is_there,
    optimizer_is_valid,
    ema_decay_is_valid,
    full_training_is_possible,
    flow_grpo_is_valid,
    reward_fraction_is_valid,
    reward_parts_are_valid,
    reward_packages_are_installed,
    evaluation_is_possible,
    paths_exist,
    init_adapter_fits,
    trackers_are_installed,
    step_to_resume_is_there,
    attention_heads_divide,
)

FILE_RULES = (
    reward_packages_are_installed,
    paths_exist,
    init_adapter_fits,
    step_to_resume_is_there,
    compiler_is_there,
    trackers_are_installed,
)
TRAINING_RULES = (
    layout_is_possible,
    updates_divide_the_step,
    init_adapter_fits,
    step_to_resume_is_there,
    trackers_are_installed,
)
