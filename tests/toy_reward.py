"""A reward from outside of the package, in one file: it looks at a video and listens to its sound."""

from __future__ import annotations

from omnirl_hpc.rewards import Reward, RewardBatch


class QuietAndDark(Reward):
    """Minus the loudness, minus the brightness."""

    needs = ("video", "audio")

    def score(self, batch: RewardBatch) -> list[float]:
        assert batch.sample_rate > 0 and batch.fps > 0
        return [
            -float((sound**2).mean() ** 0.5) - float(frames.mean()) / 255
            for sound, frames in zip(batch.audio, batch.frames)
        ]
