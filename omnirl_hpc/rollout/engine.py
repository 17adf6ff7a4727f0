"""The protocol of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.sampling.samples import Condition, SampleIdentity, Samples
from omnirl_hpc.sampling.windows import Window


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate. Identities, not places in a batch, determine its random draws."""

    identity: SampleIdentity
    group: int  # place among the groups of the step
    window: Window
    condition: Condition  # of the prompt, unpadded: one object for all samples of a group
    negative: Condition | None  # None: no guidance
    width: int  # that both are padded to, the same for all samples of a step


@dataclass(frozen=True)
class Receipt:
    """What an engine holds after a sync, read back from the places it computes with."""

    version: int
    bound: frozenset[str]  # adapted modules, or all weights; names, as the actor has them
    checksum: str


class RolloutEngine(Protocol):
    """Generates samples with the current adapter."""

    micro_batch_size: int  # samples generated at once

    @property
    def transformer(self) -> nn.Module:
        """The network that it denoises with, to be looked at."""

    def encode(self, prompt: Prompt) -> Condition:
        """What the model reads of one prompt, unpadded."""

    def generate(
        self, requests: Sequence[SampleRequest], num_steps: int | None = None, media: bool = True
    ) -> Iterator[Samples]:
        """The samples of each micro-batch as soon as they are made, in the order of the requests.

        num_steps: denoising steps, where they are not those of training. media: whether latents are decoded.
        """

    def load_lora(self, state: dict[str, Tensor], version: int) -> Receipt:
        """Replace the adapter by `state` (PEFT names, in the engine's dtype)."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace the transformer's weights (diffusers' names, whole tensors in the engine's dtype), asleep
        or awake.

        What the engine has no place for is passed over: `held_weights` tells. For actor.train=full.
        """

    def held_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The weights that the engine computes with, whole, one at a time: those of `names` that it has, and
        its others.
        """

    def close(self) -> None:
        """Let go of the model. The default process group is the host's and stays."""

    def sleep(self) -> None:
        """Free the device: weights go to pinned host memory. The engine may not be used until `wake`."""

    def wake(self) -> None:
        """Bring the weights back; the engine computes the same as before `sleep`, bit for bit."""
