"""The rules about rollout engines."""

from __future__ import annotations

from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import require
from omnirl_hpc.models.spec import find_spec


def engine_runs_the_family(config: Config, world_size: int) -> None:
    spec = find_spec(config.model.family)
    require(
        config.rollout.engine in spec.numerics,
        f"rollout.engine={config.rollout.engine} does not run model.family={config.model.family}: choose "
        f"{' or '.join(f'rollout={engine}' for engine in spec.numerics)}",
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
