"""The protocol of a reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.schema import RewardConfig, RewardPartConfig
from omnirl_hpc.data.prompts import Prompt

if TYPE_CHECKING:
    from torch import nn

# What a reward may need -> the field of RewardBatch that holds it.
FIELDS = {"image": "frames", "video": "frames", "audio": "audio", "text": "text", "latents": "latents"}
LATENTS = "latents"  # every model makes them; all others are decoded from them

# Where a reward runs.
PROCESS = "process"  # in worker processes, beside generation: what computes on the CPU
THREAD = "thread"  # in threads of the rank, beside generation: what waits, such as for an HTTP server
DEVICE = "device"  # on the rank's device, after generation: engine, reward and actor take turns there
PLACES = (PROCESS, THREAD, DEVICE)


@dataclass(frozen=True)
class RewardBatch:
    """B samples to score, with what the reward needs of them; None: not needed, or the model makes none.

    Arrays are NumPy's; for a reward on the device they are torch's, and there.
    """

    frames: Any  # [B, F, H, W, 3] uint8; F = 1: images
    prompts: list[Prompt]
    audio: Any = None  # [B, channels, T] fp32
    fps: float = 0.0  # frames a second
    sample_rate: int = 0  # of the sound, in Hz
    text: list[str] | None = None  # what the model wrote
    latents: dict[str, Any] | None = None  # by stream, [B, …] fp32, at the end of denoising

    @property
    def images(self) -> Any:
        """[B, H, W, 3] uint8. Raises ValueError for videos, and where the reward does not need images."""
        if self.frames is None:
            raise ValueError('there are no images: the reward\'s `needs` must name "image"')
        if self.frames.shape[1] != 1:
            raise ValueError(f"samples are videos of {self.frames.shape[1]} frames, not images")
        return self.frames[:, 0]

    def only(self, needs: Collection[str]) -> RewardBatch:
        """Without what is not among `needs`: it would travel to the workers for nothing."""
        unused: dict[str, Any] = dict.fromkeys(set(FIELDS.values()) - {FIELDS[need] for need in needs})
        return replace(self, **unused)

    def with_arrays(self, convert: Callable[[Any], Any]) -> RewardBatch:
        """With `convert` of each array."""
        return replace(
            self,
            frames=None if self.frames is None else convert(self.frames),
            audio=None if self.audio is None else convert(self.audio),
            latents=None
            if self.latents is None
            else {name: convert(tensor) for name, tensor in self.latents.items()},
        )


@dataclass(frozen=True)
class ScoresWithComponents:
    """What `Reward.score` returns where a score is made of others that are worth seeing."""

    scores: Sequence[float]  # [B], what is learned from
    components: Mapping[str, Sequence[float]] = field(default_factory=dict)  # Reward.components -> [B]


class Reward(ABC):
    """Scores samples. Made once in each worker; `score` is then called there for one micro-batch at a time.

    The module is imported in the rank's own process too: a reward imports its `packages` when it is made, not
    before.
    """

    Settings: ClassVar[type[RewardPartConfig]] = (
        RewardPartConfig  # a dataclass: what may be set, and its defaults
    )
    # image | video | audio | text, of which the model must make each; latents. Nothing: the prompts alone
    needs: ClassVar[tuple[str, ...]] = ("image",)
    runs_in: ClassVar[str] = PROCESS  # process | thread | device
    components: ClassVar[tuple[str, ...]] = ()  # names of what it returns beside the scores, to be logged
    needs_target: ClassVar[bool] = False  # every prompt must have one
    metadata: ClassVar[tuple[str, ...]] = ()  # other columns of the prompt table, in `prompt.metadata`
    packages: ClassVar[tuple[str, ...]] = ()  # beyond this package's own requirements

    def __init__(self, settings: RewardPartConfig) -> None:
        self.settings = settings

    @abstractmethod
    def score(self, batch: RewardBatch) -> Sequence[float] | ScoresWithComponents:
        """One score for each sample, higher is better. NaN: this sample could not be scored."""

    def modules(self) -> Sequence[nn.Module]:
        """For a reward on the device: its networks, made on the CPU. They are moved to the device, where they
        sleep and wake.
        """
        raise NotImplementedError(f"{type(self).__name__} runs on the device and does not define modules()")


def metadata_columns(config: RewardConfig) -> tuple[str, ...]:
    """The columns of the prompt table that the rewards of a run read, beside prompt, target and id."""
    classes = [find_class("reward", part.name) for part in config.parts.values()]
    return tuple(dict.fromkeys(column for reward in classes for column in reward.metadata))


def media_are_scored(config: RewardConfig) -> bool:
    """Whether a reward needs more of samples than their latents."""
    return any(set(find_class("reward", part.name).needs) - {LATENTS} for part in config.parts.values())
