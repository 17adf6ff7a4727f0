"""What each rank makes and submits to its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.memory import DevicePeaks
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.residency import Residency
from omnirl_hpc.sampling import samples
from omnirl_hpc.sampling.samples import Media
from omnirl_hpc.sources.generation import Generation
from tests.helpers import CPU, go_on


class Samples:
    """As much of Samples as `roll_out` looks at: numbers stand for samples, and for their prompts."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.group = torch.tensor(numbers)
        self.media, self.clean = Media(torch.zeros(len(numbers), 1, 3, 2, 2, dtype=torch.uint8)), {}

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, rows) -> Samples:
        return Samples(self.group[rows].tolist())


def rolled_out(layout: Layout, micro_batches: Sequence[Sequence[int]]) -> list[int]:
    """Of the samples that a rank's replica makes, those that the rank trains."""
    engine = SimpleNamespace(
        generate=lambda requests, num_steps, media: [Samples(numbers) for numbers in micro_batches]
    )
    scored: list[int] = []
    rewards = SimpleNamespace(submit=lambda batch: scored.extend(batch.prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples.Samples, "cat", lambda batches: [n for b in batches for n in b.group.tolist()])
        generation = Generation.__new__(Generation)
        generation.engine, generation._rewards, generation._layout = engine, rewards, layout
        generation._residency = Residency("resident", PhaseTimer(CPU), DevicePeaks(CPU))
        count = sum(map(len, micro_batches))
        requests = [SimpleNamespace(owner=number % layout.replica_size) for number in range(count)]
        kept = generation.roll_out(requests, [SimpleNamespace(prompt=n) for n in range(100)], go_on)
    assert scored == kept  # each rank scores what it trains
    return kept


@pytest.mark.parametrize("sizes", [[3, 3, 2], [8], [1] * 8])
def test_the_ranks_of_a_replica_share_its_samples(sizes):
    """Each sample goes to one of them, and all have the same number, wherever micro-batches end."""
    numbers = iter(range(8))
    made = [[next(numbers) for _ in range(size)] for size in sizes]
    own = [rolled_out(Layout(rank, world_size=2, replica_size=2, shard_size=2), made) for rank in range(2)]
    assert own == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("world_size", "replica_size", "per_prompt", "updates"),
    [(4, 2, 3, 2), (4, 2, 4, 4), (8, 4, 2, 2), (4, 1, 3, 2), (6, 3, 3, 2)],
)
def test_a_group_stays_in_its_replica_and_in_its_update(world_size, replica_size, per_prompt, updates):
    """Its samples are on the ranks of one replica, each once. The u-th update of every rank is made of the
    u-th part of the step's groups, which weights count by.
    """
    prompts, places = 8, []
    for rank in range(world_size):
        layout = Layout(rank, world_size, replica_size, world_size)
        made = [[g * per_prompt + i for i in range(per_prompt)] for g in layout.groups(prompts)]
        own = rolled_out(layout, made)
        share = len(own) // updates
        for place, sample in enumerate(own):
            group = sample // per_prompt
            assert place // share == group * updates // prompts
            assert group in layout.groups(prompts)
            places.append(sample)
    assert sorted(places) == list(range(prompts * per_prompt))
