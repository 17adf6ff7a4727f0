"""What each rank makes and submits to its reward workers."""

from __future__ import annotations

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


@pytest.mark.parametrize("micro_batches", [[3, 3, 2], [8], [1] * 8])
def test_the_ranks_of_a_replica_share_its_samples(micro_batches):
    """Each sample goes to one of them, and all have the same number, wherever micro-batches end."""

    class Samples:
        """As much of Samples as `roll_out` looks at."""

        def __init__(self, numbers):
            self.group = torch.tensor(numbers)
            self.media, self.clean = Media(torch.zeros(len(numbers), 1, 3, 2, 2, dtype=torch.uint8)), {}

        def __len__(self):
            return len(self.group)

        def __getitem__(self, rows):
            return Samples(self.group[rows].tolist())

    def own(rank: int) -> list[int]:
        numbers = iter(range(8))
        made = [Samples([next(numbers) for _ in range(size)]) for size in micro_batches]
        layout, scored = Layout(rank, world_size=2, replica_size=2, shard_size=2), []
        engine = SimpleNamespace(generate=lambda requests, num_steps, media: made)
        rewards = SimpleNamespace(submit=lambda batch: scored.extend(batch.prompts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                samples.Samples, "cat", lambda batches: [n for b in batches for n in b.group.tolist()]
            )
            generation = Generation.__new__(Generation)
            generation.engine, generation._rewards, generation._layout = engine, rewards, layout
            generation._residency = Residency("resident", PhaseTimer(CPU), DevicePeaks(CPU))
            kept = generation.roll_out([], [SimpleNamespace(prompt=n) for n in range(8)], go_on)
        assert scored == kept  # each rank scores what it trains
        return kept

    assert (own(0), own(1)) == ([0, 2, 4, 6], [1, 3, 5, 7])
