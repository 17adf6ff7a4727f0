"""Evaluating and updating an actor with an algorithm: the loops over training points."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from omnirl_hpc.actor.actor import Actor
from omnirl_hpc.actor.ema import ema_blend
from omnirl_hpc.algorithms.algorithm import (
    Algorithm,
    LikelihoodAlgorithm,
    LikelihoodPoint,
    Old,
    TrainingPoint,
)
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
def recompute_old(
    actor: Actor,
    algorithm: LikelihoodAlgorithm,
    points: Iterable[LikelihoodPoint],
    metrics: Accumulator,
    check_stop: Callable[[], None],
) -> list[Old]:
    """What the actor makes of each point before its first update. `check_stop` is called before each
    point.

    Only the points of later updates need it: `accumulate_gradients` does the same for the first one's, with
    its own forward pass.
    """
    old = []
    for point in points:
        check_stop()
        old.append(_compare(algorithm, point, actor.velocity(point, CURRENT), metrics))
    return old


def accumulate_gradients(
    actor: Actor,
    algorithm: Algorithm,
    points: Iterable[TrainingPoint],
    metrics: Accumulator,
    check_stop: Callable[[], None],
    old: Sequence[Old] | None = None,
    first: bool = False,
) -> None:
    """Add the gradient of the sum of the losses of `points`, whose weights sum to 1 over all ranks. Memory is
    that of one point.

    old: of each point, from `recompute_old`. first: no optimizer step has been made since the
    rollout. A loss that is not finite shows in `apply_gradients`, on all ranks.
    """
    for i, point in enumerate(points):
        check_stop()
        velocities = {}
        for policy in algorithm.policies:
            with torch.set_grad_enabled(policy == CURRENT):
                velocities[policy] = actor.velocity(point, policy)
        if isinstance(algorithm, LikelihoodAlgorithm) and isinstance(point, LikelihoodPoint):
            if first:
                current = map_streams(Tensor.detach, velocities[CURRENT])
                point = algorithm.with_old(point, _compare(algorithm, point, current, metrics))
            elif old is not None:
                point = algorithm.with_old(point, old[i])
        output = algorithm.loss(point, velocities)
        output.loss.backward()
        metrics.add_sum("loss", output.loss.detach())
        for name, values in output.means.items():
            metrics.add_mean(name, values, point.weights)
        for name, value in output.maxima.items():
            metrics.add_max(name, value)


def check_gap(algorithm: Algorithm, metrics: Accumulator, limit: float) -> None:
    """Collective. Raises MismatchError on every rank where engine and actor disagree by more than `limit`."""
    if not isinstance(algorithm, LikelihoodAlgorithm):
        return
    gap = metrics.largest(LARGEST_GAP)
    if not gap <= limit:
        raise MismatchError(
            "before the first update, the actor's log-probabilities differ from the engine's by up to "
            f"{gap:.3g}, more than rollout.max_log_prob_gap={limit}: the two do not compute the same policy"
        )
    if gap > algorithm.tolerated_gap:
        log.warning(
            "the engine's log-probabilities differ from the actor's by up to %.3g, more than the clip range "
            "%.3g: with algorithm.old_log_prob=rollout such samples are clipped before anything is learned; "
            "recompute avoids it",
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


def _compare(
    algorithm: LikelihoodAlgorithm, point: LikelihoodPoint, velocity: Streams, metrics: Accumulator
) -> Old:
    """What the actor makes of a point; the distance of its log-probabilities from the engine's is noted."""
    old = algorithm.observe(point, velocity)
    gap = (old.log_prob - point.rollout_log_prob).abs()
    metrics.add_max(LARGEST_GAP, gap.max())
    metrics.add_mean(MEAN_GAP, gap, torch.ones_like(gap))
    return old
