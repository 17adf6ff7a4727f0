"""Rollout engines. All give the same trajectories; they differ in speed and in what they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only for annotations, so that versions can be checked before torch is imported
    import torch

    from omnirl_hpc.config.schema import Config
    from omnirl_hpc.layout import Layout
    from omnirl_hpc.metrics.phases import PhaseTimer
    from omnirl_hpc.models.family import ModelFamily
    from omnirl_hpc.rollout.engine import RolloutEngine


def make_engine(
    config: Config, family: ModelFamily, layout: Layout, device: torch.device, timer: PhaseTimer
) -> RolloutEngine:
    """The engine that `rollout.engine` names. Only its own module is imported."""
    if config.rollout.engine == "diffusers":
        from omnirl_hpc.rollout.diffusers_engine import DiffusersEngine

        return DiffusersEngine(config, family, device, timer)
    if config.rollout.engine == "vllm_omni":
        from omnirl_hpc.rollout.vllm_omni.engine import VllmOmniEngine

        return VllmOmniEngine(config, family, layout, device, timer)
    raise ValueError(f"unknown engine {config.rollout.engine!r}")
