"""Generating a rank's samples and scoring them meanwhile: for a training step and for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from omnirl_hpc.config.schema import Config, RewardConfig, WindowConfig
from omnirl_hpc.data.sampler import Group
from omnirl_hpc.errors import RewardError
from omnirl_hpc.launch.agreement import raise_on_all_ranks
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.residency import REWARD, ROLLOUT, Residency
from omnirl_hpc.rewards.gather import ScoredStep, gather_scores
from omnirl_hpc.rewards.mix import RewardMix
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.conditions import ConditionCache
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.rollout.requests import make_requests
from omnirl_hpc.sampling.samples import Samples
from omnirl_hpc.sync import NoSync, PolicySource, Sync, make_sync


class Generation:
    """The engine, what it reads of prompts, and the rewards. All methods but `close` are collective."""

    def __init__(
        self,
        config: Config,
        family: ModelFamily,
        layout: Layout,
        device: torch.device,
        timer: PhaseTimer,
        residency: Residency,
    ) -> None:
        """Makes the rewards: one that cannot be made is found in seconds, before weights load. Raises
        RewardError on every rank.
        """
        self._config, self._family, self._layout = config, family, layout
        self._device, self._timer, self._residency = device, timer, residency
        self._rewards = raise_on_all_ranks(lambda: RewardMix(config.reward, device), RewardError)
        for tenant in self._rewards.tenants:
            residency.add(REWARD, tenant)

    def load(self) -> None:
        """Build the engine. Everything else needs it."""
        self.engine = make_engine(self._config, self._family, self._layout, self._device, self._timer)
        self._encode = ConditionCache(self.engine.encode, self._config.rollout.embedding_cache_size)
        self._residency.add(ROLLOUT, self.engine)
        self.networks = {"rollout": self.engine.transformer}  # by the name of their part, to be looked at

    def make_sync(self, actor: PolicySource) -> Sync:
        """What gives the engine a policy."""
        return make_sync(actor, self.engine, getattr(torch, self._config.rollout.dtype))

    def wake_engine(self) -> None:
        """Give the device to the engine, which rewards may have had since."""
        self._residency.give_to(ROLLOUT)

    def requests(
        self, config: Config, step: int, groups: Sequence[Group], window: WindowConfig | None
    ) -> list[SampleRequest]:
        """What this rank's replica generates of the groups of a step; of its own `config`, since evaluations
        have other seeds and counts.
        """
        self.wake_engine()
        return make_requests(config, self._family, self._encode, self._layout, step, groups, window)

    def roll_out(
        self,
        requests: Sequence[SampleRequest],
        groups: Sequence[Group],
        check_stop: Callable[[], None],
        num_steps: int | None = None,
        media: bool = True,
    ) -> Samples:
        """This rank's samples. Each micro-batch is submitted to the rewards while the next one is generated.

        The ranks of a replica generate the same samples together; of every k samples each takes one.
        `check_stop` is called after each micro-batch; `num_steps` and `media` are the engine's.
        """
        self.wake_engine()
        own, made, k = [], 0, self._layout.replica_size
        for batch in self.engine.generate(requests, num_steps, media):
            check_stop()
            first = (self._layout.rank_in_replica - made) % k
            made += len(batch)
            batch = batch[first::k]
            if len(batch):
                self._rewards.submit(reward_batch(batch, groups))
                own.append(batch)
        return Samples.cat(own)

    def score(self, samples: Samples, config: RewardConfig) -> ScoredStep:
        """The rewards of what `roll_out` has made. Raises RewardError where too many are missing."""
        self._residency.give_to(REWARD)
        return gather_scores(self._rewards.collect(), samples, config)

    def leave(self) -> None:
        """Let go of the engine."""
        self.engine.close()

    def close(self) -> None:
        """End the rewards' workers, whatever they are doing."""
        self._rewards.close()


class NoGeneration:
    """Where a run trains on a table alone."""

    networks: dict[str, nn.Module] = {}

    def load(self) -> None: ...

    def make_sync(self, actor: PolicySource) -> NoSync:
        return NoSync()

    def leave(self) -> None: ...

    def close(self) -> None: ...


def reward_batch(batch: Samples, groups: Sequence[Group]) -> RewardBatch:
    """What there is for rewards to see of samples, as tensors."""
    prompts, media = [groups[group].prompt for group in batch.group.tolist()], batch.media
    if media is None:
        return RewardBatch(None, prompts, latents=batch.clean)
    return RewardBatch(
        frames=media.frames.permute(0, 1, 3, 4, 2),
        prompts=prompts,
        audio=media.audio,
        fps=media.fps,
        sample_rate=media.sample_rate,
        text=media.text,
        latents=batch.clean,
    )
