"""Rewards whose behaviour a prompt scripts. Worker processes import this module."""

from __future__ import annotations

import os
import signal
import threading

from omnirl_hpc.rewards.reward import Reward, RewardBatch


class Scripted(Reward):
    """Scores what the first prompt of a batch says: numbers such as "1 2 nan", or a way to fail."""

    def score(self, batch: RewardBatch) -> list:
        order = batch.prompts[0].prompt
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


class CannotBeMade(Reward):
    def __init__(self) -> None:
        raise RuntimeError("no weights")

    def score(self, batch: RewardBatch) -> list:
        return []
