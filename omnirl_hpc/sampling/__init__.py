"""Sampling from a flow-matching model: schedules, transitions, windows, noise, and the recorder.

Knows no model, no engine and no process group: rollout and actor share everything here.
"""

from omnirl_hpc.sampling.transitions import Transition, transition

__all__ = ["Transition", "transition"]
