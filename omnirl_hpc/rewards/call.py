"""One call of a reward: a user's code, which may raise anything, leave the program, or return anything."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.rewards.reward import Reward, RewardBatch, ScoresWithComponents

# In which every traceback begins
CALLERS = tuple(
    str(Path(__file__).with_name(name)) for name in ("call.py", "processes.py", "threads.py", "device.py")
)


class WrongScores(Exception):
    """What a reward returned is not a number for each sample."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call."""

    scores: list[float]  # [B], which may be infinite or NaN; empty where the call failed
    components: dict[str, list[float]] = field(default_factory=dict)  # name -> [B]
    error: str | None = None  # one sentence about what went wrong
    seconds: float = 0.0


def make_reward(settings: RewardPartConfig) -> tuple[Reward | None, str | None]:
    """The reward that `settings` name, or None and one sentence about why it cannot be made."""
    try:
        return find_class("reward", settings.name)(settings), None
    except BaseException as failure:  # a user's code: it may call exit(), too
        return None, describe_failure(failure)


def call_reward(reward: Reward, batch: RewardBatch) -> Outcome:
    """A number for each sample, or no numbers and what went wrong.

    A failed call is counted, masked out of its groups and reported by the trainer: it is never a score of 0.
    """
    started = time.perf_counter()

    def spent() -> float:
        return time.perf_counter() - started

    try:
        returned, count = reward.score(batch), len(batch.prompts)
        components = returned.components if isinstance(returned, ScoresWithComponents) else {}
        scores = returned.scores if isinstance(returned, ScoresWithComponents) else returned
        if set(components) != set(reward.components):
            raise WrongScores(
                f"returned the components {sorted(components)}, not those that its class names: "
                f"{sorted(reward.components)}"
            )
        return Outcome(
            as_scores(scores, count),
            {name: as_scores(components[name], count) for name in reward.components},
            seconds=spent(),
        )
    except WrongScores as failure:
        return Outcome([], error=str(failure), seconds=spent())
    except (
        BaseException
    ) as failure:  # exit() and a KeyboardInterrupt of the reward's own, too: no end of a run
        return Outcome([], error=describe_failure(failure), seconds=spent())


def as_scores(returned: Any, count: int) -> list[float]:
    """What `score` returned as `count` floats, which may be infinite or NaN.

    A list, a tuple, or an array or tensor of one dimension. Raises WrongScores for anything else: the keys of
    a dictionary, the characters of a text and a set's elements are no scores in the order of samples.
    """
    if hasattr(returned, "tolist"):  # NumPy's and torch's, without importing torch
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes, bytearray)):
        raise WrongScores(f"returned {type(returned).__name__}, not a list of numbers")
    if len(returned) != count:
        raise WrongScores(f"returned {len(returned)} scores for {count} samples")
    return [_as_number(score) for score in returned]


def _as_number(score: Any) -> float:
    if not hasattr(score, "__float__") or len(getattr(score, "shape", ())):  # an array is no number
        raise WrongScores(f"returned {type(score).__name__} as the score of a sample, not a number")
    return float(score)


def describe_failure(failure: BaseException) -> str:
    """Its kind, its message, and the last line of the reward's own file that was running."""
    said = " ".join("".join(traceback.format_exception_only(failure)).split())
    below = [f for f in traceback.extract_tb(failure.__traceback__) if f.filename not in CALLERS]
    own = [frame for frame in below if frame.filename == below[0].filename]
    return f"{said} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else said
