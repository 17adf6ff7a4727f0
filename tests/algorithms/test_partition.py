"""The sum of losses over an update, and its gradient, do not depend on how samples are dealt to micro-batches
and ranks, nor on their order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omnirl_hpc.algorithms.algorithm import PAIRS, Algorithm
from omnirl_hpc.algorithms.awm import AWM, AWMConfig
from omnirl_hpc.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from omnirl_hpc.algorithms.diffusion_opd import DiffusionOPD, DiffusionOPDConfig
from omnirl_hpc.algorithms.dpo import DPO, DPOConfig
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.algorithms.online_dpo import OnlineDPO, OnlineDPOConfig
from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.config.schema import Config, SamplingConfig
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.sampling.samples import SampleIdentity, Samples, Trajectory
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams

SHAPES = {"video": (3, 2), "audio": (2, 1)}
UNITS, WINDOW = 6, 2
SIGMAS = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
SCHEDULES = {name: Schedule(SIGMAS, 1000 * SIGMAS[:-1]) for name in SHAPES}
ALGORITHMS = {
    AWM: AWMConfig(points_per_sample=3),
    DiffusionNFT: DiffusionNFTConfig(kl_coef=0.1),
    DiffusionOPD: DiffusionOPDConfig(teacher="a", policy_coef=0.5, clip_range=0.2),
    DPO: DPOConfig(beta=3.0),
    FlowGRPO: FlowGRPOConfig(kl_coef=0.1, clip_range=0.2),
    OnlineDPO: OnlineDPOConfig(beta=3.0),
}


def make(kind: type[Algorithm]) -> Algorithm:
    sampling = SamplingConfig(num_inference_steps=5, true_cfg_scale=1.0, noise_level=0.7)
    return kind(Config(sampling=sampling, algorithm=ALGORITHMS[kind]))


def draw(seed: int, *leading: int) -> Streams:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*leading, *shape, generator=generator) for name, shape in SHAPES.items()}


def everything() -> Samples:
    """UNITS samples of three groups, with their stochastic steps."""
    same = lambda values: {name: values.expand(UNITS, -1) for name in SHAPES}  # noqa: E731
    trajectory = Trajectory(
        latents=draw(1, UNITS, WINDOW + 1),
        log_probs=torch.linspace(-1.5, -0.5, UNITS * WINDOW).reshape(UNITS, WINDOW),
        sigmas=same(SIGMAS[1 : WINDOW + 2]),
        timesteps=same(1000 * SIGMAS[1 : WINDOW + 1]),
        sigma_max={name: torch.full((UNITS,), 0.8) for name in SHAPES},
    )
    return Samples(
        identity=[SampleIdentity(0, 3, f"p{i // 2}", i % 2) for i in range(UNITS)],
        group=torch.arange(UNITS) // 2,
        conditions=[{"embeds": torch.zeros(1)}] * UNITS,
        negative=None,
        clean=draw(2, UNITS),
        version=torch.zeros(UNITS, dtype=torch.int64),
        noise_hash=torch.zeros(UNITS, dtype=torch.int64),
        trajectory=trajectory,
    )


def update_of(algorithm: Algorithm) -> Batch:
    weights = torch.tensor([0.3, 0.1, 0.2, 0.0, 0.25, 0.15])
    if algorithm.needs == PAIRS:
        who = [SampleIdentity(0, 3, f"p{i}", 0) for i in range(UNITS)]
        conditions = [{"embeds": torch.zeros(1)}] * UNITS
        pairs = Pairs(who, torch.arange(UNITS), conditions, draw(4, UNITS), draw(5, UNITS))
        return Batch(pairs, torch.ones(UNITS), weights)
    return Batch(everything(), torch.tensor([0.9, -0.4, 0.2, -1.0, 0.6, -0.7]), weights)


def accumulated(algorithm: Algorithm, parts: list[list[int]]) -> tuple[float, Tensor]:
    """Of a model that predicts a latent times a parameter, and whose policies differ by a constant."""
    factors, update = torch.tensor([0.3, -0.2], requires_grad=True), update_of(algorithm)
    total, gradient = 0.0, torch.zeros(2)
    for rows in parts:
        for point in algorithm.training_points(update[rows], SCHEDULES):
            velocities = {
                policy: {
                    name: factors[i] * x + 0.2 * away for i, (name, x) in enumerate(point.latents.items())
                }
                for away, policy in enumerate(algorithm.policies)
            }
            assert algorithm.policies[0] == CURRENT
            output = algorithm.loss(point, velocities)
            gradient += torch.autograd.grad(output.loss, factors)[0]
            total += float(output.loss.detach())
    return total, gradient


@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4], [5]], [[4, 1], [5, 0, 3], [2]]], ids=str)
def test_how_samples_are_dealt_changes_nothing(kind, parts):
    algorithm = make(kind)
    whole, gradient = accumulated(algorithm, [[*range(UNITS)]])
    total, other = accumulated(algorithm, parts)
    assert bool((gradient != 0).all())
    assert total == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(other, gradient, rtol=1e-6, atol=1e-6)
