"""Evaluating and updating an actor with an algorithm: the loops over micro-batches and training points."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omnirl_hpc.actor.actor import Actor
from omnirl_hpc.actor.ema import ema_blend
from omnirl_hpc.algorithms.algorithm import Algorithm, TrainingPoint
from omnirl_hpc.errors import MismatchError
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.sampling.streams import Streams, map_streams

log = logging.getLogger(__name__)

# |log p of the actor - log p of the engine| before the first optimizer step of a training step: 0 where both
# compute the same
LARGEST_GAP = "ratio/first_update_max_abs_log"
MEAN_GAP = "ratio/first_update_mean_abs_log"


@torch.no_grad()
def recompute_old_log_probs(
    actor: Actor,
    algorithm: Algorithm,
    points: Sequence[TrainingPoint],
    metrics: Accumulator,
    check_stop: Callable[[], None],
) -> None:
    """Show the algorithm what the actor predicts before its first update. `check_stop` is called before each
    point.

    Only the points of later updates need it: `accumulate_gradients` does the same for the first one's, with
    its own forward pass.
    """
    for point in points:
        check_stop()
        _measure_gap(algorithm, point, actor.velocity(point, CURRENT), metrics)


def accumulate_gradients(
    actor: Actor,
    algorithm: Algorithm,
    points: Sequence[TrainingPoint],
    metrics: Accumulator,
    check_stop: Callable[[], None],
    first: bool,
) -> None:
    """Add the gradient of the sum of the losses of `points`, whose weights sum to 1 over all ranks. Memory is
    that of one point.

    `first`: no optimizer step has been made since the rollout. A loss that is not finite shows in
    `apply_gradients`, on all ranks.
    """
    for point in points:
        check_stop()
        velocities = {}
        for policy in algorithm.policies:
            with torch.set_grad_enabled(policy == CURRENT):
                velocities[policy] = actor.velocity(point, policy)
        if first:
            _measure_gap(algorithm, point, map_streams(Tensor.detach, velocities[CURRENT]), metrics)
        output = algorithm.loss(point, velocities)
        output.loss.backward()
        metrics.add_sum("loss", output.loss.detach())
        for name, values in output.means.items():
            metrics.add_mean(name, values, point.weights)
        for name, value in output.maxima.items():
            metrics.add_max(name, value)


def check_gap(algorithm: Algorithm, metrics: Accumulator, limit: float) -> None:
    """Collective. Raises MismatchError on every rank where engine and actor disagree by more than `limit`."""
    if LARGEST_GAP not in metrics:  # the algorithm has no likelihoods
        return
    gap = metrics.largest(LARGEST_GAP)
    if not gap <= limit:
        raise MismatchError(
            f"before the first update, the actor's log-probabilities differ from the engine's by up to {gap:.3g}, more than "
            f"rollout.max_log_prob_gap={limit}: the two do not compute the same policy"
        )
    if gap > algorithm.tolerated_gap:
        log.warning(
            "the engine's log-probabilities differ from the actor's by up to %.3g, more than the clip range %.3g: with "
            "algorithm.old_log_prob=rollout such samples are clipped before anything is learned; recompute avoids it",
            gap,
            algorithm.tolerated_gap,
        )


def apply_gradients(actor: Actor, metrics: Accumulator, ema_decay: float | None = None) -> None:
    """One optimizer step; the running mean, where one is kept, follows it up to `ema_decay`.

    Raises NonFiniteError on every rank for a gradient that is NaN or infinite on any.
    """
    grad_norm, lr = actor.apply_gradients()
    if ema_decay is not None:
        actor.blend(ema_blend(actor.updates, ema_decay))
    metrics.set("grad_norm", grad_norm)
    metrics.set("lr", lr)


def _measure_gap(algorithm: Algorithm, point: TrainingPoint, velocity: Streams, metrics: Accumulator) -> None:
    gap = algorithm.before_first_update(point, velocity)
    if gap is not None:
        metrics.add_max(LARGEST_GAP, gap.max())
        metrics.add_mean(MEAN_GAP, gap, torch.ones_like(gap))
