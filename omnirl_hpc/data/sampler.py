"""Which prompts a step uses: an endless sequence of reshuffled epochs, cut into steps of equal size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from omnirl_hpc.data.prompts import Prompt, PromptTable


@dataclass(frozen=True)
class Group:
    """All samples of one prompt in one step."""

    index: int  # place among the groups of the step, the same on every rank
    prompt: Prompt
    first_sample: int  # samples of the group are first_sample, first_sample + 1, …

    # first_sample is 0 unless the step holds the same prompt twice (a table smaller than a step, or the seam
    # of two epochs): the second group then counts on, so that no two samples share their random draws.


class GroupSampler:
    """Deals prompts to steps. `cursor` is the number of prompts used so far and is the sampler's only state.

    Epoch e is a permutation of all rows drawn from (seed, e). No row is dropped at the end of an epoch: a
    step that needs more takes them from the next one.
    """

    def __init__(self, table: PromptTable, prompts_per_step: int, samples_per_prompt: int, seed: int) -> None:
        self.table = table
        self.prompts_per_step = prompts_per_step
        self.samples_per_prompt = samples_per_prompt
        self.seed = seed
        self.cursor = 0

    def next_groups(self) -> list[Group]:
        """The groups of the next step, all ranks' together; moves the cursor."""
        groups = self.peek(self.prompts_per_step)
        self.cursor += len(groups)
        return groups

    def peek(self, count: int) -> list[Group]:
        """The next `count` groups as if they were one step; the cursor stays."""
        positions = range(self.cursor, self.cursor + count)
        groups: list[Group] = []
        seen: Counter[str] = Counter()
        for index, position in enumerate(positions):
            prompt = self.table[self._row(position)]
            groups.append(Group(index, prompt, seen[prompt.id] * self.samples_per_prompt))
            seen[prompt.id] += 1
        return groups

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, len(self.table))
        return int(_permutation(self.seed, epoch, len(self.table))[place])


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
