"""What the files of a run say. Half lines, which a running or killed job leaves, are left out."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from omnirl_hpc.checkpoints.files import checkpoint_path, find_fault, steps_in
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.lock import QUICK_LOOKS, Holder, find_holder, is_alive, process_lives
from omnirl_hpc.run_directory import RunDirectory

RECENT_STEPS = 10  # that speed is measured over
GOES_ON = "the same command goes on from the last whole checkpoint"
ENDS = 5  # steps at each end of a run that its rewards are compared over

Line = dict[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """Read once, at one moment."""

    run: RunDirectory
    config: dict[str, Any]
    environment: dict[str, Any]  # {} where there is none
    metrics: list[Line]  # one for each finished step
    samples: list[Line]  # of samples/index.jsonl
    holder: Holder | None  # of its lock, where that run is not known to have ended
    running: bool  # the holder shows signs of life

    @classmethod
    def read(cls, path: Path) -> RunRecords:
        """Raises ConfigError where the folder holds no run."""
        run = RunDirectory(path)
        run.require_run()
        holder = find_holder(path)
        return cls(
            run,
            _read_yaml(run.config),
            _read_json(run.environment),
            _read_lines(run.metrics),
            _read_lines(run.samples / "index.jsonl"),
            None if holder is None or process_lives(holder) is False else holder,
            holder is not None and is_alive(path, holder),
        )

    @property
    def steps_reported(self) -> int:
        """How many steps the metrics are of."""
        return self.metrics[-1]["step"] + 1 if self.metrics else 0

    @cached_property
    def steps_done(self) -> int:
        """One more than are reported where the run was stopped in the evaluation of the last."""
        folder = self.run.checkpoints
        whole = (
            n for n in reversed(steps_in(folder)) if not find_fault(checkpoint_path(folder, n), quickly=True)
        )
        return max(self.steps_reported, next(whole, 0))

    @property
    def steps(self) -> int | None:
        """How many it shall have."""
        return self.config.get("steps")

    @property
    def finished(self) -> bool:
        return self.steps is not None and self.steps_reported >= self.steps

    @property
    def recipe(self) -> str:
        return self.environment.get("choices", {}).get("recipe", "-")

    @cached_property
    def state(self) -> str:
        """In words."""
        if self.running:
            return f"running: {self.holder}"
        if self.holder is not None:
            return f"no sign of life for {QUICK_LOOKS} s from {self.holder}; if that was killed, {GOES_ON}"
        if self.finished:
            return "finished"
        if not self.metrics:
            return "not running; it has not finished a step"
        return f"not running, stopped or killed; {GOES_ON}"

    def column(self, name: str) -> list[float | None]:
        """A metric over the steps; None where a step has none."""
        return [line.get(name) for line in self.metrics]

    def seconds_a_step(self) -> float | None:
        recent = [line["time/step"] for line in self.metrics[-RECENT_STEPS:] if line.get("time/step")]
        return statistics.median(recent) if recent else None

    def reward_at_the_ends(self) -> tuple[int, float, float] | None:
        """(n, mean reward of the first n steps, of the last n); None where there is no reward."""
        rewards = [reward for reward in self.column("reward/mean") if reward is not None]
        if not rewards:
            return None
        count = min(ENDS, max(1, len(rewards) // 2))
        return count, statistics.fmean(rewards[:count]), statistics.fmean(rewards[-count:])


def describe_rewards(records: RunRecords) -> str:
    ends = records.reward_at_the_ends()
    if ends is None:
        return "no reward" if records.metrics else "no reward yet"
    count, first, last = ends
    which = (
        ("the first step", "the last") if count == 1 else (f"the first {count} steps", f"the last {count}")
    )
    return f"mean reward {first:.6g} in {which[0]}, {last:.6g} in {which[1]}"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(path)))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}


def _read_lines(path: Path) -> list[Line]:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if isinstance(line, dict) and "step" in line]
