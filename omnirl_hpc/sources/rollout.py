"""Samples of prompts, generated and scored: what policy gradients learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omnirl_hpc.algorithms.advantages import normalized_mix, zero_std_groups
from omnirl_hpc.algorithms.algorithm import Algorithm
from omnirl_hpc.algorithms.units import Batch
from omnirl_hpc.config.schema import Config, RewardConfig
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.data.sampler import Group, GroupSampler
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.metrics.samples import save_samples
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.rewards.gather import ScoredStep
from omnirl_hpc.rewards.reward import media_are_scored, metadata_columns
from omnirl_hpc.rollout.fitting import fit_micro_batch_size
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.samples import Samples
from omnirl_hpc.sources.generation import Generation
from omnirl_hpc.sources.source import StepInput, TableCursor


class RolloutSource:
    """See Source."""

    def __init__(
        self,
        config: Config,
        family: ModelFamily,
        layout: Layout,
        device: torch.device,
        algorithm: Algorithm,
        generation: Generation,
        timer: PhaseTimer,
        hashes: StepHashes,
        run: RunDirectory,
    ) -> None:
        """run: for sample images."""
        self._config, self._layout, self._device, self._algorithm = config, layout, device, algorithm
        self._generation, self._timer, self._hashes, self._run = generation, timer, hashes, run
        data = config.data
        table = PromptTable(data.prompts, metadata_columns(config.reward))
        self._sampler = GroupSampler(table, data.prompts_per_step, data.samples_per_prompt, config.seed)
        self._cursor = TableCursor(data.prompts, self._sampler)
        self.schedules = family.schedules(config.sampling.num_inference_steps)
        self.samples_per_step = data.prompts_per_step * data.samples_per_prompt

    def next(self, step: int, check_stop: Callable[[], None]) -> StepInput:
        groups = self._sampler.next_groups()
        with self._timer.phase("encode"):
            window = self._algorithm.window(step)
            requests = self._generation.requests(self._config, step, groups, window)
        shown = self._samples_are_saved(step)
        with self._timer.phase("rollout"):  # rewards are scored meanwhile
            samples = self._generation.roll_out(
                requests, groups, check_stop, media=shown or media_are_scored(self._config.reward)
            )
        with self._timer.phase("reward_exposed"):
            scored = self._generation.score(samples, self._config.reward)
        rewards = learned_rewards(scored, self._config.reward)
        advantages = self._algorithm.advantages(rewards, scored.groups, scored.mask)
        self._hashes.rollout(step, samples, scored.rewards, advantages)
        if shown and self._layout.rank == 0:
            self._save_samples(step, samples, scored, groups)
        weights = scored.weights(self._config.actor.updates_per_step)
        return StepInput(Batch(samples, advantages[scored.own], weights[scored.own]), _metrics(scored))

    def fit(self, step: int) -> None:
        cursor = self._sampler.cursor
        groups, window = self._sampler.next_groups(), self._algorithm.window(step)
        self._sampler.cursor = cursor
        requests = self._generation.requests(self._config, step, groups, window)
        longest, strict = self._config.data.text_lengths[-1], self._config.determinism == "strict"
        fit_micro_batch_size(self._generation.engine, requests, longest, self._device, may_shrink=not strict)

    def state_dict(self) -> dict[str, Any]:
        fitted = {"micro_batch_size": self._generation.engine.micro_batch_size}  # what fitted into memory
        return self._cursor.state_dict() | fitted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor.load_state_dict(state)
        if "micro_batch_size" in state:
            self._generation.engine.micro_batch_size = state["micro_batch_size"]

    def _samples_are_saved(self, step: int) -> bool:
        every = self._config.logging.samples_every
        return every > 0 and (step % every == 0 or step == self._config.steps - 1)

    def _save_samples(self, step: int, samples: Samples, scored: ScoredStep, groups: list[Group]) -> None:
        count = self._config.logging.samples_count
        prompts = [groups[group].prompt for group in samples.group[:count].tolist()]
        rewards = scored.rewards[scored.own][:count].tolist()
        media = samples[:count].media
        assert media is not None  # of what is generated
        save_samples(self._run, step, media, prompts, rewards)


def learned_rewards(scored: ScoredStep, config: RewardConfig) -> Tensor:
    """[N] what the algorithm learns from: the rewards, or parts that are normalised before they are mixed."""
    if config.mix == "sum":
        return scored.rewards
    weights = {name: part.weight for name, part in config.parts.items()}
    return normalized_mix(scored.parts, weights, scored.groups, scored.mask)


def _metrics(scored: ScoredStep) -> dict[str, float]:
    valid = scored.rewards[scored.mask]
    return {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std()) if len(valid) > 1 else 0.0,
        "reward/zero_std_groups": zero_std_groups(scored.rewards, scored.groups, scored.mask),
        "reward/failed": int((~scored.mask).sum()),
        **{
            f"reward/{name}/mean": float(scores.nanmean())
            for name, scores in (scored.parts | scored.components).items()
        },
        "time/reward": scored.seconds,  # in workers beside the step, and on the device
    }
