"""Random draws by sample identity.

A draw is a function of (run seed, purpose, and what the purpose names: step, prompt, sample, …) and of
nothing else: not of the rank, the number of ranks, the place in a batch, or the time. Tensors are drawn on
the CPU in fp32, so that they are the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from omnirl_hpc.hashing import stable_hash

# Purposes have separate streams: drawing more of one never shifts another.
INITIAL_NOISE = "initial_noise"
TRANSITION_NOISE = "transition_noise"
WINDOW = "window"
ADAPTER_INIT = "adapter_init"
TRAINING_NOISE = "training_noise"  # of algorithms that noise clean latents
TRAINING_TIMESTEP = "training_timestep"


def standard_normal(shape: Sequence[int], *identity: int | str) -> Tensor:
    """A standard normal tensor of `shape`, fp32, on the CPU.

    From numpy's Philox, a counter-based generator keyed with 63 bits: torch's CPU generator takes only 32
    bits of a seed, so that among the million draws of a run some would be equal.
    """
    generator = np.random.Generator(np.random.Philox(key=stable_hash(*identity)))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


def uniform_integer(low: int, high: int, *identity: int | str) -> int:
    """An integer in [low, high)."""
    if low >= high:
        raise ValueError(f"no integer in [{low}, {high})")
    return low + stable_hash(*identity) % (high - low)  # the modulo's bias is below 2**-50 for schedules


def permutation(count: int, *identity: int | str) -> list[int]:
    """The numbers 0 … count - 1 in an order of the identity's own."""
    generator = np.random.Generator(np.random.Philox(key=stable_hash(*identity)))
    return generator.permutation(count).tolist()
