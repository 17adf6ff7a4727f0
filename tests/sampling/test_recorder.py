"""The recorder, driven as a pipeline drives a scheduler, with a known velocity field instead of a model."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from omnirl_hpc.models.qwen_image.tiny import SCHEDULER
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.recorder import Recording, RecordingScheduler
from omnirl_hpc.sampling.schedule import make_schedule
from omnirl_hpc.sampling.windows import Window

STEPS, SHAPE = 6, (4, 3)
SCHEDULE = make_schedule(SCHEDULER, STEPS, 1024)


def velocity(latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    return torch.sin(latents) + timestep / 1000


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(
    windows: list[Window], kind: str = "sde", dtype: torch.dtype = torch.float32, rows: slice = slice(None)
) -> Recording:
    """One pipeline call on the samples `rows` of a fixed batch."""
    recorder = RecordingScheduler.make(SCHEDULER, kind, noise_level=0.7)
    initial = normal(len(windows), *SHAPE, seed=0)[rows]
    noise = normal(len(windows), windows[0].size, *SHAPE, seed=1)[rows]
    recorder.begin(initial, windows[rows], noise, SCHEDULE)
    recorder.set_timesteps(STEPS, device="cpu", sigmas=None, mu=0.1)
    latents = initial.to(dtype)
    for t in recorder.timesteps:
        latents = recorder.step(velocity(latents, t).to(dtype), t, latents, return_dict=False)[0]
        assert latents.dtype == dtype
    return recorder.finish()


def by_hand(row: int, windows: list[Window], kind: str) -> tuple[torch.Tensor, list[float], torch.Tensor]:
    """(edges, log-probs, final) of one sample: a plain loop over `transition`."""
    window = windows[row]
    x = normal(len(windows), *SHAPE, seed=0)[row : row + 1]
    noise = normal(len(windows), window.size, *SHAPE, seed=1)[row : row + 1]
    edges, log_probs = [], []
    for i, t in enumerate(SCHEDULE.timesteps):
        pair = SCHEDULE.sigmas[i], SCHEDULE.sigmas[i + 1]
        place = i - window.start
        if place == 0:
            edges.append(x)
        if 0 <= place < window.size:
            step = transition(
                kind,
                velocity(x, t),
                x,
                *pair,
                noise_level=0.7,
                sigma_max=SCHEDULE.sigma_max,
                noise=noise[:, place],
            )
            edges.append(step.next_sample)
            log_probs.append(float(step.log_prob))
        else:
            step = transition("ode", velocity(x, t), x, *pair)
        x = step.next_sample
    return torch.cat(edges), log_probs, x[0]


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
@pytest.mark.parametrize("starts", [(0, 0, 0), (3, 3, 3), (0, 1, 3)])
def test_records_what_a_plain_loop_computes(kind, starts):
    windows = [Window(start, 2) for start in starts]
    got = run(windows, kind)
    for row in range(len(windows)):
        edges, log_probs, final = by_hand(row, windows, kind)
        torch.testing.assert_close(got.latents[row], edges, rtol=1e-6, atol=1e-6)
        assert got.log_probs[row].tolist() == pytest.approx(log_probs, abs=1e-6)
        torch.testing.assert_close(got.final[row], final, rtol=1e-6, atol=1e-6)


def test_a_window_over_every_step_but_the_last():
    got = run([Window(0, STEPS - 1)] * 2)
    assert got.latents.shape == (2, STEPS, *SHAPE) and got.log_probs.shape == (2, STEPS - 1)
    assert torch.equal(got.latents[:, 0], normal(2, *SHAPE, seed=0))


@pytest.mark.parametrize("starts", [(0, 0), (2, 2), (0, 3)])
def test_a_window_of_no_steps_has_one_edge(starts, monkeypatch):
    """The latents that it starts from, and no log-probabilities: an evaluation's samples are made like this.

    New memory is full of NaN here, as it may be anywhere: nothing of it may be returned.
    """
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **kw: self.new_full(*a, torch.nan, **kw))
    windows = [Window(start, 0) for start in starts]
    got = run(windows)
    assert got.log_probs.shape == (2, 0)
    for row in range(2):
        edges, _, final = by_hand(row, windows, "sde")
        assert edges.shape == (1, *SHAPE)
        torch.testing.assert_close(got.latents[row], edges, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got.final[row], final, rtol=1e-6, atol=1e-6)


def test_samples_do_not_depend_on_their_neighbours():
    windows = [Window(0, 2), Window(1, 2), Window(3, 2)]
    together, alone = run(windows), run(windows, rows=slice(1, 2))
    torch.testing.assert_close(together.final[1:2], alone.final, rtol=0, atol=0)
    torch.testing.assert_close(together.log_probs[1:2], alone.log_probs, rtol=0, atol=0)


def test_latents_stay_fp32_under_a_bf16_pipeline():
    got = run([Window(1, 2)] * 2, dtype=torch.bfloat16)
    assert {got.latents.dtype, got.log_probs.dtype, got.final.dtype} == {torch.float32}
    assert not torch.equal(got.final, got.final.bfloat16().float())  # no rounding between steps


def test_equals_diffusers_euler_step_outside_windows():
    # The first window starts at step 4: until then diffusers' own scheduler must give the same latents.
    got = run([Window(4, 1)])
    plain = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    plain.set_timesteps(sigmas=SCHEDULE.sigmas[:-1].tolist(), mu=0.0)
    plain.sigmas, plain.timesteps = SCHEDULE.sigmas, SCHEDULE.timesteps
    latents = normal(1, *SHAPE, seed=0)
    for t in plain.timesteps[:4]:
        latents = plain.step(velocity(latents, t), t, latents, return_dict=False)[0]
    torch.testing.assert_close(got.latents[:, 0], latents, rtol=1e-6, atol=1e-6)


def test_misuse_is_an_error():
    recorder = RecordingScheduler.make(SCHEDULER, "sde", 0.7)
    x = torch.zeros(1, *SHAPE)
    for use in (lambda: recorder.set_timesteps(STEPS), lambda: recorder.step(x, torch.tensor(1.0), x)):
        with pytest.raises(RuntimeError, match="without begin"):
            use()
    recorder.begin(x, [Window(0, 1)], torch.zeros(1, 1, *SHAPE), SCHEDULE)
    with pytest.raises(ValueError, match="asks for 7 steps, the schedule has 6"):
        recorder.set_timesteps(7)
    with pytest.raises(ValueError, match="asks for 2 steps, the schedule has 6"):
        recorder.set_timesteps(sigmas=[1.0, 0.5])
    recorder.set_timesteps(STEPS)
    with pytest.raises(ValueError, match=r"different sizes in one batch: \[1, 2\]"):
        recorder.begin(
            torch.zeros(2, *SHAPE), [Window(0, 1), Window(0, 2)], torch.zeros(2, 2, *SHAPE), SCHEDULE
        )
    recorder.begin(x, [Window(0, 1)], torch.zeros(1, 1, *SHAPE), SCHEDULE)
    recorder.step(x, recorder.timesteps[0], x)
    with pytest.raises(RuntimeError, match="made 1 of 6 steps"):
        recorder.finish()


def test_what_was_begun_ends_with_finish():
    """A pipeline that is called again without `begin` would draw the last call's noise once more."""
    recorder = RecordingScheduler.make(SCHEDULER, "sde", 0.7)
    x = torch.zeros(1, *SHAPE)
    recorder.begin(x, [Window(0, 1)], torch.zeros(1, 1, *SHAPE), SCHEDULE)
    recorder.set_timesteps(STEPS)
    for t in recorder.timesteps:
        recorder.step(x, t, x)
    recorder.finish()
    recorder.set_timesteps(STEPS)
    with pytest.raises(RuntimeError, match="without begin"):
        recorder.step(x, recorder.timesteps[0], x)
