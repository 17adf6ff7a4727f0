"""How large log-ratios are: whether a clip range fits the transitions that it is used with.

A log-ratio is a mean over latent values, so it shrinks with their number; and kinds of transitions measure it
in different units. What a clip range means is therefore said in units of the velocity: how far it may move
(root mean square; velocities themselves are about 1.4) before a sample is clipped. The published ranges allow
.002 to .2, whatever the transition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.transitions import transition

SMALLEST_CHANGE = 1e-3  # about what rounding a velocity to bfloat16 does
LARGEST_CHANGE = 0.5  # a velocity that moves this far is another model's
USUAL_CHANGE = 0.01


@dataclass(frozen=True)
class StepScale:
    """One step of one stream."""

    elements: int  # latent values of a sample
    slope: float  # by how much the mean of the transition moves where the velocity moves by 1
    std: float  # of the transition


@dataclass(frozen=True)
class LogRatioScale:
    """|log-ratio| = linear d + quadratic d^2 where velocities move by d: a random part of one standard
    deviation, and the divergence.
    """

    linear: float
    quadratic: float

    def at(self, change: float) -> float:
        return self.linear * change + self.quadratic * change**2

    def change_at(self, limit: float) -> float:
        """The d at which the log-ratio is `limit`, greater than 0."""
        return 2 * limit / (self.linear + math.sqrt(self.linear**2 + 4 * self.quadratic * limit))


def step_scales(
    kind: str,
    noise_level: float,
    schedules: Mapping[str, Schedule],
    shapes: Mapping[str, tuple[int, ...]],
    steps: Iterable[int],
) -> list[list[StepScale]]:
    """Of each step, each stream."""
    return [
        [
            _step_scale(kind, noise_level, schedule, math.prod(shapes[name]), step)
            for name, schedule in schedules.items()
        ]
        for step in steps
    ]


def _step_scale(kind: str, noise_level: float, schedule: Schedule, elements: int, step: int) -> StepScale:
    """The mean is linear in the velocity: at latents of 0, where the velocity is 1, it is the slope."""
    zero = torch.zeros(1, 1)
    made = transition(
        kind,
        torch.ones(1, 1),
        zero,
        float(schedule.sigmas[step]),
        float(schedule.sigmas[step + 1]),
        noise_level=noise_level,
        sigma_max=schedule.sigma_max,
        noise=zero,
    )
    return StepScale(elements, float(made.mean), float(made.std))


def ratio_scale(kind: str, streams: Sequence[StepScale]) -> LogRatioScale:
    """Of log p - log p_old as `transition` has it: with z the noise that was drawn and m the way of the mean,
    the mean of z m / std - m^2 / (2 std^2); for cps, which has no variance, of 2 std z m - m^2.
    """
    unit = [(1.0, s.std) if kind == "cps" else (1 / (2 * s.std**2), s.std) for s in streams]
    total = sum(s.elements for s in streams)
    variance = sum(s.elements * (2 * per * std * s.slope) ** 2 for s, (per, std) in zip(streams, unit))
    quadratic = sum(s.elements * per * s.slope**2 for s, (per, _) in zip(streams, unit)) / total
    return LogRatioScale(math.sqrt(variance) / total, quadratic)


def remark_on_range(key: str, value: float, scales: Sequence[LogRatioScale], what: str) -> str | None:
    """A sentence where a range is out of scale at every step; None where it is not.

    what: the transitions and latents that the scales are of.
    """
    changes = [scale.change_at(value) for scale in scales]
    low, high = min(changes), max(changes)
    if high >= SMALLEST_CHANGE and low <= LARGEST_CHANGE:
        return None
    usual = [scale.at(USUAL_CHANGE) for scale in scales]
    result = (
        "rounding alone clips samples" if high < SMALLEST_CHANGE else "no sample will ever be out of range"
    )
    return (
        f"{key}={value:g} is out of scale for {what}: a sample is out of range once velocities have moved by "
        f"{low:.2g} to {high:.2g} (they are about 1.4), so that {result}; for a way of {USUAL_CHANGE} it is "
        f"{min(usual):.1g} to {max(usual):.1g}"
    )
