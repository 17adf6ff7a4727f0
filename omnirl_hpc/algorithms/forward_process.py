"""Noising clean latents in training: what algorithms without trajectories evaluate the model on.

Notation as in sampling/transitions.py: x_sigma = (1 - sigma) x0 + sigma eps, velocity v = eps - x0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omnirl_hpc.sampling.noise import TRAINING_NOISE, standard_normal
from omnirl_hpc.sampling.samples import SampleIdentity
from omnirl_hpc.sampling.streams import Streams, map_streams, mean_over_streams, stream_address


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, …], to broadcast against `like`."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def training_noise(identities: Sequence[SampleIdentity], clean: Streams, place: int) -> Streams:
    """Standard normal noise in the shapes of `clean`, by identity; `place` tells several draws apart."""
    return {
        name: torch.stack(
            [
                standard_normal(latents.shape[1:], *who.address(TRAINING_NOISE, *stream_address(name), place))
                for who in identities
            ]
        ).to(latents.device)
        for name, latents in clean.items()
    }


def noised(clean: Streams, noise: Streams, sigmas: Streams) -> Streams:
    """x_sigma of each stream; sigmas [B] by stream."""
    return map_streams(
        lambda x0, eps, sigma: (1 - per_row(sigma, x0)) * x0 + per_row(sigma, x0) * eps, clean, noise, sigmas
    )


def clean_estimate(latents: Streams, velocity: Streams, sigmas: Streams) -> Streams:
    """What a velocity says that x0 is: x_sigma - sigma v, in fp32."""
    return map_streams(lambda x, v, sigma: x - per_row(sigma, x) * v.float(), latents, velocity, sigmas)


def mean_square(first: Streams, second: Streams) -> Tensor:
    """[B] mean squared difference over all elements of all streams."""
    return mean_over_streams(
        map_streams(lambda a, b: ((a - b) ** 2).flatten(1).mean(dim=1), first, second), first
    )


def mean_absolute(first: Streams, second: Streams) -> Tensor:
    """[B] mean absolute difference over all elements of all streams."""
    return mean_over_streams(
        map_streams(lambda a, b: (a - b).abs().flatten(1).mean(dim=1), first, second), first
    )
