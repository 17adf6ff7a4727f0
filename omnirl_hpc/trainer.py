"""The training loop. `Trainer.train_step` is the algorithm, top to bottom; every line is a call into one
room.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from omnirl_hpc.actor import make_actor
from omnirl_hpc.actor.update import accumulate_gradients, apply_gradients, check_gap, recompute_old_log_probs
from omnirl_hpc.algorithms.advantages import zero_std_groups
from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.checkpoints.checkpointer import Checkpointer
from omnirl_hpc.checkpoints.run_state import RunState
from omnirl_hpc.checks.data import check_prompt_lengths
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.load import LoadedConfig
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.data.sampler import Group, GroupSampler
from omnirl_hpc.errors import RewardError
from omnirl_hpc.evaluation.evaluator import Evaluator, collect_policies
from omnirl_hpc.launch.agreement import raise_on_all_ranks
from omnirl_hpc.launch.stop import StopFlag, StopReason, StopRequested
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.metrics.attention import observe_attention
from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.metrics.memory import DevicePeaks
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.metrics.progress import ProgressDisplay
from omnirl_hpc.metrics.samples import save_samples
from omnirl_hpc.metrics.trackers import Trackers
from omnirl_hpc.residency import ACTOR, ROLLOUT, Residency
from omnirl_hpc.rewards.gather import ScoredStep, gather_scores
from omnirl_hpc.rewards.mix import RewardMix
from omnirl_hpc.rewards.reward import metadata_columns
from omnirl_hpc.roll_out import roll_out
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.embeddings import EmbeddingCache
from omnirl_hpc.rollout.engine import Receipt
from omnirl_hpc.rollout.fitting import fit_micro_batch_size
from omnirl_hpc.rollout.requests import make_requests
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.trajectories import Trajectories
from omnirl_hpc.sync import make_sync

log = logging.getLogger(__name__)

# Every step reports all of these, also where a phase did not take place.
TIMED_PHASES = (
    "encode",
    "rollout",
    "decode",
    "reward_exposed",
    "swap",
    "old_log_prob",
    "actor",
    "sync",
    "evaluation",
    "checkpoint",
    "other",
)


class Trainer:
    """One rank's part of a run. All ranks construct it and call its methods together."""

    def __init__(
        self,
        loaded: LoadedConfig,
        layout: Layout,
        device: torch.device,
        run: RunDirectory,
        timer: PhaseTimer,
        stop: StopFlag,
        trackers: Trackers,
    ) -> None:
        config = self.config = loaded.config
        self.layout, self.device, self.run, self.timer, self.stop = layout, device, run, timer, stop
        self.trackers, self.progress = trackers, ProgressDisplay(config.steps, layout.rank)
        self.family = find_class("model", config.model.family)(config.model)
        check_prompt_lengths(config, self.family.count_text_tokens)
        self.sampler = GroupSampler(
            PromptTable(config.data.prompts, metadata_columns(config.reward)),
            config.data.prompts_per_step,
            config.data.samples_per_prompt,
            config.seed,
        )
        self.algorithm = find_class("algorithm", config.algorithm.name)(config)
        # before weights load: a reward that cannot be made is found in seconds
        self.rewards = raise_on_all_ranks(lambda: RewardMix(config.reward), RewardError)
        self.actor = make_actor(config, self.family, layout, device, self.algorithm)
        if config.residency == "swap":
            self.actor.sleep()  # engine and actor may not fit together, not even while they are built
        self.engine = make_engine(config, self.family, layout, device, timer)
        self.embed = EmbeddingCache(self.engine.encode, config.rollout.embedding_cache_size)
        self.peaks = DevicePeaks(device)
        sides = {ROLLOUT: [self.engine], ACTOR: [self.actor]}
        self.residency = Residency(config.residency, sides, ROLLOUT, timer, self.peaks)
        self.handover = make_sync(self.actor, self.engine, getattr(torch, config.rollout.dtype))
        for part, network in (("rollout", self.engine.transformer), ("actor", self.actor.transformer)):
            observe_attention(network, partial(self.note, f"attention kernel, {part}"))
        self.receipt: Receipt | None = None  # of the last sync
        self.hashes = StepHashes(run, layout.rank, enabled=config.determinism == "strict")
        if config.evaluation.every:
            self.evaluator = Evaluator(
                config,
                self.family,
                layout,
                device,
                self.engine,
                self.embed,
                self.rewards,
                run.evaluation,
                run.writing,
            )
        checkpointer = Checkpointer(
            run.checkpoints, config.checkpoint, layout.rank, config.timeout_seconds, run.require_lock
        )
        self.state = RunState(
            loaded,
            run,
            checkpointer,
            self.actor,
            self.engine,
            self.algorithm,
            self.sampler,
            self.residency,
            timer,
        )

    def train(self) -> StopReason:
        """All steps that are left. Returns why it stopped early, or NONE; everything is saved either way."""
        first = self.state.restore()
        if first and self.layout.rank == 0:
            complete = first == self.config.steps and self.state.unevaluated is None
            further = "; the run is complete, and a greater steps=N takes it further" if complete else ""
            print(f"going on from step {first} of {self.config.steps}{further}", flush=True)
        self.sync(
            first
        )  # the engine starts with the actor's adapter, and the path is proven before the first step
        if self.device.type == "cuda":
            self.fit_micro_batch(first)
        with self.timer.phase("other"), self.progress:
            self.timer.take()  # what came before belongs to no step
            try:
                if self.state.unevaluated is not None:
                    self.finish_step(self.state.unevaluated)
                for step in range(first, self.config.steps):
                    self.finish_step(self.train_step(step))
            except StopRequested as stop:
                log.info("stop requested (%s), phase %s", stop.reason.name, self.timer.current)
                self.state.give_up()
                return stop.reason
        self.state.finish()
        return StopReason.NONE

    def train_step(self, step: int) -> dict[str, float]:
        """Generate, score, learn, hand the new weights to the engine."""
        metrics = Accumulator(self.device)
        groups = self.sampler.next_groups()

        with self.timer.phase("encode"):
            requests = make_requests(self.config, self.family, self.embed, self.layout, step, groups)
        with self.timer.phase("rollout"):  # rewards are scored meanwhile
            batch = roll_out(self.engine, self.rewards, self.layout, requests, groups, self.check_stop)
        with self.timer.phase("reward_exposed"):
            scored = gather_scores(self.rewards.collect(), batch, self.config.reward)
        advantages = self.algorithm.advantages(scored.rewards, scored.groups, scored.mask)
        updates = self.training_points(batch, scored, advantages)
        self.hashes.rollout(step, batch, scored.rewards, advantages)

        self.residency.give_to(ACTOR)
        if self.algorithm.recomputes_old_log_prob:
            with self.timer.phase("old_log_prob"):
                for points in updates[1:]:
                    recompute_old_log_probs(self.actor, self.algorithm, points, metrics, self.check_stop)
        with self.timer.phase("actor"):
            for i, points in enumerate(updates):
                accumulate_gradients(
                    self.actor, self.algorithm, points, metrics, self.check_stop, first=i == 0
                )
                if i == 0:
                    check_gap(self.algorithm, metrics, self.config.rollout.max_log_prob_gap)
                self.hashes.gradients(step, i, self.actor.gradients)
                apply_gradients(self.actor, metrics, self.config.actor.ema_decay)
            for blend in self.algorithm.after_step(step):
                self.actor.blend(blend)
        self.hashes.actor(step, self.actor.weights, self.actor.full_optimizer_state)
        self.sync(step + 1)
        self.save_samples(step, batch, scored, groups)
        return self.report(step, metrics, scored)

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Evaluate what a step has learnt, write down how it went, save. A stop in the evaluation costs the
        evaluation alone.
        """
        done = int(metrics["step"]) + 1
        if self.evaluation_is_due(done):
            self.state.trained(done, metrics)
            with self.timer.phase("evaluation"):
                scores = self.evaluate(done)
            metrics = self.timed(metrics | scores)
        if self.layout.rank == 0:
            self.run.append_metrics(metrics)
        self.progress.show(metrics)
        self.trackers.log(metrics)
        self.state.save_if_due(done)

    def fit_micro_batch(self, step: int) -> None:
        """Find out before the first step whether the engine's micro-batch fits into memory; it also warms
        kernels up.
        """
        cursor = self.sampler.cursor
        requests = make_requests(
            self.config, self.family, self.embed, self.layout, step, self.sampler.next_groups()
        )
        self.sampler.cursor = cursor
        longest, strict = self.config.data.text_lengths[-1], self.config.determinism == "strict"
        fit_micro_batch_size(self.engine, requests, longest, self.device, may_shrink=not strict)

    def check_stop(self) -> None:
        """Collective, at every micro-batch. Raises StopRequested on every rank where any has a reason."""
        self.stop.check(self.layout.rank, self.device)

    def training_points(
        self, batch: Trajectories, scored: ScoredStep, advantages: Tensor
    ) -> list[list[TrainingPoint]]:
        """The training points of each optimizer update, cut into actor micro-batches.

        The k-th part of every rank's samples makes the k-th update; a sample's weight is 1 / (valid samples
        of its update).
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

    def sync(self, version: int) -> None:
        """The policy that samples to the engine, which takes the device. The version is the number of
        finished steps.
        """
        with self.timer.phase("sync"):
            self.handover.send(self.algorithm.sampler, version)
        self.residency.give_to(ROLLOUT)
        with self.timer.phase("sync"):
            self.receipt = self.handover.confirm(version)

    def evaluation_is_due(self, step: int) -> bool:
        """After `step` steps."""
        every = self.config.evaluation.every
        return bool(every) and (step % every == 0 or step == self.config.steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """The base model and all policies side by side; the engine ends with the one that samples."""
        self.residency.give_to(ACTOR)
        dtype, sampler = getattr(torch, self.config.rollout.dtype), self.algorithm.sampler
        policies = collect_policies(self.actor, dtype, last=sampler)
        self.residency.give_to(ROLLOUT)
        scores = self.evaluator.compare(policies, step, self.check_stop)
        self.state.judge(step, scores.get("ema", scores["adapter"]), self.evaluator.measure)
        return {f"evaluation/{policy}": reward for policy, reward in scores.items()}

    def save_samples(self, step: int, batch: Trajectories, scored: ScoredStep, groups: list[Group]) -> None:
        every, count = self.config.logging.samples_every, self.config.logging.samples_count
        if self.layout.rank or not every or (step % every and step != self.config.steps - 1):
            return
        images = batch.images[:count].permute(0, 2, 3, 1).cpu().numpy()
        prompts = [groups[g].prompt for g in batch.group[:count].tolist()]
        save_samples(self.run, step, images, prompts, scored.rewards[scored.own][:count].tolist())

    def report(self, step: int, metrics: Accumulator, scored: ScoredStep) -> dict[str, float]:
        """The metrics of a step, the same on every rank but for times and memory, which are this rank's."""
        valid = scored.rewards[scored.mask]
        metrics = {
            "step": step,
            "reward/mean": float(valid.mean()),
            "reward/std": float(valid.std()) if len(valid) > 1 else 0.0,
            "reward/zero_std_groups": zero_std_groups(scored.rewards, scored.groups, scored.mask),
            "reward/failed": int((~scored.mask).sum()),
            **{f"reward/{name}/mean": float(scores.nanmean()) for name, scores in scored.parts.items()},
            **metrics.reduce(),
            "sync/bound": len(self.receipt.bound),
            "sync/version": self.receipt.version,
            "time/reward": scored.seconds,  # in worker processes, beside the step
            **self.peaks.take(),
        }
        return self.timed(metrics)

    def timed(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step with the seconds since the last call added to what it took so far, by phase.

        A checkpoint is written after this, and counts in the next step.
        """
        taken = self.timer.take()
        names = [f"time/{phase}" for phase in TIMED_PHASES]
        times = {name: metrics.get(name, 0.0) + taken.get(name, 0.0) for name in names}
        seconds = sum(times.values())
        images = self.config.data.prompts_per_step * self.config.data.samples_per_prompt
        return metrics | times | {"time/step": seconds, "images_per_second": images / seconds}

    def note(self, name: str, value: str) -> None:
        """Show and store what the run was found to use, once it is known."""
        if self.layout.rank == 0:
            print(f"{name}: {value}", flush=True)
            self.run.add_choice(name, value)

    def close(self) -> None:
        """End the reward workers, whatever they are doing. The process group is the caller's."""
        self.rewards.close()
