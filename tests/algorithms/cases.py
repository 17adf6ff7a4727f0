"""Samples with a trajectory of two streams, and a model of three numbers that predicts their velocities."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from omnirl_hpc.algorithms.algorithm import PAIRS, Algorithm, LikelihoodAlgorithm, TrainingPoint
from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.config.classes import find_class, settings_class
from omnirl_hpc.config.schema import Config, SamplingConfig, WindowConfig
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.samples import SampleIdentity, Samples, Trajectory
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, map_streams

SHAPES = {"video": (3, 2), "audio": (2, 1)}
SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.2, 0.0])
SCHEDULES = {name: Schedule(SIGMAS, 1000 * SIGMAS[:-1]) for name in SHAPES}
COUNT, STEPS = 6, 3


def make(name: str, kind: str = "sde", noise_level: float = 0.7, **settings) -> Algorithm:
    """An algorithm by its name, on schedules of five steps of which the first four may be stochastic."""
    window = WindowConfig(size=STEPS, first=0, last=4)
    sampling = SamplingConfig(
        num_inference_steps=5, true_cfg_scale=1.0, transition=kind, noise_level=noise_level, window=window
    )
    config = Config(sampling=sampling, algorithm=settings_class("algorithm", name)(**settings))
    return find_class("algorithm", name)(config)


def normal(seed: int, count: int = COUNT) -> Streams:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, *shape, generator=generator) for name, shape in SHAPES.items()}


def samples(kind: str = "sde", noise_level: float = 0.7) -> Samples:
    """COUNT of them; half start their windows at step 0, the others at 1."""
    starts = [i % 2 for i in range(COUNT)]
    edges = torch.tensor([[*range(start, start + STEPS + 1)] for start in starts])
    sigmas, latents = SIGMAS[edges], [normal(0)]
    for i in range(STEPS):
        given = {"noise_level": noise_level, "sigma_max": float(SIGMAS[1])}
        drawn = {
            name: transition(
                kind, v, latents[-1][name], sigmas[:, i], sigmas[:, i + 1], **given, noise=noise
            ).next_sample
            for (name, v), noise in zip(normal(10 + i).items(), normal(20 + i).values())
        }
        latents.append(drawn)
    one = {name: sigmas for name in SHAPES}
    trajectory = Trajectory(
        latents={name: torch.stack([edge[name] for edge in latents], dim=1) for name in SHAPES},
        log_probs=torch.randn(COUNT, STEPS, generator=torch.Generator().manual_seed(30)),
        sigmas=one,
        timesteps={name: 1000 * sigmas[:, :-1] for name in SHAPES},
        sigma_max={name: torch.full((COUNT,), float(SIGMAS[1])) for name in SHAPES},
    )
    return Samples(
        identity=[SampleIdentity(0, 5, str(i // 2), i) for i in range(COUNT)],
        group=torch.arange(COUNT) // 2,
        conditions=[{"text": torch.tensor([0.1 * i])} for i in range(COUNT)],
        negative=None,
        clean=normal(40),
        version=torch.zeros(COUNT, dtype=torch.int64),
        noise_hash=torch.zeros(COUNT, dtype=torch.int64),
        trajectory=trajectory,
    )


def units(algorithm: Algorithm) -> Batch:
    """What an algorithm trains on in one update; one unit has no weight."""
    sampling = algorithm.config.sampling
    made: Samples | Pairs = samples(sampling.transition, sampling.noise_level)
    if algorithm.needs == PAIRS and algorithm.source != "rollout":
        made = Pairs(made.identity, made.group, made.conditions, chosen=made.clean, rejected=normal(50))
    weights = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.0, 0.2])
    return Batch(made, torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0]), weights)


def velocity(point: TrainingPoint, theta: Tensor) -> Streams:
    text = point.conditions["text"].flatten()

    def of_stream(latents: Tensor, timesteps: Tensor) -> Tensor:
        rest = theta[1] * timesteps / 1000 + theta[2] * text
        return theta[0] * latents + rest.reshape(-1, *[1] * (latents.dim() - 1))

    return map_streams(of_stream, point.latents, point.timesteps)


def loss_and_gradient(
    algorithm: Algorithm, parts: Iterable[Batch], theta: Tensor, old: Tensor | None = None
) -> tuple[float, Tensor]:
    """Of all points of the micro-batches, where the old policy is the model `old` (None: the same)."""
    theta, total = theta.clone().requires_grad_(), 0.0
    for part in parts:
        for point in algorithm.training_points(part, SCHEDULES):
            if isinstance(algorithm, LikelihoodAlgorithm):
                before = velocity(point, theta.detach() if old is None else old)
                point = algorithm.with_old(point, algorithm.observe(point, before))
            others = {
                policy: velocity(point, theta.detach() * (1 + 0.1 * (i + 1)))
                for i, policy in enumerate(algorithm.policies[1:])
            }
            output = algorithm.loss(point, {CURRENT: velocity(point, theta)} | others)
            output.loss.backward()
            total += float(output.loss.detach())
    return total, theta.grad


def moments(
    kind: str, x: Tensor, v: Tensor, t: float, u: float, level: float, t_max: float
) -> tuple[Tensor, float]:
    """Mean and standard deviation of the step t -> u, in the dtype of x: the papers' formulas written down
    anew.
    """
    dt = u - t
    if kind == "sde":
        s = level * (t / (1 - min(t, t_max))) ** 0.5
        return x + (v + s**2 / (2 * t) * (x + (1 - t) * v)) * dt, s * (-dt) ** 0.5
    if kind == "dance":
        score = -(x + (1 - t) * v) / t
        return x + (v - level**2 / 2 * score) * dt, level * (-dt) ** 0.5
    std = u * float(torch.sin(torch.tensor(level * torch.pi / 2, dtype=torch.float64)))
    return (1 - u) * (x - t * v) + (u**2 - std**2) ** 0.5 * (x + (1 - t) * v), std


def rows(
    batch: Batch, kind: str, level: float, theta: Tensor, old: Tensor
) -> Iterable[tuple[int, int, float, float, list[tuple[Tensor, Tensor, Tensor, float]]]]:
    """For each sample and each step of its window: (sample, step of the window, sigma before and after, and
    of each stream flat float64 (mean, old mean, next latents, std)). For loops that follow a paper.
    """
    made = batch.units
    for b in range(len(batch)):
        text = float(made.conditions[b]["text"])
        for i in range(STEPS):
            t, u = made.trajectory.sigmas["video"][b, i : i + 2].tolist()
            streams = []
            for name in SHAPES:
                x, after = (made.trajectory.latents[name][b, i + k].double().flatten() for k in (0, 1))
                time = float(made.trajectory.timesteps[name][b, i]) / 1000
                mean, old_mean = (
                    moments(kind, x, p[0] * x + p[1] * time + p[2] * text, t, u, level, float(SIGMAS[1]))
                    for p in (theta, old)
                )
                streams.append((mean[0], old_mean[0], after, mean[1]))
            yield b, i, t, u, streams


def joined(streams: list[tuple[Tensor, Tensor, Tensor, float]]) -> tuple[Tensor, Tensor, Tensor, float]:
    """As one tensor of all elements; both streams have one standard deviation here."""
    mean, old, after = (torch.cat([stream[k] for stream in streams]) for k in range(3))
    return mean, old, after, streams[0][3]


def log_density(kind: str, mean: Tensor, after: Tensor, std: float) -> Tensor:
    """The mean over elements, but for constants."""
    error = (after - mean) ** 2
    return (-error if kind == "cps" else -error / (2 * std**2)).mean()
