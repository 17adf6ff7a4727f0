"""The policy being trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from omnirl_hpc.actor.actor import Actor
    from omnirl_hpc.algorithms import Algorithm
    from omnirl_hpc.config.schema import Config
    from omnirl_hpc.layout import Layout
    from omnirl_hpc.models.family import ModelFamily


def make_actor(
    config: Config, family: ModelFamily, layout: Layout, device: torch.device, algorithm: Algorithm
) -> Actor:
    """An actor that holds the policies of an algorithm. Collective."""
    from omnirl_hpc.actor.fsdp import FSDPActor

    policies = (*algorithm.policies, algorithm.sampler)
    return FSDPActor(config, family, layout, device, policies, algorithm.given)
