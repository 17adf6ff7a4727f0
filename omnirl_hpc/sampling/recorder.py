"""The scheduler that is put into a stock pipeline: it makes the stochastic steps and records what training
needs.

Pipelines of diffusers and of vLLM-Omni end a denoising step in `scheduler.step(velocity, t, latents)`.
Replacing that one object makes any of them a rollout engine; no pipeline has to be rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.transitions import transition
from omnirl_hpc.sampling.windows import Window


@dataclass(frozen=True)
class Recording:
    """What a pipeline call left behind; batch first, all fp32."""

    latents: Tensor  # [B, W + 1, S, C] at the edges of the window
    log_probs: Tensor  # [B, W]
    final: Tensor  # [B, S, C] clean latents


class RecordingScheduler(FlowMatchEulerDiscreteScheduler):
    """A flow-matching scheduler that draws stochastic steps inside each sample's window and ODE steps
    outside.

    It keeps the latents in fp32 whatever dtype the pipeline works in. `begin` before each pipeline call,
    `finish` after it.
    """

    @classmethod
    def make(cls, scheduler_config: Mapping[str, Any], transition_kind: str, noise_level: float):
        """A recorder with the settings of the pipeline's own scheduler."""
        recorder = cls.from_config(dict(scheduler_config))
        recorder.transition_kind = transition_kind
        recorder.noise_level = noise_level
        recorder.schedule = recorder._noise = None
        return recorder

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, **_: Any
    ) -> None:
        """Install the schedule of `begin`, whatever the pipeline computed: rollout and actor must share one.

        Raises ValueError where the pipeline asks for another number of steps.
        """
        if self.schedule is None:
            raise RuntimeError("RecordingScheduler.set_timesteps without begin")
        asked = num_inference_steps if sigmas is None else len(sigmas)
        if asked != self.schedule.num_steps:
            raise ValueError(
                f"the pipeline asks for {asked} steps, the schedule has {self.schedule.num_steps}"
            )
        self.num_inference_steps = asked
        self.sigmas = self.schedule.sigmas.to(device)
        self.timesteps = self.schedule.timesteps.to(device)
        self._step_index = None
        self._begin_index = None

    def begin(self, initial: Tensor, windows: Sequence[Window], noise: Tensor, schedule: Schedule) -> None:
        """Prepare one pipeline call.

        initial: [B, S, C] fp32 noise, the same values that the pipeline is given as latents. windows: one for
        each sample, all of one size W (0: ODE steps only). noise: [B, W, S, C] standard normal, for the steps
        of the windows.
        """
        sizes = {window.size for window in windows}
        if len(sizes) != 1:
            raise ValueError(f"windows of different sizes in one batch: {sorted(sizes)}")
        self._sample = initial.float()
        self._noise = noise
        self.schedule = schedule
        self._starts = torch.tensor([window.start for window in windows])
        self._size = sizes.pop()
        batch = initial.shape[0]
        self._edges = initial.new_empty((batch, self._size + 1, *initial.shape[1:]), dtype=torch.float32)
        self._log_probs = initial.new_empty((batch, self._size), dtype=torch.float32)

    def step(
        self, model_output: Tensor, timestep: Tensor, sample: Tensor, return_dict: bool = True, **_: Any
    ):
        """One denoising step of the whole batch. `sample` only tells the dtype: the fp32 latents are kept
        here.
        """
        if self._noise is None:
            raise RuntimeError("RecordingScheduler.step without begin")
        if self.step_index is None:
            self._init_step_index(timestep)
        i = self.step_index
        sigma, sigma_next = self.sigmas[i], self.sigmas[i + 1]
        places = i - self._starts  # place of this step in each sample's window; outside: < 0 or >= size
        entering = places == 0
        self._edges[entering, 0] = self._sample[entering]
        inside = (places >= 0) & (places < self._size)
        if inside.all():
            self._sample = self._stochastic(
                torch.arange(len(places)), places, model_output, sigma, sigma_next
            )
        else:
            following = transition("ode", model_output, self._sample, sigma, sigma_next).next_sample
            if inside.any():
                rows = inside.nonzero().squeeze(1)
                following[rows] = self._stochastic(rows, places[rows], model_output, sigma, sigma_next)
            self._sample = following
        self._step_index += 1
        out = self._sample.to(sample.dtype)
        return (out,) if not return_dict else type("StepOutput", (), {"prev_sample": out})()

    def _stochastic(
        self, rows: Tensor, places: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor
    ) -> Tensor:
        """Draw the next latents of `rows`, which are at `places` of their windows, and record the step."""
        rows, places = rows.to(velocity.device), places.to(velocity.device)
        drawn = transition(
            self.transition_kind,
            velocity[rows],
            self._sample[rows],
            sigma,
            sigma_next,
            noise_level=self.noise_level,
            sigma_max=self.schedule.sigma_max,
            noise=self._noise[rows, places],
        )
        self._edges[rows, places + 1] = drawn.next_sample
        self._log_probs[rows, places] = drawn.log_prob
        return drawn.next_sample

    def finish(self) -> Recording:
        """What was recorded since `begin`. Raises RuntimeError where the pipeline did not take every step."""
        if self.step_index != self.schedule.num_steps:
            raise RuntimeError(f"the pipeline made {self.step_index} of {self.schedule.num_steps} steps")
        recording = Recording(self._edges, self._log_probs, self._sample)
        self._noise = None
        return recording
