"""Memory and disk that a run needs, by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.shape import ModelShape
from omnirl_hpc.models.spec import actor_numerics, find_spec
from omnirl_hpc.planning.measured import (
    ACTOR_WORKING_VECTORS,
    CONTEXT_BYTES,
    CUDA_HOST_BYTES,
    DECODE_VALUES_PER_PIXEL,
    PROCESS_BYTES,
    SAVED_VECTORS,
)
from omnirl_hpc.planning.trained import ADAM_MOMENTS, BYTES, trained_part
from omnirl_hpc.policies import CURRENT, REFERENCE, is_checkpoint

if TYPE_CHECKING:  # brings torch
    from omnirl_hpc.algorithms.algorithm import Algorithm

TYPICAL_TEXT = 128  # tokens of real prompts: 64 to 128
GATHERED_BLOCKS = 2  # the one that computes and the one that comes next
KEPT_LATENTS_BYTES = 4  # fp32
PNG_BYTES_PER_PIXEL = 1.5  # of photographs, half of the raw size


@dataclass(frozen=True)
class Estimate:
    """Bytes by part. GPU and host memory are one rank's, disk is the run's."""

    always: dict[str, float]  # on the GPU, whoever has it
    rollout: dict[str, float]  # while the engine has it
    actor: dict[str, float]  # while the actor has it
    host: dict[str, float]
    disk: dict[str, float]  # in run_dir

    @property
    def gpu_bytes(self) -> float:
        """The peak on a GPU."""
        return sum(self.always.values()) + max(sum(self.rollout.values()), sum(self.actor.values()))

    def node_bytes(self, ranks: int) -> float:
        """Host memory of a node with that many ranks, each with its GPU."""
        return ranks * sum(self.host.values())


def find_shape(config: Config) -> ModelShape:
    """Raises ConfigError where the family is not known, or the checkpoint's files cannot be read."""
    return find_spec(config.model.family).shape(config.model)


def typical_text_width(config: Config) -> int:
    """The padded width that a real prompt gets."""
    fixed, widths = find_spec(config.model.family).text_width, config.data.text_lengths
    return fixed or next((width for width in widths if width >= TYPICAL_TEXT), widths[-1])


def estimate(config: Config, layout: Layout, text_width: int | None = None) -> Estimate:
    """What one rank of a run needs. `config.residency` is swap or resident; `layout` is any rank's.

    Host memory is the same while weights load: ranks read their parts of files that the system caches. It
    leaves out these files, and what rewards take, in workers or on the device. text_width: tokens that
    prompts are padded to (None: typical). Raises ConfigError where the model is not known.
    """
    if config.residency not in ("swap", "resident"):
        raise ValueError(
            f"residency={config.residency} is to be resolved first: planning.residency.choose_residency"
        )
    shape = find_shape(config)
    text_width = text_width or typical_text_width(config)
    generates = builds_engine(config)
    stays, engine = engine_parts(config, shape, layout) if generates else ({}, {})
    sampling = engine | encoder_weights(config, shape)  # the tenants of the rollout side, when they are awake
    trained, base = trained_weights(config, shape, layout), frozen_weights(config, shape, layout)
    always = {
        "CUDA and NCCL": CONTEXT_BYTES,
        "samples of the step": sample_bytes(config, shape, layout, text_width),
    } | stays
    rollout = generation(config, shape) if generates else {}
    actor = training(config, shape, layout, text_width)
    host = {
        "process": PROCESS_BYTES,
        "CUDA libraries": CUDA_HOST_BYTES,
        "prompt embeddings": embedding_bytes(config, shape, text_width),
    }
    kept = {
        f"copy of {name}": size for name, size in trained.items()
    }  # for a stop in mid-step, in both modes
    if config.residency == "swap":
        rollout, actor = sampling | rollout, base | trained | actor
        host |= {f"copy of {name}": size for name, size in (sampling | base).items()} | kept
    else:
        always |= sampling | base | trained
        clean = engine if config.actor.adapter is not None and config.rollout.lora == "merged" else {}
        host |= {f"copy of {name}": size for name, size in clean.items()} | kept
    return Estimate(always, rollout, actor, host, disk(config, shape))


