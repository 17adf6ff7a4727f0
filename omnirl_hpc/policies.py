"""The names of policies: versions of what is trained, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CURRENT = "current"  # what the optimizer changes
REFERENCE = "reference"  # the model as it was before training
OLD = "old"  # follows the current one as its algorithm says
TEACHER = "teacher"  # given from outside, to be learned from
EMA = "ema"  # the running mean of the current one (actor.ema_decay)


@dataclass(frozen=True)
class Blend:
    """policy <- decay policy + (1 - decay) source, in fp32. A decay of 0 copies, one of 1 does nothing."""

    policy: str
    decay: float = 0.0
    source: str = CURRENT


def is_checkpoint(path: str | Path) -> bool:
    """Whether what a policy is given as is a whole model in diffusers' layout, and not an adapter."""
    return (Path(path) / "model_index.json").is_file()


_LABELS = {CURRENT: "adapter", REFERENCE: "base"}  # others have their own names


def label(policy: str) -> str:
    """What a policy is called where users see it: folders of checkpoints and evaluations, metrics, tables."""
    return _LABELS.get(policy, policy)


def policy_of(label: str) -> str:
    """The inverse of `label`."""
    return next((policy for policy, name in _LABELS.items() if name == label), label)
