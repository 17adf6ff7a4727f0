"""What a training step learns from: samples that are generated and scored, or pairs from a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from omnirl_hpc.algorithms.algorithm import PREFERENCES, Algorithm
from omnirl_hpc.config.schema import Config

if TYPE_CHECKING:
    import torch

    from omnirl_hpc.layout import Layout
    from omnirl_hpc.metrics.hashes import StepHashes
    from omnirl_hpc.metrics.phases import PhaseTimer
    from omnirl_hpc.models.family import ModelFamily
    from omnirl_hpc.residency import Residency
    from omnirl_hpc.run_directory import RunDirectory
    from omnirl_hpc.sources.generation import Generation, NoGeneration
    from omnirl_hpc.sources.source import Source


def make_generation(
    config: Config,
    family: ModelFamily,
    layout: Layout,
    device: torch.device,
    algorithm: Algorithm,
    timer: PhaseTimer,
    residency: Residency,
) -> Generation | NoGeneration:
    """The engine and the rewards, where anything is ever generated."""
    from omnirl_hpc.sources.generation import Generation, NoGeneration

    if algorithm.source == PREFERENCES and not config.evaluation.every:
        return NoGeneration()

    return Generation(config, family, layout, device, timer, residency)


def make_source(
    config: Config,
    family: ModelFamily,
    layout: Layout,
    device: torch.device,
    algorithm: Algorithm,
    generation: Generation | NoGeneration,
    timer: PhaseTimer,
    hashes: StepHashes,
    run: RunDirectory,
    residency: Residency,
) -> Source:
    """The source that an algorithm asks for."""
    if algorithm.source == PREFERENCES:
        from omnirl_hpc.sources.preferences import PreferenceSource

        return PreferenceSource(config, family, layout, device, timer, hashes, residency)
    from omnirl_hpc.sources.rollout import RolloutSource

    generates = cast("Generation", generation)
    return RolloutSource(config, family, layout, device, algorithm, generates, timer, hashes, run)
