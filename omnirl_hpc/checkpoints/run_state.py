"""What a run must remember to go on, and when it is written down."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from omnirl_hpc import __version__
from omnirl_hpc.actor.actor import Actor
from omnirl_hpc.algorithms import Algorithm
from omnirl_hpc.checkpoints.adapters import load_adapter, load_adapter_scaled
from omnirl_hpc.checkpoints.checkpointer import CheckpointContent, Checkpointer
from omnirl_hpc.checkpoints.files import checkpoint_path, read_state
from omnirl_hpc.config.load import LoadedConfig
from omnirl_hpc.config.resume import check_same_run
from omnirl_hpc.errors import CheckpointError, ConfigError, ResumeError
from omnirl_hpc.launch.agreement import by_rank_0, raise_on_all_ranks
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.policies import label
from omnirl_hpc.residency import ACTOR, ROLLOUT, Residency
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sources.source import Source

log = logging.getLogger(__name__)


def find_start(run: RunDirectory, checkpointer: Checkpointer) -> Path | None:
    """The checkpoint that a run goes on from; None where its folder holds no run yet. Collective.

    Raises ResumeError where the folder holds a run that has no whole checkpoint, or one that a rank cannot
    read: starting over would erase what may still be saved. Nothing has been changed by then.
    """
    try:
        path = checkpointer.find()
        if path is None and by_rank_0(run.last_step, ConfigError) >= 0:
            raise ConfigError(
                f"{run.checkpoints} has no checkpoint, and {run.metrics} has the metrics of a run"
            )
    except ConfigError as error:
        raise ResumeError(
            f"run_dir={run.path} holds a run that cannot go on: {error}; nothing was changed there: "
            "mend it, go back with checkpoint.resume_step=N to a step that is whole, or take another run_dir"
        ) from None
    return path


class RunState:
    """Saves and restores actor, algorithm and data cursor. All methods are collective.

    A checkpoint is always the state between two steps.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        run: RunDirectory,
        checkpointer: Checkpointer,
        actor: Actor,
        algorithm: Algorithm,
        source: Source,
        residency: Residency,
        timer: PhaseTimer,
    ) -> None:
        self._loaded, self._run, self._checkpointer = loaded, run, checkpointer
        self._actor, self._algorithm, self._source = actor, algorithm, source
        self._residency, self._timer = residency, timer
        self.unevaluated: dict[str, Any] | None = (
            None  # the metrics of the last step, where a stop came in its evaluation
        )
        self._between_steps: dict[
            str, Any
        ] = {}  # step, algorithm, cursor and more as of the last step boundary
        self._best: dict[str, Any] = {"step": None, "score": -math.inf, "measure": ""}
        self._saved: tuple[int, bool] | None = (
            None  # what the newest checkpoint is of: its step, and whether that is evaluated
        )

    def restore(self, path: Path | None) -> int:
        """Go on from the checkpoint that `find_start` found, or start, writing a first one: a full quota
        shows now and not in an hour.

        Returns the first step to do.
        """
        self._residency.give_to(ACTOR)
        if path is None:
            if adapter := self._loaded.config.init_adapter:
                lora = self._loaded.config.actor.lora
                self._load_adapters(lambda policy: load_adapter_scaled(Path(adapter), lora))
            for policy, given in self._algorithm.given.items():
                if policy in self._actor.policies:  # an adapter; a whole model is the actor's own business
                    read = partial(load_adapter_scaled, Path(given), self._loaded.config.actor.lora)
                    self._actor.load(policy, raise_on_all_ranks(read, CheckpointError))
            step = 0
        else:
            step = self._load(path)
        if dist.get_rank() == 0:
            self._run.cut(step, metrics=step if self.unevaluated is None else step - 1)
            asked, job = self._loaded.config.checkpoint.resume_step, os.environ.get("SLURM_JOB_ID")
            if asked is not None and job is not None:
                self._run.note_return(job, asked)
        self._mark(step)
        if path is None:
            self._save()
        return step

    def trained(self, step: int, metrics: dict[str, Any]) -> None:
        """`step` steps are done, and the last one, which gave `metrics`, is still to be evaluated."""
        self.unevaluated = metrics
        self._mark(step)

    def save_if_due(self, step: int) -> None:
        """At the end of a step, when `step` steps are done."""
        self.unevaluated = None
        self._mark(step)
        self._checkpointer.poll()
        due = step % self._loaded.config.checkpoint.every == 0 or step == self._loaded.config.steps
        if due or step == self._best["step"]:
            self._save_with_actor_on_device()

    def judge(self, step: int, score: float, measure: str) -> None:
        """Tell the evaluation score of the state that the next `save_if_due` may save; the best so far is
        saved, and kept.

        A score by another `measure`, such as other prompts, which may change when a run goes on, says nothing
        about this one.
        """
        better = measure != self._best["measure"] or score > self._best["score"]
        if self._loaded.config.evaluation.keep_best and better:
            self._best = {"step": step, "score": score, "measure": measure}

    def give_up(self) -> None:
        """Undo the partial step and save the state at its start; in an evaluation, the state that was to be
        evaluated.
        """
        self._residency.give_to(ACTOR)
        self._actor.rollback()
        self._save()
        self._checkpointer.wait()

    def finish(self) -> None:
        self._checkpointer.wait()

    def _mark(self, step: int) -> None:
        """A step boundary: `give_up` comes back to this. A stop may come before the actor's first turn in a
        step.
        """
        self._actor.keep()
        self._between_steps = {
            "step": step,
            "algorithm": self._algorithm.state_dict(),
            "source": self._source.state_dict(),
            "best": None if self._best["step"] is None else self._best,
            "unevaluated": self.unevaluated,
        }

    def _save_with_actor_on_device(self) -> None:
        self._residency.give_to(ACTOR)
        self._save()
        self._residency.give_to(ROLLOUT)

    def _save(self) -> None:
        step, evaluated = self._between_steps["step"], self._between_steps["unevaluated"] is None
        if self._saved == (step, evaluated):
            return
        with self._timer.phase("checkpoint"):
            self._checkpointer.save(
                CheckpointContent(
                    step=step,
                    adapters=self._adapters(),
                    sharded=self._actor.sharded_state(),
                    state={
                        **self._between_steps,
                        "schedule": self._actor.scheduler_state(),
                        "config": self._loaded.to_yaml(),
                        "omnirl_hpc": __version__,
                        "world_size": dist.get_world_size(),
                    },
                    peft_config=self._actor.adapter_config,
                    best=self._best["step"],
                )
            )
        self._saved = (step, evaluated)
        log.info("checkpoint %d%s", step, "" if evaluated else ", not evaluated yet")

    def _load(self, path: Path) -> int:
        # before `load`, which puts later checkpoints aside
        state = raise_on_all_ranks(lambda: read_state(path), CheckpointError)
        check_same_run(state["config"], self._loaded.to_yaml(), str(self._run.path))
        self._source.load_state_dict(_source_state(state))
        self._checkpointer.load(path, self._actor.sharded_state())
        self._load_adapters(lambda policy: load_adapter(path / label(policy)))
        self._actor.load_scheduler_state(state["schedule"])
        self._algorithm.load_state_dict(state["algorithm"])
        best = state.get("best")
        if (
            best and checkpoint_path(path.parent, best["step"]).exists()
        ):  # a better one of the way not gone may have replaced it
            self._best = best
        self.unevaluated = state.get("unevaluated")
        self._saved = (state["step"], self.unevaluated is None)
        log.info("resumed from %s", path)
        return state["step"]

    def _adapters(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has as adapters, by folder: one for each policy."""
        return {label(policy): dict(self._actor.weights(policy)) for policy in self._adapted()}

    def _load_adapters(self, read: Callable[[str], dict[str, Tensor]]) -> None:
        """read: a policy's adapter, on every rank."""
        for policy in self._adapted():
            self._actor.load(policy, raise_on_all_ranks(partial(read, policy), CheckpointError))

    def _adapted(self) -> tuple[str, ...]:
        """The policies that are adapters; all others are among the actor's sharded tensors."""
        return () if self._actor.adapter_config is None else self._actor.policies


def _source_state(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds of the source; up to version 0.1.0 it lay beside the rest."""
    return state["source"] if "source" in state else state
