"""The training loop. `Trainer.train_step` is the algorithm, top to bottom;
every line a call into one room.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from omnirl_hpc.actor import make_actor
from omnirl_hpc.actor.update import accumulate_gradients, apply_gradients, check_gap, recompute_old
from omnirl_hpc.algorithms import make_algorithm
from omnirl_hpc.algorithms.algorithm import LikelihoodAlgorithm, Old
from omnirl_hpc.checkpoints.checkpointer import Checkpointer
from omnirl_hpc.checkpoints.run_state import RunState
from omnirl_hpc.checks.data import check_prompt_lengths
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.load import LoadedConfig
from omnirl_hpc.errors import OutputError
from omnirl_hpc.evaluation.evaluator import make_evaluator
from omnirl_hpc.launch.agreement import by_rank_0
from omnirl_hpc.launch.stop import StopFlag, StopReason, StopRequested
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.metrics.attention import observe_attention
from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.metrics.memory import DevicePeaks
from omnirl_hpc.metrics.phases import PhaseTimer, StepClock
from omnirl_hpc.metrics.progress import ProgressDisplay
from omnirl_hpc.metrics.trackers import Trackers
from omnirl_hpc.policies import CURRENT, EMA, label
from omnirl_hpc.residency import ACTOR, ROLLOUT, Residency
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sources import make_generation, make_source

log = logging.getLogger(__name__)


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
        checkpointer: Checkpointer,
    ) -> None:
        config = self.config = loaded.config
        self.layout, self.device, self.run, self.timer, self.stop = layout, device, run, timer, stop
        self.trackers, self.progress = trackers, ProgressDisplay(config.steps, layout.rank)
        self.peaks = DevicePeaks(device)
        self.hashes = StepHashes(run, layout.rank, enabled=config.determinism == "strict")
        family = find_class("model", config.model.family)(config.model)
        check_prompt_lengths(config, family)
        self.algorithm = make_algorithm(config)
        schedules = family.schedules(config.sampling.num_inference_steps)
        for remark in self.algorithm.remarks(schedules, family.stream_shapes()):
            if layout.rank == 0:
                log.warning("%s", remark)
        self.residency = Residency(config.residency, timer, self.peaks)
        self.generation = make_generation(
            config, family, layout, device, self.algorithm, timer, self.residency
        )
        self.actor = make_actor(config, family, layout, device, self.algorithm)
        self.residency.add(ACTOR, self.actor)
        self.generation.load()
        self.source = make_source(
            config,
            family,
            layout,
            device,
            self.algorithm,
            self.generation,
            timer,
            self.hashes,
            run,
            self.residency,
        )
        self.handover = self.generation.make_sync(self.actor)
        for part, network in (*self.generation.networks.items(), ("actor", self.actor.transformer)):
            observe_attention(network, partial(self.note, f"attention kernel, {part}"))
        self.evaluator = make_evaluator(config, family, layout, device, self.generation, run)
        self.state = RunState(
            loaded, run, checkpointer, self.actor, self.algorithm, self.source, self.residency, timer
        )
        self.clock = StepClock(timer, self.source.samples_per_step)

    def train(self, start: Path | None) -> StopReason:
        """All steps that are left, from the checkpoint `start` or the beginning. Returns why it stopped
        early, or NONE; everything is saved either way.
        """
        first = self.state.restore(start)
        if first and self.layout.rank == 0:
            complete = first == self.config.steps and self.state.unevaluated is None
            further = "; the run is complete, and a greater steps=N takes it further" if complete else ""
            print(f"going on from step {first} of {self.config.steps}{further}", flush=True)
        self.sync(first)  # what samples starts as the actor is, and the path is proven before the first step
        if self.device.type == "cuda":
            self.source.fit(first)
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
        """Get what is to be learned from, learn, hand the new policy to what samples."""
        metrics = Accumulator(self.device)
        given = self.source.next(step, self.check_stop)
        updates = given.batch.updates(self.config.actor.updates_per_step, self.config.actor.micro_batch_size)
        points = [self.algorithm.points_of(update, self.source.schedules) for update in updates]

        self.residency.give_to(ACTOR)
        old: list[list[Old] | None] = [None] * len(points)
        if self.algorithm.recomputes_old:
            assert isinstance(self.algorithm, LikelihoodAlgorithm)
            with self.timer.phase("old_log_prob"):
                for i, later in enumerate(points[1:], start=1):
                    old[i] = recompute_old(self.actor, self.algorithm, later, metrics, self.check_stop)
        with self.timer.phase("actor"):
            for i, of_update in enumerate(points):
                accumulate_gradients(
                    self.actor, self.algorithm, of_update, metrics, self.check_stop, old[i], i == 0
                )
                if i == 0:
                    check_gap(self.algorithm, metrics, self.config.rollout.max_log_prob_gap)
                self.hashes.gradients(step, i, self.actor.gradients)
                apply_gradients(self.actor, metrics, self.config.actor.ema_decay)
            for blend in self.algorithm.after_step(step):
                self.actor.blend(blend)
        self.hashes.actor(step, self.actor.weights, self.actor.full_optimizer_state)
        self.sync(step + 1)
        measured = (
            {"step": step} | given.metrics | metrics.reduce() | self.handover.metrics | self.peaks.take()
        )
        return self.clock.book(measured)

    def sync(self, version: int) -> None:
        """The policy that samples to where it samples, which takes the device. The version is the number of
        finished steps.
        """
        with self.timer.phase("sync"):
            self.handover.send(self.algorithm.sampler, version)
        self.residency.give_to(ROLLOUT)
        with self.timer.phase("sync"):
            self.handover.confirm(version)

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Evaluate what a step has learnt, write down how it went, save. A stop in the evaluation, and a
        result that cannot be written, cost the evaluation alone.
        """
        done, trained = int(metrics["step"]) + 1, metrics
        try:
            if self.evaluator is not None and self.evaluator.is_due(done):
                self.state.trained(done, trained)
                with self.timer.phase("evaluation"):
                    scores = self.evaluate(done)
                metrics = self.clock.book(trained | scores)
            by_rank_0(lambda: self.run.append_metrics(metrics), OutputError)
        except OutputError:
            self.state.trained(done, trained)
            self.state.give_up()
            raise
        self.progress.show(metrics)
        self.trackers.log(metrics)
        self.state.save_if_due(done)

    def evaluate(self, step: int) -> dict[str, float]:
        """The base model and all policies side by side; what samples ends with the policy that it had."""
        assert self.evaluator is not None
        self.residency.give_to(ACTOR)
        policies = self.evaluator.collect(self.actor, last=self.algorithm.sampler)
        self.residency.give_to(ROLLOUT)
        scores = self.evaluator.compare(policies, step, self.check_stop)
        self.state.judge(step, scores.get(label(EMA), scores[label(CURRENT)]), self.evaluator.measure)
        return {f"evaluation/{policy}": reward for policy, reward in scores.items()}

    def check_stop(self) -> None:
        """Collective, at every micro-batch. Raises StopRequested on every rank where any has a reason."""
        self.stop.check(self.layout.rank, self.device)

    def note(self, name: str, value: str) -> None:
        """Show and store what the run was found to use, once it is known."""
        if self.layout.rank == 0:
            print(f"{name}: {value}", flush=True)
            self.run.add_choice(name, value)

    def leave(self) -> None:
        """Let go of what samples, with the other ranks. Not after an error: it would wait for ranks that are
        stuck.
        """
        self.generation.leave()

    def close(self) -> None:
        """End the rewards' workers, whatever they are doing. The process group is the caller's."""
        self.generation.close()
