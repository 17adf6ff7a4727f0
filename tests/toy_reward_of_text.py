"""A reward from outside of the package, in one file: it reads what the model wrote."""

from __future__ import annotations

from omnirl_hpc.rewards import Reward, RewardBatch


class ManyLetters(Reward):
    """The share of letters that are "a"."""

    needs = ("text",)

    def score(self, batch: RewardBatch) -> list[float]:
        return [text.count("a") / len(text) for text in batch.text]
