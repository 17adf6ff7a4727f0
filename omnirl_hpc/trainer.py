"""The training loop. `Trainer.train_step` is the algorithm, top to bottom; every line is a call into one room."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.update import recompute_old_log_probs, update
from omnirl_hpc.algorithms import ALGORITHMS
from omnirl_hpc.algorithms.advantages import zero_std_groups
from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.data.sampler import Group, GroupSampler
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.metrics.memory import peak_memory
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.metrics.progress import ProgressDisplay
from omnirl_hpc.metrics.samples import save_samples
from omnirl_hpc.models import FAMILIES
from omnirl_hpc.rewards import REWARDS
from omnirl_hpc.rewards.gather import ScoredStep, gather_scores
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rewards.runner import RewardRunner
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.embeddings import EmbeddingCache
from omnirl_hpc.rollout.requests import make_requests
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.trajectories import Trajectories
from omnirl_hpc.sync import sync_lora

log = logging.getLogger(__name__)

# Every step reports all of these, also where a phase did not take place.
TIMED_PHASES = ("encode", "rollout", "decode", "reward", "reward_exposed", "swap", "old_log_prob", "actor", "sync", "checkpoint")


class Trainer:
    """One rank's part of a run. All ranks construct it and call its methods together."""

    def __init__(self, config: Config, layout: Layout, device: torch.device, run: RunDirectory, timer: PhaseTimer) -> None:
        self.config, self.layout, self.device, self.run, self.timer = config, layout, device, run, timer
        self.family = FAMILIES[config.model.family](config.model)
        self.sampler = GroupSampler(
            PromptTable(config.data.prompts), config.data.prompts_per_step, config.data.samples_per_prompt, config.seed
        )
        self.algorithm = ALGORITHMS[config.algorithm.name](config)
        self.rewards = RewardRunner(config.reward, REWARDS[config.reward.name])
        self.actor = FSDPActor(config, self.family, layout, device)
        self.engine = make_engine(config, self.family, layout, device, timer)
        self.embed = EmbeddingCache(self.engine.encode, config.rollout.embedding_cache_size)
        self.version = 0
        self.receipt = self.sync()  # the engine starts with the actor's adapter, and the path is proven before the first step

    def train(self) -> None:
        """All steps of the run."""
        with ProgressDisplay(self.config.steps, self.layout.rank) as progress:
            for step in range(self.config.steps):
                metrics = self.train_step(step)
                if self.layout.rank == 0:
                    self.run.append_metrics(metrics)
                progress.show(metrics)

    def train_step(self, step: int) -> dict[str, float]:
        """Generate, score, learn, hand the new weights to the engine."""
        self.timer.take()
        metrics = Accumulator(self.device)
        groups = self.sampler.next_groups()

        with self.timer.phase("encode"):
            requests = make_requests(self.config, self.family, self.embed, self.layout, step, groups)
        with self.timer.phase("rollout"):  # rewards are scored meanwhile
            batch = torch.cat([self.submit_for_reward(b, groups) for b in self.engine.generate(requests)])
        with self.timer.phase("reward_exposed"):
            scored = gather_scores(self.rewards.collect(), batch, self.config.reward)
        advantages = self.algorithm.advantages(scored.rewards, scored.groups, scored.mask)
        updates = self.training_points(batch, scored, advantages)

        if self.algorithm.recomputes_old_log_prob:
            with self.timer.phase("old_log_prob"):
                for points in updates:
                    recompute_old_log_probs(self.actor, self.algorithm, points, metrics)
        with self.timer.phase("actor"):
            for i, points in enumerate(updates):
                update(self.actor, self.algorithm, points, metrics, first=i == 0)
            self.algorithm.after_step(step)
        with self.timer.phase("sync"):
            self.receipt = self.sync()

        if self.layout.rank == 0:
            self.save_samples(step, batch, scored, groups)
        return self.report(step, metrics, scored)

    def submit_for_reward(self, batch: Trajectories, groups: list[Group]) -> Trajectories:
        """Start scoring a micro-batch; the next one is generated meanwhile."""
        images = batch.images.permute(0, 2, 3, 1).cpu().numpy()
        self.rewards.submit(RewardBatch(images, [groups[g].prompt for g in batch.group.tolist()]))
        return batch

    def training_points(self, batch: Trajectories, scored: ScoredStep, advantages: Tensor) -> list[list[TrainingPoint]]:
        """The training points of each optimizer update, cut into actor micro-batches.

        The k-th part of every rank's samples makes the k-th update; a sample's weight is 1 / (valid samples of its update).
        """
        updates = self.config.actor.updates_per_step
        own_advantages, own_weights = advantages[scored.own], scored.weights(updates)[scored.own]
        points: list[list[TrainingPoint]] = []
        for rows in torch.arange(len(batch), device=self.device).chunk(updates):
            micro_batches = rows.split(self.config.actor.micro_batch_size)
            points.append(
                [
                    point
                    for m in micro_batches
                    for point in self.algorithm.training_points(batch[m], own_advantages[m], own_weights[m])
                ]
            )
        return points

    def sync(self):
        """The actor's adapter to the engine, as a new version."""
        self.version += 1
        receipt = sync_lora(self.actor, self.engine, getattr(torch, self.config.rollout.dtype), self.version)
        log.info("LoRA version %d: %d modules bound, checksum %s", receipt.version, len(receipt.modules), receipt.checksum)
        return receipt

    def save_samples(self, step: int, batch: Trajectories, scored: ScoredStep, groups: list[Group]) -> None:
        every, count = self.config.logging.samples_every, self.config.logging.samples_count
        if not every or (step % every and step != self.config.steps - 1):
            return
        images = batch.images[:count].permute(0, 2, 3, 1).cpu().numpy()
        prompts = [groups[g].prompt for g in batch.group[:count].tolist()]
        save_samples(self.run.samples, step, images, prompts, scored.rewards[scored.own][:count].tolist())

    def report(self, step: int, metrics: Accumulator, scored: ScoredStep) -> dict[str, float]:
        """The metrics of a step, the same on every rank but for times and memory, which are this rank's."""
        times = dict.fromkeys((f"time/{name}" for name in TIMED_PHASES), 0.0) | self.timer.take()
        times["time/step"] = sum(times.values())
        times["time/reward"] = scored.seconds  # in worker processes, beside the step
        images = self.config.data.prompts_per_step * self.config.data.samples_per_prompt
        valid = scored.rewards[scored.mask]
        return {
            "step": step,
            "reward/mean": float(valid.mean()),
            "reward/std": float(valid.std()),
            "reward/zero_std_groups": zero_std_groups(scored.rewards, scored.groups, scored.mask),
            "reward/failed": int((~scored.mask).sum()),
            **metrics.reduce(),
            "sync/bound_modules": len(self.receipt.modules),
            "sync/version": self.receipt.version,
            **times,
            "images_per_second": images / times["time/step"],
            **peak_memory(self.device),
        }

    def close(self) -> None:
        """Free the reward workers. The process group is the caller's."""
        self.rewards.close()
        if dist.is_initialized():
            dist.barrier()
