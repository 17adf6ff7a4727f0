"""Memory and disk that a run needs, by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    FULL_SAVED_VECTORS,
    PROCESS_BYTES,
    SAVED_VECTORS,
)
from omnirl_hpc.policies import CURRENT, REFERENCE, is_checkpoint

BYTES = {"float32": 4, "bfloat16": 2}
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
    leaves out these files, and what a reward's workers take. text_width: tokens that prompts are padded to
    (None: typical). Raises ConfigError where the model is not known.
    """
    if config.residency not in ("swap", "resident"):
        raise ValueError(
            f"residency={config.residency} is to be resolved first: planning.residency.choose_residency"
        )
    shape = find_shape(config)
    text_width = text_width or typical_text_width(config)
    weights = engine_weights(config, shape, layout)
    if unknown := set(config.rollout.awake) - weights.keys():
        raise ConfigError(
            f"rollout.awake names {', '.join(sorted(unknown))}; the engine has {', '.join(weights)}"
        )
    stays = {f"engine: {name}": size for name, size in weights.items() if name in config.rollout.awake}
    engine = {f"engine: {name}": size for name, size in weights.items() if name not in config.rollout.awake}
    (engine if config.rollout.engine == "diffusers" else stays).update(engine_adapter(config, shape))
    trained, base = trained_weights(config, shape, layout), frozen_weights(config, shape, layout)
    always = {
        "CUDA and NCCL": CONTEXT_BYTES,
        "samples of the step": sample_bytes(config, shape, layout, text_width),
    } | stays
    rollout, actor = generation(config, shape), training(config, shape, layout, text_width)
    host = {
        "process": PROCESS_BYTES,
        "CUDA libraries": CUDA_HOST_BYTES,
        "prompt embeddings": embedding_bytes(config, shape, text_width),
    }
    kept = {
        f"copy of {name}": size for name, size in trained.items()
    }  # for a stop in mid-step, in both modes
    if config.residency == "swap":
        rollout, actor = engine | rollout, base | trained | actor
        host |= {f"copy of {name}": size for name, size in (engine | base).items()} | kept
    else:
        always |= engine | base | trained
        clean = engine if config.actor.train == "lora" and config.rollout.lora == "merged" else {}
        host |= {f"copy of {name}": size for name, size in clean.items()} | kept
    return Estimate(always, rollout, actor, host, disk(config, shape))


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


def engine_adapter(config: Config, shape: ModelShape) -> dict[str, float]:
    """LoRA's places in the engine, where it is not merged into the weights."""
    if config.actor.train == "full" or config.rollout.lora == "merged":
        return {}
    return {"engine: LoRA": BYTES[config.rollout.dtype] * adapter_parameters(config, shape)}


def frozen_weights(config: Config, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """The actor's base, sharded, and policies that are models of their own."""
    size = BYTES[config.actor.dtype] * shape.transformer_parameters / layout.shard_size
    given = find_class("algorithm", config.algorithm.name)(config).given
    models = {f"actor: {policy}": size for policy, path in given.items() if is_checkpoint(path)}
    return models if config.actor.train == "full" else {"actor: base weights": size} | models


def trained_weights(config: Config, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """What the optimizer changes, sharded."""
    weights = trained_bytes(config, shape) / layout.shard_size
    parts = {
        "actor: weights" if config.actor.train == "full" else "actor: LoRA": weights,
        "actor: Adam": 2 * weights,
    }
    return parts | (
        {"actor: stored policies": stored}
        if (stored := stored_bytes(config, shape) / layout.shard_size)
        else {}
    )


def trained_bytes(config: Config, shape: ModelShape) -> float:
    """Master weights of all ranks that share one copy; Adam's two moments have as much each."""
    if config.actor.train == "full":
        return BYTES["float32"] * shape.transformer_parameters
    return BYTES[config.actor.lora.dtype] * adapter_parameters(config, shape)


def stored_bytes(config: Config, shape: ModelShape) -> float:
    """The policies that are stored beside the current one, in fp32: the algorithm's and the running mean."""
    algorithm = find_class("algorithm", config.algorithm.name)(config)
    models = {policy for policy, path in algorithm.given.items() if is_checkpoint(path)}
    stored = {*algorithm.policies, algorithm.sampler} - {CURRENT, REFERENCE} - models
    count = len(stored) + (config.actor.ema_decay is not None)
    full = config.actor.train == "full"
    one = shape.transformer_parameters if full else adapter_parameters(config, shape)
    return float(count * BYTES["float32"] * one)


def adapter_parameters(config: Config, shape: ModelShape) -> int:
    return shape.lora_parameters(config.actor.lora.rank, config.actor.lora.target_modules)


def generation(config: Config, shape: ModelShape) -> dict[str, float]:
    """The VAE decoder's tensors for one micro-batch, which take more than the transformer's."""
    pixels = config.rollout.micro_batch_size * shape.frames * config.model.height * config.model.width
    return {"generation": DECODE_VALUES_PER_PIXEL * pixels * BYTES[config.rollout.dtype]}


def training(config: Config, shape: ModelShape, layout: Layout, text_width: int) -> dict[str, float]:
    """What the actor's forward and backward passes need beside the weights, for one micro-batch."""
    branches = guidance_branches(config)
    tokens = config.actor.micro_batch_size * (shape.latent_tokens + text_width)  # of one branch
    vector = shape.width * BYTES[config.actor.dtype]
    block: float = SAVED_VECTORS[config.actor.dtype]
    if config.actor.train == "full":
        block += FULL_SAVED_VECTORS
    else:
        block += (
            shape.lora_layers(config.actor.lora.target_modules) / 2 * config.actor.lora.rank / shape.width
        )  # of each stream
    once = branches if actor_numerics(config).batched_cfg else 1  # branches that compute at the same time
    parts = {
        "actor: gradients": trained_bytes(config, shape) / layout.shard_size,
        "actor: gathered blocks": GATHERED_BLOCKS * BYTES[config.actor.dtype] * shape.block_parameters,
    }
    if config.actor.train == "full":  # as computed, and in fp32 on their way to the ranks that keep them
        parts["actor: gradients of a block"] = (
            BYTES[config.actor.dtype] + BYTES["float32"]
        ) * shape.block_parameters
    if config.actor.activation_checkpointing:
        parts["actor: inputs of blocks"] = branches * tokens * vector * shape.layers
        parts["actor: one block's activations"] = once * tokens * vector * block
    else:
        parts["actor: activations"] = branches * tokens * vector * shape.layers * block
    return parts | {"actor: working memory": once * tokens * vector * ACTOR_WORKING_VECTORS}


def guidance_branches(config: Config) -> int:
    return 2 if config.sampling.true_cfg_scale > 1 else 1


def samples_of_rank(config: Config, layout: Layout) -> int:
    """Images that a rank trains in one step."""
    return config.data.prompts_per_step * config.data.samples_per_prompt // layout.world_size


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
    latents = (window_size(config) + 2) * shape.latent_values * KEPT_LATENTS_BYTES
    conditions = guidance_branches(config) * shape.condition_values(text_width) * BYTES[config.rollout.dtype]
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
        * (3 * trained_bytes(config, shape) + stored_bytes(config, shape)),
        "sample images": images * config.model.height * config.model.width * PNG_BYTES_PER_PIXEL,
    }
