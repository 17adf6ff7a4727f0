"""Training points without a rollout, and the gradients that an actor or plain autograd gives for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.update import accumulate_gradients
from omnirl_hpc.algorithms import FlowGRPO
from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import Config
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.models.lora import add_lora, lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.models.spec import Numerics
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sampling.samples import Condition, SampleIdentity, Samples, Trajectory
from omnirl_hpc.sampling.streams import LATENTS, map_streams
from tests.helpers import ALONE, CPU, fill_adapter, go_on

SAMPLES = 4
TEXT_WIDTH = 32
LENGTH = 8  # of padded text: short, so that attention is cheap


def make_samples(config: Config) -> Samples:
    """SAMPLES samples with a window of 2, as the transition draws them for a model that predicts random
    velocities.
    """
    family = QwenImage(config.model)
    schedule = family.schedules(config.sampling.num_inference_steps)[LATENTS]
    shape = family.stream_shapes()[LATENTS]
    dtype = getattr(torch, config.rollout.dtype)

    def text(name: str, tokens: Sequence[int]) -> list[Condition]:
        mask = torch.arange(LENGTH)[None] < torch.tensor(tokens)[:, None]
        values = standard_normal((SAMPLES, LENGTH, TEXT_WIDTH), 0, name) * mask[..., None]
        return [{"embeds": embeds, "mask": valid} for embeds, valid in zip(values.to(dtype), mask)]

    def draw(name: str) -> Tensor:
        return standard_normal((SAMPLES, *shape), 0, name)

    latents, settings = [draw("initial")], config.sampling
    for i in range(2):
        step = transition(
            settings.transition,
            draw(f"velocity {i}"),
            latents[-1],
            schedule.sigmas[i],
            schedule.sigmas[i + 1],
            noise_level=settings.noise_level,
            sigma_max=schedule.sigma_max,
            noise=draw(f"noise {i}"),
        )
        latents.append(step.next_sample)

    rows = torch.arange(SAMPLES)
    trajectory = Trajectory(
        latents={LATENTS: torch.stack(latents, dim=1)},
        log_probs=torch.zeros(SAMPLES, 2),
        sigmas={LATENTS: schedule.sigmas[:3].expand(SAMPLES, 3)},
        timesteps={LATENTS: schedule.timesteps[:2].expand(SAMPLES, 2)},
        sigma_max={LATENTS: torch.full((SAMPLES,), schedule.sigma_max)},
        expert=torch.zeros(SAMPLES, 2, dtype=torch.int64),
    )
    return Samples(
        identity=[SampleIdentity(config.seed, 0, str(row // 2), row % 2) for row in range(SAMPLES)],
        group=rows // 2,
        conditions=text("positive", [7, 3, 5, 6]),
        negative=text("negative", [1, 1, 2, 1]) if config.sampling.true_cfg_scale > 1 else None,
        clean={LATENTS: latents[-1]},
        version=rows * 0,
        noise_hash=rows,
        trajectory=trajectory,
    )


def make_points(
    config: Config, rows: Sequence[int], micro_batch: int, weights: Sequence[float] | None = None
) -> list[TrainingPoint]:
    """The points of some of the samples. All four together are one update."""
    batch, algorithm = make_samples(config), FlowGRPO(config)
    advantages = torch.tensor([1.0, -0.5, 0.25, -2.0])
    weights = torch.full((SAMPLES,), 1 / SAMPLES) if weights is None else torch.tensor(weights)
    batch = Batch(batch, advantages, weights)
    schedules = QwenImage(config.model).schedules(config.sampling.num_inference_steps)
    return [
        point
        for part in torch.tensor(rows).split(micro_batch)
        for point in algorithm.training_points(batch[part], schedules)
    ]


def make_actor(config: Config, layout: Layout = ALONE) -> FSDPActor:
    """An actor whose adapter, if it has one, is not idle."""
    actor = FSDPActor(config, QwenImage(config.model), layout, CPU)
    fill_adapter(actor._transformer, seed=1)
    return actor


def gradients(actor: FSDPActor, config: Config, points: list[TrainingPoint]) -> dict[str, Tensor]:
    """Full gradients of one update, which is not applied. The old policy is the current one: ratios are 1."""
    algorithm, metrics = FlowGRPO(config), Accumulator(CPU)
    accumulate_gradients(actor, algorithm, points, metrics, go_on, first=True)
    made = {name: gradient.clone() for name, gradient in actor.gradients()}
    for parameter in actor._parameters.values():
        parameter.grad = None
    return made


def plain_gradients(config: Config, points: list[TrainingPoint]) -> dict[str, Tensor]:
    """The same by plain autograd on a transformer that no FSDP has touched: what is expected."""
    family, algorithm = QwenImage(config.model), FlowGRPO(config)
    transformer = family.load_transformer(getattr(torch, config.actor.dtype))
    bare = family.load_transformer(getattr(torch, config.actor.dtype))
    if config.actor.train == "lora":
        add_lora(
            transformer,
            config.actor.lora,
            family.spec.lora_targets,
            getattr(torch, config.actor.lora.dtype),
            config.seed,
        )
        fill_adapter(transformer, seed=1)
    for point in points:

        def velocity(model, point=point):
            guidance = family.guidance(config.sampling)
            return family.velocity(
                model,
                point.latents,
                point.timesteps,
                point.conditions,
                point.negative,
                guidance,
                Numerics(),
            )

        velocities = {CURRENT: velocity(transformer)}
        if REFERENCE in algorithm.policies:
            velocities[REFERENCE] = map_streams(Tensor.detach, velocity(bare))
        old = algorithm.observe(point, map_streams(Tensor.detach, velocities[CURRENT]))
        algorithm.loss(algorithm.with_old(point, old), velocities).loss.backward()
    trained = (
        lora_parameters(transformer) if config.actor.train == "lora" else dict(transformer.named_parameters())
    )
    return {name: p.grad for name, p in trained.items() if p.grad is not None}


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, relative to the largest gradient."""
    assert first.keys() == second.keys() and first
    largest = max(float(g.abs().max()) for g in first.values())
    assert largest > 0
    return max(float((first[name] - second[name]).abs().max()) for name in first) / largest
