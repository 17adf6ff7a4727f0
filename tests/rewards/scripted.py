"""Rewards whose behaviour a prompt scripts. Worker processes import this module."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.rewards.reward import Reward, RewardBatch


class Scripted(Reward):
    """Scores what the first prompt of a batch says: numbers such as "1 2 nan", or a way to fail."""

    def score(self, batch: RewardBatch) -> list:
        order = batch.prompts[0].prompt
        if order == "die by itself":
            os._exit(0)
        if order == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if order == "raise":
            raise LookupError("no such image")
        if order == "hang":
            threading.Event().wait()
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "pid":
            return [os.getpid()] * len(batch.prompts)
        if order == "text":
            return ["high"] * len(batch.prompts)
        return [float(number) for number in order.split()]


class CannotBeMade(Scripted):
    def __init__(self, settings: RewardPartConfig) -> None:
        raise RuntimeError("no weights")


class LeavesWhenMade(Scripted):
    def __init__(self, settings: RewardPartConfig) -> None:
        sys.exit(0)


class DiesWhenMade(Scripted):
    def __init__(self, settings: RewardPartConfig) -> None:
        os._exit(3)


class HangsWhenMade(Scripted):
    def __init__(self, settings: RewardPartConfig) -> None:
        threading.Event().wait()


class NeedsPackages(Scripted):
    packages = ("json", "no_such_package")


class ReadsStyles(Scripted):
    metadata = ("style",)


class NeedsTargets(Scripted):
    needs_target = True


@dataclass
class FixedConfig(RewardPartConfig):
    value: float = 0.0


class Fixed(Reward):
    """Scores what its settings say."""

    Settings = FixedConfig

    def score(self, batch: RewardBatch) -> list:
        return [self.settings.value] * len(batch.prompts)


class MeetsAnother(Scripted):
    """For two workers in one process: each call waits for another one."""

    both = threading.Barrier(2, timeout=30)

    def score(self, batch: RewardBatch) -> list:
        self.both.wait()
        return [1.0] * len(batch.prompts)


class ZeroesItsLatents(Scripted):
    needs = ("latents",)
    runs_in = "thread"

    def score(self, batch: RewardBatch) -> list:
        assert batch.frames is None and batch.audio is None
        for latents in batch.latents.values():
            latents[:] = 0
        return [0.0] * len(batch.prompts)


class NowhereToBe(Scripted):
    runs_in = "cloud"


class WithoutModules(Scripted):
    runs_in = "device"


class OnDevice(WithoutModules):
    def modules(self) -> list:
        return []
