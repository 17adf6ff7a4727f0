"""Units are dealt to updates and micro-batches, and never cut apart."""

from __future__ import annotations

import torch

from omnirl_hpc.algorithms.algorithm import Points
from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.sampling.samples import SampleIdentity
from omnirl_hpc.sampling.streams import LATENTS


def pairs(count: int) -> Batch:
    rows = torch.arange(count)
    units = Pairs(
        identity=[SampleIdentity(0, 0, str(row), 0) for row in range(count)],
        group=rows,
        conditions=[{"embeds": torch.full((1,), float(row))} for row in range(count)],
        chosen={LATENTS: rows[:, None].float()},
        rejected={LATENTS: -rows[:, None].float()},
    )
    return Batch(units, torch.ones(count), torch.full((count,), 1 / count))


def test_updates_and_micro_batches_are_consecutive_and_keep_pairs_whole():
    seen = []
    for update in pairs(6).updates(2, micro_batch_size=2):
        seen.append([])
        for part in update:
            units = part.units
            assert torch.equal(units.chosen[LATENTS], -units.rejected[LATENTS])
            assert [who.prompt_id for who in units.identity] == [str(row) for row in units.group.tolist()]
            assert [float(c["embeds"]) for c in units.conditions] == units.group.tolist()
            assert len(part) == len(part.weights) == len(part.advantages)
            seen[-1].append(units.group.tolist())
    assert seen == [[[0, 1], [2]], [[3, 4], [5]]]


def test_a_micro_batch_is_a_view():
    batch = pairs(4)
    (part, _) = batch.updates(1, micro_batch_size=2)[0]
    part.units.chosen[LATENTS][1] = 7
    assert batch.units.chosen[LATENTS].flatten().tolist() == [0, 7, 2, 3]


def test_points_are_made_when_they_are_asked_for_and_again():
    made = []

    class Counting:
        def training_points(self, batch, schedules):
            for place in range(2):
                made.append((len(batch), place))
                yield schedules["x"], place

    points = Points(Counting(), pairs(3).updates(1, 2)[0], {"x": "schedule"})
    assert made == []
    iterator = iter(points)
    assert next(iterator) == ("schedule", 0)
    assert made == [(2, 0)]
    assert len(list(points)) == 4
    assert made[1:] == [(2, 0), (2, 1), (1, 0), (1, 1)]
