"""Latents by stream: a sample has one tensor for images, two for a video with its sound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from operator import add

from torch import Tensor

Streams = dict[str, Tensor]  # the name of a stream -> a tensor, batch first
LATENTS = "latents"  # the stream of a family that has only one


def stream_address(stream: str) -> tuple[str, ...]:
    """What a stream adds to the address of a random draw: nothing where it is the only one."""
    return () if stream == LATENTS else (stream,)


def map_streams(function: Callable[..., Tensor], *streams: Streams) -> Streams:
    """`function` of the tensors of each stream, which all of `streams` have."""
    return {name: function(*(tensors[name] for tensors in streams)) for name in streams[0]}


def mean_over_streams(means: Mapping[str, Tensor], latents: Streams) -> Tensor:
    """[B] means over the elements of each stream -> their mean over the elements of all, as if they were one
    tensor.

    latents: of the same streams, [B, …], for their sizes. With one stream this is its own mean, bit for bit.
    """
    sizes = {name: math.prod(latents[name].shape[1:]) for name in means}
    total = sum(sizes.values())
    return reduce(add, (mean * (sizes[name] / total) for name, mean in means.items()))
