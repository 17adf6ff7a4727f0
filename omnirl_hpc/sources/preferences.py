"""Pairs from a table, of which one is preferred: what DPO learns from. No engine, no reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.preferences import Preference, PreferenceTable, SampleFile
from omnirl_hpc.data.sampler import Group, GroupSampler
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.residency import ROLLOUT, Residency
from omnirl_hpc.rollout.conditions import ConditionCache
from omnirl_hpc.sampling.samples import SampleIdentity
from omnirl_hpc.sampling.streams import Streams
from omnirl_hpc.sources.encoders import Encoders
from omnirl_hpc.sources.source import StepInput, TableCursor


class PreferenceSource:
    """See Source. A step has `data.prompts_per_step` pairs."""

    def __init__(
        self,
        config: Config,
        family: ModelFamily,
        layout: Layout,
        device: torch.device,
        timer: PhaseTimer,
        hashes: StepHashes,
        residency: Residency,
    ) -> None:
        self._config, self._family, self._layout, self._device = config, family, layout, device
        self._timer, self._hashes = timer, hashes
        table = PreferenceTable(config.data.prompts)
        self._sampler = GroupSampler(table, config.data.prompts_per_step, 1, config.seed)
        self._cursor = TableCursor(config.data.prompts, self._sampler)
        self._encoders = Encoders(family, getattr(torch, config.rollout.dtype), device)
        self._condition = ConditionCache(self._encoders.condition, config.rollout.embedding_cache_size)
        residency.add(ROLLOUT, self._encoders)
        self.schedules = family.schedules(config.sampling.num_inference_steps)
        self.samples_per_step = 2 * config.data.prompts_per_step

    def next(self, step: int, check_stop: Callable[[], None]) -> StepInput:
        groups = self._sampler.next_groups()
        check_stop()
        with self._timer.phase("encode"):
            pairs = self._pairs(step, groups)
        self._hashes.pairs(step, pairs)
        count = len(groups) // self._config.actor.updates_per_step
        ones = torch.ones(len(pairs), device=self._device)
        return StepInput(Batch(pairs, ones, ones / count), {})

    def fit(self, step: int) -> None:
        """Nothing is generated."""

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _pairs(self, step: int, groups: list[Group]) -> Pairs:
        """This rank's. All conditions of a step have one width, on every rank the same."""
        family, widths = self._family, self._config.data.text_lengths
        width = family.condition_width([group.prompt.prompt for group in groups], widths)
        of_replica = list(self._layout.groups(len(groups)))
        own = [groups[i] for i in of_replica[self._layout.rank_in_replica :: self._layout.replica_size]]
        rows = [cast(Preference, group.prompt) for group in own]  # what the table holds
        conditions = [self._condition(row) for row in rows]
        return Pairs(
            identity=[
                SampleIdentity(self._config.seed, step, group.prompt.id, group.first_sample) for group in own
            ],
            group=torch.tensor([group.index for group in own], device=self._device),
            conditions=[
                family.pad({name: tensor.to(self._device) for name, tensor in condition.items()}, width)
                for condition in conditions
            ],
            chosen=self._latents([row.chosen for row in rows]),
            rejected=self._latents([row.rejected for row in rows]),
        )

    def _latents(self, files: list[SampleFile]) -> Streams:
        """[B, …] fp32 of each stream."""
        samples = [self._encoders.latents(file) for file in files]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
