"""Samples of prompts, generated and scored: what policy gradients learn from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omnirl_hpc.algorithms.advantages import normalized_mix, zero_std_groups
from omnirl_hpc.algorithms.algorithm import Algorithm
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
        data, algorithm = self._config.data, self._algorithm
        prompts = data.prompts_per_step
        candidates = self._sampler.peek(prompts * (1 + data.refill_rounds))
        groups, spare = candidates[:prompts], candidates[prompts:]
        with self._timer.phase("encode"):  # one width for all that may come in the step
            width = self._generation.width(self._config, candidates)
        made, scored = self._generate(step, groups, width, check_stop)
        assert made is not None  # every replica has groups
        samples = made
        metrics = _metrics(scored)  # of the prompts as they came: the mean of those that are kept misleads
        for _ in range(data.refill_rounds):
            if not (equal := self._equal_groups(scored)):
                break
            check_stop()  # in step with the other ranks, of which some may have nothing to generate
            for index in equal:
                groups[index] = replace(spare.pop(0), index=index)
            made, again = self._generate(step, groups, width, go_on, only=equal)
            samples, scored = _with_groups(samples, made, equal), scored.with_groups(again)
        used = len(candidates) - len(spare)
        self._sampler.cursor += used
        rewards = learned_rewards(scored, self._config.reward)
        advantages = algorithm.advantages(rewards, scored.groups, scored.mask)
        self._hashes.rollout(step, samples, scored.rewards, advantages)
        if self._samples_are_saved(step) and self._layout.rank == 0:
            self._save_samples(step, samples, scored, groups)
        counted = algorithm.counted(advantages, scored.mask)
        if data.refill_rounds:
            alike = torch.tensor(self._equal_groups(scored), device=counted.device)
            counted = counted & ~torch.isin(scored.groups, alike)
            metrics["reward/refilled_groups"] = used - prompts
        weights = scored.weights(self._config.actor.updates_per_step, counted)
        return StepInput(algorithm.units(samples, advantages[scored.own], weights[scored.own]), metrics)

    def _generate(
        self,
        step: int,
        groups: Sequence[Group],
        width: int,
        check_stop: Callable[[], None],
        only: Collection[int] | None = None,
    ) -> tuple[Samples | None, ScoredStep]:
        """This rank's samples, None where its replica has none to make, and the rewards of all ranks'."""
        with self._timer.phase("encode"):
            options = {"width": width, "only": only, "whole_groups": self._algorithm.whole_groups}
            window = self._algorithm.window(step)
            requests = self._generation.requests(self._config, step, groups, window, **options)
        with self._timer.phase("rollout"):  # rewards are scored meanwhile
            media = self._samples_are_saved(step) or media_are_scored(self._config.reward)
            made = self._generation.roll_out(requests, groups, check_stop, media=media) if requests else None
        with self._timer.phase("reward_exposed"):
            return made, self._generation.score(made, self._config.reward)

    def _equal_groups(self, scored: ScoredStep) -> list[int]:
        """The groups of the step that teach nothing: the same on every rank."""
        rewards = learned_rewards(scored, self._config.reward)
        return zero_std_groups(rewards, scored.groups, scored.mask)

    def fit(self, step: int) -> None:
        groups, window = self._sampler.peek(self._sampler.prompts_per_step), self._algorithm.window(step)
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


def go_on() -> None:
    """Where not all ranks are: none may wait for the others there."""


def _with_groups(samples: Samples, new: Samples | None, replaced: Sequence[int]) -> Samples:
    """Samples, by group and sample, with those of `new` in place of the groups `replaced`."""
    kept = ~torch.isin(samples.group, torch.tensor(replaced, device=samples.group.device))
    parts = [samples[kept.nonzero().squeeze(1)], *([] if new is None else [new])]
    together = Samples.cat(parts)
    return together[together.place.argsort()]


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
        "reward/zero_std_groups": len(zero_std_groups(scored.rewards, scored.groups, scored.mask)),
        "reward/failed": int((~scored.mask).sum()),
        **{
            f"reward/{name}/mean": float(scores.nanmean())
            for name, scores in (scored.parts | scored.components).items()
        },
        "time/reward": scored.seconds,  # in workers beside the step, and on the device
    }
