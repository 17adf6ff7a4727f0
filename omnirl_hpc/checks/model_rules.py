"""The rules about the model: its family, and what is made with it."""

from __future__ import annotations

import json
from pathlib import Path

from omnirl_hpc.checks.require import require_class
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import require
from omnirl_hpc.models.spec import find_spec


def model_is_known(config: Config, world_size: int) -> None:
    require_class("model", "model.family", config.model.family)


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
