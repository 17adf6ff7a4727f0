"""Settings to plan with."""

from __future__ import annotations

from omnirl_hpc.config.load import NO_PATHS, load_config
from omnirl_hpc.config.schema import Config
from omnirl_hpc.layout import Layout, make_layout


def full_size(*overrides: str, ranks: int = 1) -> tuple[Config, Layout]:
    """The main recipe on published Qwen-Image."""
    config = load_config([*NO_PATHS, "recipe=flowgrpo_qwen_image", *overrides]).config
    return config, make_layout(config, 0, ranks)


# What was measured in benchmarks/results: one H200, 32 images a step, prompts padded to 256 tokens
MEASURED = ("data.prompts_per_step=2",)
MEASURED_TEXT = 256
EAGER = ("rollout.lora=adapter", "rollout.compile=false", "actor.compile=false")
COMPILED = ("rollout.lora=merged", "rollout.compile=true", "actor.compile=true")