def builds_engine(config: Config) -> bool:
    """Whether anything is ever generated: to be trained on, or in evaluations."""
    return find_class("algorithm", config.algorithm.name).source == "rollout" or config.evaluation.every > 0


def with_residency(config: Config, residency: str) -> Config:
    return replace(config, residency=residency)


def engine_weights(config: Config, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """The engine's frozen weights on one rank, by component. Tensor parallelism splits all but the
    modulation.
    """
    size, split = BYTES[config.rollout.dtype], config.rollout.tensor_parallel_size
    whole = shape.modulation_parameters
    return {
        "transformer": size * (whole + (shape.transformer_parameters - whole) / split),
        **{name: size * parameters for name, parameters in shape.other_parameters.items()},
    }


def engine_parts(
    config: Config, shape: ModelShape, layout: Layout
) -> tuple[dict[str, float], dict[str, float]]:
    """What of the engine is always on the GPU, and what sleeps where the sides take turns."""
    weights = engine_weights(config, shape, layout)
    if unknown := set(config.rollout.awake) - weights.keys():
        raise ConfigError(
            f"rollout.awake names {', '.join(sorted(unknown))}; the engine has {', '.join(weights)}"
        )
    stays = {f"engine: {name}": size for name, size in weights.items() if name in config.rollout.awake}
    sleeps = {f"engine: {name}": size for name, size in weights.items() if name not in config.rollout.awake}
    (sleeps if config.rollout.engine == "diffusers" else stays).update(engine_adapter(config, shape))
    return stays, sleeps


def encoder_weights(config: Config, shape: ModelShape) -> dict[str, float]:
    """Of the encoders of their own that a table of pairs is read with (sources/encoders.py)."""
    if find_algorithm(config).source == "rollout":
        return {}
    size = BYTES[config.rollout.dtype]
    return {f"encoders: {name}": size * parameters for name, parameters in shape.other_parameters.items()}


def find_algorithm(config: Config) -> Algorithm:
    """The run's algorithm, which brings torch with it."""
    return find_class("algorithm", config.algorithm.name)(config)


def engine_adapter(config: Config, shape: ModelShape) -> dict[str, float]:
    """LoRA's places in the engine, where it is not merged into the weights."""
    places = trained_part(config.actor).engine_parameters(shape)
    if not places or config.rollout.lora == "merged":
        return {}
    return {"engine: LoRA": float(BYTES[config.rollout.dtype] * places)}


def frozen_weights(config: Config, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """The actor's base, sharded, and policies that are models of their own."""
    bytes_each = BYTES[config.actor.dtype] / layout.shard_size
    frozen = bytes_each * trained_part(config.actor).frozen_parameters(shape)
    size = bytes_each * shape.transformer_parameters
    given = find_algorithm(config).given
    models = {f"actor: {policy}": size for policy, path in given.items() if is_checkpoint(path)}
    return ({"actor: base weights": frozen} if frozen else {}) | models


def trained_weights(config: Config, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """What the optimizer changes, sharded."""
    part = trained_part(config.actor)
    weights = part.bytes(shape) / layout.shard_size
    parts = {f"actor: {part.title}": weights, "actor: Adam": ADAM_MOMENTS * weights}
    return parts | (
        {"actor: stored policies": stored}
        if (stored := stored_bytes(config, shape) / layout.shard_size)
        else {}
    )


def stored_bytes(config: Config, shape: ModelShape) -> float:
    """The policies that are stored beside the current one, in fp32: the algorithm's and the running mean."""
    algorithm = find_algorithm(config)
    models = {policy for policy, path in algorithm.given.items() if is_checkpoint(path)}
    stored = {*algorithm.policies, algorithm.sampler} - {CURRENT, REFERENCE} - models
    count = len(stored) + (config.actor.ema_decay is not None)
    return float(count * BYTES["float32"] * trained_part(config.actor).parameters(shape))


def generation(config: Config, shape: ModelShape) -> dict[str, float]:
    """The VAE decoder's tensors for one micro-batch, which take more than the transformer's."""
    pixels = config.rollout.micro_batch_size * shape.frames * config.model.height * config.model.width
    return {"generation": DECODE_VALUES_PER_PIXEL * pixels * BYTES[config.rollout.dtype]}


def training(config: Config, shape: ModelShape, layout: Layout, text_width: int) -> dict[str, float]:
    """What the actor's forward and backward passes need beside the weights, for one micro-batch."""
    algorithm, part = find_algorithm(config), trained_part(config.actor)
    branches = training_branches(config)
    samples = config.actor.micro_batch_size * algorithm.samples_per_unit
    tokens = samples * (shape.latent_tokens + text_width)  # of one branch
    vector = shape.width * BYTES[config.actor.dtype]
    block = SAVED_VECTORS[config.actor.dtype] + part.saved_vectors(shape)
    once = branches if actor_numerics(config).batched_cfg else 1  # branches that compute at the same time
    parts = {
        "actor: gradients": part.bytes(shape) / layout.shard_size,
        "actor: gathered blocks": GATHERED_BLOCKS * BYTES[config.actor.dtype] * shape.block_parameters,
    }
    if whole := part.unsharded_gradients(shape):  # as computed, and in fp32 on their way
        parts["actor: gradients of a block"] = float((BYTES[config.actor.dtype] + BYTES["float32"]) * whole)
    if config.actor.activation_checkpointing:
        parts["actor: inputs of blocks"] = branches * tokens * vector * shape.layers
        parts["actor: one block's activations"] = once * tokens * vector * block
    else:
        parts["actor: activations"] = branches * tokens * vector * shape.layers * block
    return parts | {"actor: working memory": once * tokens * vector * ACTOR_WORKING_VECTORS}


def guidance_branches(config: Config) -> int:
    return 2 if config.sampling.true_cfg_scale > 1 else 1


def training_branches(config: Config) -> int:
    """The same of the actor."""
    return guidance_branches(config) if find_algorithm(config).trains_with_guidance else 1


def units_of_rank(config: Config, layout: Layout) -> int:
    """Samples, or pairs of them, that a rank trains in one step."""
    return config.data.prompts_per_step * find_algorithm(config).units_per_prompt // layout.world_size


def samples_of_rank(config: Config, layout: Layout) -> int:
    """Samples that a rank has in one step: of its share of what is generated, or of what is read."""
    algorithm = find_algorithm(config)
    if algorithm.source == "rollout":
        return config.data.prompts_per_step * config.data.samples_per_prompt // layout.world_size
    return units_of_rank(config, layout) * algorithm.samples_per_unit


def window_size(config: Config) -> int:
    """Stochastic steps of a sample."""
    window = config.sampling.window
    if window.size is not None:
        return window.size
    return (config.sampling.num_inference_steps - 1 if window.last is None else window.last) - window.first


def sample_bytes(config: Config, shape: ModelShape, layout: Layout, text_width: int) -> float:
    """Latents at the edges of windows and at the end, and conditions, which stay on the GPU until a rank's
    step ends. Each prompt's condition is there once, and no more than one negative one for each.
    """
    kept = (window_size(config) + 2) if find_algorithm(config).needs == "trajectory" else 1
    latents = kept * shape.latent_values * KEPT_LATENTS_BYTES
    branches = guidance_branches(config) if find_algorithm(config).source == "rollout" else 1
    conditions = branches * shape.condition_values(text_width) * BYTES[config.rollout.dtype]
    prompts = config.data.prompts_per_step / layout.num_replicas  # all ranks of a replica have them
    return samples_of_rank(config, layout) * latents + prompts * conditions


def embedding_bytes(config: Config, shape: ModelShape, text_width: int) -> float:
    """The cache of prompt embeddings when it is full."""
    values = config.rollout.embedding_cache_size * shape.condition_values(text_width)
    return values * BYTES[config.rollout.dtype]


def disk(config: Config, shape: ModelShape) -> dict[str, float]:
    """Checkpoints (one more than are kept, while it is written) and sample images."""
    every, count = config.logging.samples_every, config.logging.samples_count
    # of every `every`-th step and of the last one
    images = count * len({*range(0, config.steps, every), config.steps - 1}) if every else 0
    return {
        "checkpoints": (config.checkpoint.keep + 1)
        * ((1 + ADAM_MOMENTS) * trained_part(config.actor).bytes(shape) + stored_bytes(config, shape)),
        "sample images": images * config.model.height * config.model.width * PNG_BYTES_PER_PIXEL,
    }
