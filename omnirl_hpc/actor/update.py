"""Evaluating and updating an actor with an algorithm: the loops over training points."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
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


def look_back(
    actor: Actor,
    algorithm: LikelihoodAlgorithm,
    updates: Sequence[Iterable[LikelihoodPoint]],
    metrics: Accumulator,
    check_stop: Callable[[], None],
) -> list[list[Old] | None]:
    """What the actor makes of the points of each update before the first one changes it, corrected where the
    algorithm does so; None for a first update that needs no look ahead. Collective.
    """
    made: list[list[Old] | None] = []
    for i, points in enumerate(updates):
        if i == 0 and not algorithm.corrects:
            made.append(None)  # its own forward pass will do
            continue
        old = recompute_old(actor, algorithm, points, metrics, check_stop)
        made.append(correct_rollout(algorithm, points, old, metrics) if algorithm.corrects else old)
    return made


def correct_rollout(
    algorithm: LikelihoodAlgorithm,
    points: Iterable[LikelihoodPoint],
    old: Sequence[Old],
    metrics: Accumulator,
) -> list[Old]:
    """Collective. `old` of the points of an update, with what the algorithm makes of the difference between
    engine and actor. The weights of what is rejected go to what is kept on all ranks, in equal shares, unless
    they stay in the denominator.
    """
    pairs, count = list(zip(points, old)), algorithm.points_per_unit
    before = after = torch.zeros((), dtype=torch.float64, device=old[0].log_prob.device)
    corrected = []
    for start in range(0, len(pairs), count):  # all points of one micro-batch
        of_units = pairs[start : start + count]
        made = algorithm.correct(torch.stack([o.log_prob - p.rollout_log_prob for p, o in of_units], dim=1))
        for i, (point, o) in enumerate(of_units):
            kept, importance = made.kept[:, i], made.importance[:, i]
            metrics.add_mean("correction/rejected", 1 - kept.float(), point.weights)
            metrics.add_mean("correction/importance", importance, point.weights)
            weights = point.weights * kept
            before, after = before + point.weights.double().sum(), after + weights.double().sum()
            corrected.append(replace(o, weights=weights, importance=importance))
    if algorithm.rejected_in_denominator:
        return corrected
    sums = torch.stack([before, after])
    dist.all_reduce(sums)
    share = float(sums[0] / sums[1]) if sums[1] > 0 else 1.0
    return [replace(o, weights=None if o.weights is None else o.weights * share) for o in corrected]


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

    Only the points of later updates need it, unless the algorithm corrects: `accumulate_gradients` does the
    same for the first one's, with its own forward pass.
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
            if old is not None:
                point = algorithm.with_old(point, old[i])
            elif first:
                current = map_streams(Tensor.detach, velocities[CURRENT])
                point = algorithm.with_old(point, _compare(algorithm, point, current, metrics))
        output = algorithm.loss(point, velocities)
        output.loss.backward()
        metrics.add_sum("loss", output.loss.detach())
        for name, values in output.means.items():
            metrics.add_mean(name, values, point.weights)
        for name, value in output.maxima.items():
            metrics.add_max(name, value)


def check_gap(algorithm: Algorithm, metrics: Accumulator, limit: float) -> None:
    """Collective. Raises MismatchError on every rank where engine and actor disagree by more than `limit`."""
    if not isinstance(algorithm, LikelihoodAlgorithm) or not algorithm.engine_scores:
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
    """What the actor makes of a point; the distance of its log-probabilities from the engine's is noted where
    the engine has any.
    """
    old = algorithm.observe(point, velocity)
    if not algorithm.engine_scores:
        return old
    gap = (old.log_prob - point.rollout_log_prob).abs()
    metrics.add_max(LARGEST_GAP, gap.max())
    metrics.add_mean(MEAN_GAP, gap, torch.ones_like(gap))
    return old
