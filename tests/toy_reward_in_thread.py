"""A reward from outside of the package, in one file: it reads latents, and waits as if a server answered."""

from __future__ import annotations

import threading
import time

import numpy as np

from omnirl_hpc.rewards import Reward, RewardBatch
from omnirl_hpc.rewards.reward import THREAD


class CalmLatents(Reward):
    """Minus the mean square of the latents."""

    needs = ("latents",)
    runs_in = THREAD

    def score(self, batch: RewardBatch) -> list[float]:
        assert threading.current_thread() is not threading.main_thread()
        assert batch.frames is None and batch.audio is None  # it did not ask for them
        time.sleep(0.01)
        squares = [np.square(latents).reshape(len(latents), -1).mean(1) for latents in batch.latents.values()]
        return list(-np.mean(squares, axis=0))
