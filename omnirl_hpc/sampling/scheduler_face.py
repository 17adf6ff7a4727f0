"""One stream of a recorder in the form of a diffusers scheduler, for pipelines that end a step in
`scheduler.step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self

from diffusers.configuration_utils import FrozenDict
from torch import Tensor

from omnirl_hpc.sampling.recorder import Recorder
from omnirl_hpc.sampling.streams import LATENTS


class SchedulerFace:
    """Put in place of a pipeline's scheduler. Pipelines of several streams copy their scheduler for each
    further one: the copy of a face is the face of the next stream.
    """

    order = 1  # model calls of a step
    init_noise_sigma = 1.0

    def __init__(
        self, recorder: Recorder, config: Mapping[str, Any], streams: tuple[str, ...] = (LATENTS,)
    ) -> None:
        """config: of the scheduler whose place it takes, which pipelines read settings from."""
        self._recorder, self._streams = recorder, streams
        self.config = FrozenDict(config)
        self.sigmas: Tensor | None = None
        self.timesteps: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> Self:
        if len(self._streams) < 2:
            raise RuntimeError(f"the pipeline steps through more streams than {', '.join(self._streams)}")
        return type(self)(self._recorder, self.config, self._streams[1:])

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, **_: Any
    ) -> None:
        """Install the recorder's schedule, whatever the pipeline computed: rollout and actor must share one.

        Raises ValueError where the pipeline asks for another number of steps.
        """
        schedule = self._recorder.schedule(self._streams[0])
        asked = num_inference_steps if sigmas is None else len(sigmas)
        if asked != schedule.num_steps:
            raise ValueError(f"the pipeline asks for {asked} steps, the schedule has {schedule.num_steps}")
        self.sigmas = schedule.sigmas.to(device)
        self.timesteps = schedule.timesteps.to(device)

    def set_begin_index(self, index: int = 0) -> None:
        """Pipelines name the first step: it is always the first of the schedule."""
        if index:
            raise ValueError(f"the pipeline begins at step {index}, the recorder at 0")

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, return_dict: bool = True, **_: Any
    ):
        """One step of the whole batch. `sample` only tells the dtype: the recorder keeps the fp32 latents."""
        following = self._recorder.advance(self._streams[0], model_output).to(sample.dtype)
        return SimpleNamespace(prev_sample=following) if return_dict else (following,)
