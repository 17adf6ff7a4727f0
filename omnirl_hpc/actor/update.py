"""Evaluating and updating an actor with an algorithm: the loops over micro-batches and training points."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from omnirl_hpc.actor.actor import Actor
from omnirl_hpc.algorithms.algorithm import CURRENT, Algorithm, TrainingPoint
from omnirl_hpc.errors import NonFiniteError
from omnirl_hpc.metrics.accumulator import Accumulator

FIRST_UPDATE_GAP = "ratio/first_update_max_abs_log"


@torch.no_grad()
def recompute_old_log_probs(
    actor: Actor, algorithm: Algorithm, points: Sequence[TrainingPoint], metrics: Accumulator, check_stop: Callable[[], None]
) -> None:
    """Replace the engine's log-probabilities by the actor's, before its first update. `check_stop` is called before each point."""
    for point in points:
        check_stop()
        velocity = actor.velocity(point, CURRENT)
        point.extras["old_log_prob"] = algorithm.log_prob(point, velocity)
        metrics.add_max(FIRST_UPDATE_GAP, rollout_gap(algorithm, point, velocity))


def accumulate_gradients(
    actor: Actor,
    algorithm: Algorithm,
    points: Sequence[TrainingPoint],
    metrics: Accumulator,
    check_stop: Callable[[], None],
    first: bool,
) -> None:
    """Add the gradient of the sum of the losses of `points`, whose weights sum to 1 over all ranks. Memory is that of one point.

    `first`: no optimizer step has been made since the rollout. Raises NonFiniteError for a loss that is NaN or infinite.
    """
    for point in points:
        check_stop()
        velocities = {}
        for adapter in algorithm.adapters:
            with torch.set_grad_enabled(adapter == CURRENT):
                velocities[adapter] = actor.velocity(point, adapter)
        output = algorithm.loss(point, velocities)
        if not bool(torch.isfinite(output.loss)):
            raise NonFiniteError(f"the loss is {float(output.loss.detach())}")
        output.loss.backward()
        metrics.add_sum("loss", output.loss.detach())
        for name, values in output.means.items():
            metrics.add_mean(name, values, point.weights)
        for name, value in output.maxima.items():
            metrics.add_max(name, value)
        if first:
            metrics.add_max(FIRST_UPDATE_GAP, rollout_gap(algorithm, point, velocities[CURRENT].detach()))


def apply_gradients(actor: Actor, metrics: Accumulator) -> None:
    """One optimizer step. Raises NonFiniteError for a gradient that is NaN or infinite."""
    grad_norm, lr = actor.apply_gradients()
    metrics.set("grad_norm", grad_norm)
    metrics.set("lr", lr)


def rollout_gap(algorithm: Algorithm, point: TrainingPoint, velocity: Tensor) -> Tensor:
    """The largest |log p of the actor - log p of the rollout| of a point: 0 where both compute the same."""
    return (algorithm.log_prob(point, velocity) - point.extras["rollout_log_prob"]).abs().max()
