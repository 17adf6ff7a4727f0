"""Makes the stochastic steps of a pipeline call and records what training needs; whoever drives it.

A pipeline tells it the velocity of each stream at each step and gets the next latents back. Schedules,
transitions and noise are ours, so that rollout and actor share them; no pipeline has to be rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, mean_over_streams
from omnirl_hpc.sampling.transitions import second_order, transition
from omnirl_hpc.sampling.windows import Window


@dataclass(frozen=True)
class Recording:
    """What a pipeline call left behind; batch first, all fp32."""

    latents: Streams  # [B, W + 1, …] at the edges of the window; [B, 0, …] where W = 0
    log_probs: Tensor  # [B, W], the mean over the elements of all streams
    final: Streams  # [B, …] clean latents


class Recorder:
    """Stochastic steps inside each sample's window, ODE steps outside, by each window's solver after it.
    `begin` before each pipeline call, `advance` for each stream at each of its steps, `finish` after the
    call.

    Latents are kept in fp32 whatever dtype the pipeline works in.
    """

    def __init__(self, transition_kind: str, noise_level: float) -> None:
        self._kind, self._noise_level = transition_kind, noise_level
        self._tracks: dict[str, _Track] = {}

    def begin(
        self,
        initial: Streams,
        windows: Sequence[Window],
        noise: Streams,
        schedules: dict[str, Schedule],
    ) -> None:
        """Prepare one pipeline call.

        initial: [B, …] fp32 noise, the same values that the pipeline is given as latents. windows: one for
        each sample, all of one size W (0: ODE steps only), inside of the schedules. noise: [B, W, …] standard
        normal, for the steps of the windows. schedules: of each stream, all with as many steps.
        """
        sizes = {window.size for window in windows}
        if len(sizes) != 1:
            raise ValueError(f"windows of different sizes in one batch: {sorted(sizes)}")
        last = max(window.start + window.size for window in windows)
        if any(last > schedule.num_steps for schedule in schedules.values()):
            raise ValueError(f"a window ends after step {last}, where the schedule has no more steps")
        starts, size = torch.tensor([window.start for window in windows]), sizes.pop()
        self._tracks = {
            name: _Track(
                self._kind,
                self._noise_level,
                initial[name],
                noise[name],
                schedule,
                starts,
                size,
                any(window.solver == "dpm2" for window in windows),
            )
            for name, schedule in schedules.items()
        }

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._tracks)

    def schedule(self, stream: str) -> Schedule:
        """Of the call that was begun."""
        return self._track(stream).schedule

    def advance(self, stream: str, velocity: Tensor) -> Tensor:
        """One denoising step of a stream for the whole batch, from its velocity [B, …] in any dtype. Returns
        the next latents [B, …] in fp32.
        """
        return self._track(stream).advance(velocity)

    def finish(self) -> Recording:
        """What was recorded since `begin`. Raises RuntimeError where the pipeline did not take every step."""
        tracks, self._tracks = self._tracks, {}
        for name, track in tracks.items():
            if track.step != track.schedule.num_steps:
                raise RuntimeError(
                    f"the pipeline made {track.step} of {track.schedule.num_steps} steps of {name}"
                )
        final = {name: track.latents for name, track in tracks.items()}
        return Recording(
            latents={name: track.edges for name, track in tracks.items()},
            log_probs=mean_over_streams({name: track.log_probs for name, track in tracks.items()}, final),
            final=final,
        )

    def _track(self, stream: str) -> _Track:
        if stream not in self._tracks:
            raise RuntimeError(f"Recorder: {stream} was not begun")
        return self._tracks[stream]


class _Track:
    """The steps of one stream in one pipeline call."""

    def __init__(
        self,
        kind: str,
        noise_level: float,
        initial: Tensor,
        noise: Tensor,
        schedule: Schedule,
        starts: Tensor,
        size: int,
        second_order_after: bool,
    ) -> None:
        self._kind, self._noise_level, self._noise = kind, noise_level, noise
        self.schedule = schedule
        self._sigmas = schedule.sigmas.to(initial.device)
        self._starts, self._size = starts, size
        self._second_order = second_order_after
        self._clean: Tensor | None = None  # what the step before took x0 to be, for steps of second order
        self.step = 0
        self.latents = initial.float()
        batch, shape = initial.shape[0], initial.shape[1:]
        edges = size + 1 if size else 0
        self.edges = initial.new_empty((batch, edges, *shape), dtype=torch.float32)
        self.log_probs = initial.new_empty((batch, size), dtype=torch.float32)

    def advance(self, velocity: Tensor) -> Tensor:
        sigma, sigma_next = self._sigmas[self.step], self._sigmas[self.step + 1]
        places = self.step - self._starts  # of this step in each sample's window; outside: < 0 or >= size
        inside = (places >= 0) & (places < self._size)
        clean = self.latents - sigma * velocity.float() if self._second_order else None
        if inside.all():
            self.latents = self._stochastic(torch.arange(len(places)), places, velocity, sigma, sigma_next)
        else:
            following = transition("ode", velocity, self.latents, sigma, sigma_next).next_sample
            if clean is not None and self._clean is not None and self._size:
                after = (places >= self._size).nonzero().squeeze(1).to(following.device)
                before = self._sigmas[self.step - 1]
                added = second_order(clean[after], self._clean[after], before, sigma, sigma_next)
                following[after] += added
            if inside.any():
                rows = inside.nonzero().squeeze(1)
                following[rows] = self._stochastic(rows, places[rows], velocity, sigma, sigma_next)
            self.latents = following
        self._clean = clean
        self.step += 1
        return self.latents

    def _stochastic(
        self, rows: Tensor, places: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor
    ) -> Tensor:
        """Draw the next latents of `rows`, which are at `places` of their windows, and record the step."""
        rows, places = rows.to(velocity.device), places.to(velocity.device)
        drawn = transition(
            self._kind,
            velocity[rows],
            self.latents[rows],
            sigma,
            sigma_next,
            noise_level=self._noise_level,
            sigma_max=self.schedule.sigma_max,
            noise=self._noise[rows, places],
        )
        self.edges[rows, places] = self.latents[rows]
        self.edges[rows, places + 1] = drawn.next_sample
        assert drawn.log_prob is not None  # only an ODE step has none
        self.log_probs[rows, places] = drawn.log_prob
        return drawn.next_sample
