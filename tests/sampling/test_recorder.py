"""The recorder, driven as pipelines drive it, with a known velocity field instead of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from omnirl_hpc.models.qwen_image.tiny import SCHEDULER
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.recorder import Recorder, Recording
from omnirl_hpc.sampling.schedule import Schedule, make_schedule
from omnirl_hpc.sampling.scheduler_face import SchedulerFace
from omnirl_hpc.sampling.streams import LATENTS, Streams
from omnirl_hpc.sampling.transitions import second_order
from omnirl_hpc.sampling.windows import Window

STEPS, SHAPE = 6, (4, 3)
SCHEDULE = make_schedule(SCHEDULER, STEPS, 1024)


def velocity(latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    return torch.sin(latents) + timestep / 1000


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one(tensor: torch.Tensor) -> Streams:
    return {LATENTS: tensor}


def run(
    windows: list[Window], kind: str = "sde", dtype: torch.dtype = torch.float32, rows: slice = slice(None)
) -> Recording:
    """One pipeline call on the samples `rows` of a fixed batch."""
    recorder = Recorder(kind, noise_level=0.7)
    face = SchedulerFace(recorder, SCHEDULER)
    initial = normal(len(windows), *SHAPE, seed=0)[rows]
    noise = normal(len(windows), windows[0].size, *SHAPE, seed=1)[rows]
    recorder.begin(one(initial), windows[rows], one(noise), one(SCHEDULE))
    face.set_timesteps(STEPS, device="cpu", sigmas=None, mu=0.1)
    face.set_begin_index(0)
    latents = initial.to(dtype)
    for t in face.timesteps:
        latents = face.step(velocity(latents, t).to(dtype), t, latents, return_dict=False)[0]
        assert latents.dtype == dtype
    return recorder.finish()


def by_hand(
    row: int, windows: list[Window], kind: str, schedule: Schedule = SCHEDULE, shape=SHAPE, seed: int = 0
) -> tuple[torch.Tensor, list[float], torch.Tensor]:
    """(edges, log-probs, final) of one sample: a plain loop over `transition`."""
    window = windows[row]
    x = normal(len(windows), *shape, seed=seed)[row : row + 1]
    noise = normal(len(windows), window.size, *shape, seed=seed + 1)[row : row + 1]
    edges, log_probs = [], []
    for i, t in enumerate(schedule.timesteps):
        pair = schedule.sigmas[i], schedule.sigmas[i + 1]
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
                sigma_max=schedule.sigma_max,
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
        torch.testing.assert_close(got.latents[LATENTS][row], edges, rtol=1e-6, atol=1e-6)
        assert got.log_probs[row].tolist() == pytest.approx(log_probs, abs=1e-6)
        torch.testing.assert_close(got.final[LATENTS][row], final, rtol=1e-6, atol=1e-6)


def test_two_streams_have_schedules_of_their_own_and_one_log_probability():
    """Driven as a family's own loop drives it, and by a scheduler and its copy: the same. A log-probability
    is the mean over the elements of both streams.
    """
    windows = [Window(0, 2), Window(2, 2)]
    shapes = {"video": (4, 3), "audio": (2, 2)}
    schedules = {"video": SCHEDULE, "audio": make_schedule({"shift": 3.0}, STEPS, 16)}
    seeds = {"video": 0, "audio": 10}
    initial = {name: normal(2, *shape, seed=seeds[name]) for name, shape in shapes.items()}
    noise = {name: normal(2, 2, *shape, seed=seeds[name] + 1) for name, shape in shapes.items()}

    def own_loop(recorder: Recorder) -> None:
        latents = dict(initial)
        for i in range(STEPS):
            for name in shapes:
                v = velocity(latents[name], recorder.schedule(name).timesteps[i])
                latents[name] = recorder.advance(name, v)

    def schedulers(recorder: Recorder) -> None:
        video = SchedulerFace(recorder, SCHEDULER, recorder.streams)
        faces = {"video": video, "audio": copy.deepcopy(video)}
        latents = dict(initial)
        for face in faces.values():
            face.set_timesteps(STEPS)
        for i in range(STEPS):
            for name, face in faces.items():
                v = velocity(latents[name], face.timesteps[i])
                latents[name] = face.step(v, face.timesteps[i], latents[name]).prev_sample

    made = []
    for drive in (own_loop, schedulers):
        recorder = Recorder("sde", noise_level=0.7)
        recorder.begin(initial, windows, noise, schedules)
        drive(recorder)
        made.append(recorder.finish())
    for name in shapes:
        assert torch.equal(made[0].latents[name], made[1].latents[name])
    assert torch.equal(made[0].log_probs, made[1].log_probs)
    for row in range(2):
        parts = {
            name: by_hand(row, windows, "sde", schedules[name], shape, seeds[name])
            for name, shape in shapes.items()
        }
        for name, (edges, _, final) in parts.items():
            torch.testing.assert_close(made[0].latents[name][row], edges, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(made[0].final[name][row], final, rtol=1e-6, atol=1e-6)
        expected = [(12 * v + 4 * a) / 16 for v, a in zip(parts["video"][1], parts["audio"][1])]
        assert made[0].log_probs[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_copy_beyond_the_streams_is_an_error():
    face = SchedulerFace(Recorder("sde", 0.7), SCHEDULER)
    with pytest.raises(RuntimeError, match="more streams than latents"):
        copy.deepcopy(face)


def test_a_window_over_every_step_but_the_last():
    got = run([Window(0, STEPS - 1)] * 2)
    assert got.latents[LATENTS].shape == (2, STEPS, *SHAPE) and got.log_probs.shape == (2, STEPS - 1)
    assert torch.equal(got.latents[LATENTS][:, 0], normal(2, *SHAPE, seed=0))


def test_without_a_window_only_the_end_is_recorded():
    got = run([Window(0, 0)] * 2)
    assert got.latents[LATENTS].shape == (2, 0, *SHAPE) and got.log_probs.shape == (2, 0)
    x = normal(2, *SHAPE, seed=0)
    for i, t in enumerate(SCHEDULE.timesteps):
        x = x + velocity(x, t) * (SCHEDULE.sigmas[i + 1] - SCHEDULE.sigmas[i])
    torch.testing.assert_close(got.final[LATENTS], x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("starts", [(0, 0), (2, 2), (0, 3)])
def test_a_window_of_no_steps_has_the_end_alone(starts, monkeypatch):
    """No edges and no log-probabilities: an evaluation's samples are made like this.

    New memory is full of NaN here, as it may be anywhere: nothing of it may be returned.
    """
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **kw: self.new_full(*a, torch.nan, **kw))
    windows = [Window(start, 0) for start in starts]
    got = run(windows)
    assert got.log_probs.shape == (2, 0) and got.latents[LATENTS].shape == (2, 0, *SHAPE)
    for row in range(2):
        final = by_hand(row, windows, "sde")[2]
        torch.testing.assert_close(got.final[LATENTS][row], final, rtol=1e-6, atol=1e-6)


def test_samples_do_not_depend_on_their_neighbours():
    windows = [Window(0, 2), Window(1, 2), Window(3, 2)]
    together, alone = run(windows), run(windows, rows=slice(1, 2))
    torch.testing.assert_close(together.final[LATENTS][1:2], alone.final[LATENTS], rtol=0, atol=0)
    torch.testing.assert_close(together.log_probs[1:2], alone.log_probs, rtol=0, atol=0)


def test_latents_stay_fp32_under_a_bf16_pipeline():
    got = run([Window(1, 2)] * 2, dtype=torch.bfloat16)
    final = got.final[LATENTS]
    assert {got.latents[LATENTS].dtype, got.log_probs.dtype, final.dtype} == {torch.float32}
    assert not torch.equal(final, final.bfloat16().float())  # no rounding between steps


def test_equals_diffusers_euler_step_outside_windows():
    # The first window starts at step 4: until then diffusers' own scheduler must give the same latents.
    got = run([Window(4, 1)])
    plain = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    plain.set_timesteps(sigmas=SCHEDULE.sigmas[:-1].tolist(), mu=0.0)
    plain.sigmas, plain.timesteps = SCHEDULE.sigmas, SCHEDULE.timesteps
    latents = normal(1, *SHAPE, seed=0)
    for t in plain.timesteps[:4]:
        latents = plain.step(velocity(latents, t), t, latents, return_dict=False)[0]
    torch.testing.assert_close(got.latents[LATENTS][:, 0], latents, rtol=1e-6, atol=1e-6)


def test_misuse_is_an_error():
    recorder = Recorder("sde", 0.7)
    face = SchedulerFace(recorder, SCHEDULER)
    x = torch.zeros(1, *SHAPE)
    for use in (lambda: face.set_timesteps(STEPS), lambda: face.step(x, torch.tensor(1.0), x)):
        with pytest.raises(RuntimeError, match="latents was not begun"):
            use()
    noise = one(torch.zeros(1, 1, *SHAPE))
    recorder.begin(one(x), [Window(0, 1)], noise, one(SCHEDULE))
    with pytest.raises(ValueError, match="asks for 7 steps, the schedule has 6"):
        face.set_timesteps(7)
    with pytest.raises(ValueError, match="asks for 2 steps, the schedule has 6"):
        face.set_timesteps(sigmas=[1.0, 0.5])
    with pytest.raises(ValueError, match="begins at step 2"):
        face.set_begin_index(2)
    with pytest.raises(ValueError, match=r"different sizes in one batch: \[1, 2\]"):
        recorder.begin(one(torch.zeros(2, *SHAPE)), [Window(0, 1), Window(0, 2)], noise, one(SCHEDULE))
    with pytest.raises(ValueError, match="a window ends after step 7"):
        recorder.begin(one(x), [Window(6, 1)], noise, one(SCHEDULE))
    recorder.begin(one(x), [Window(0, 1)], noise, one(SCHEDULE))
    recorder.advance(LATENTS, x)
    with pytest.raises(RuntimeError, match="made 1 of 6 steps of latents"):
        recorder.finish()


def test_what_was_begun_ends_with_finish():
    """A pipeline that is called again without `begin` would draw the last call's noise once more."""
    recorder, x = Recorder("sde", 0.7), torch.zeros(1, *SHAPE)
    recorder.begin(one(x), [Window(0, 1)], one(torch.zeros(1, 1, *SHAPE)), one(SCHEDULE))
    for _ in range(STEPS):
        recorder.advance(LATENTS, x)
    recorder.finish()
    with pytest.raises(RuntimeError, match="latents was not begun"):
        recorder.advance(LATENTS, x)


def dpm_solver(x: torch.Tensor, first: int) -> torch.Tensor:
    """diffusers' DPM-Solver++ on the schedule's steps from `first` on, in its own notation: alpha = 1 -
    sigma.
    """
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(STEPS)
    scheduler.sigmas = SCHEDULE.sigmas.clone()
    scheduler.timesteps = SCHEDULE.timesteps.clone()
    scheduler.set_begin_index(first)
    for t in SCHEDULE.timesteps[first:]:
        x = scheduler.step(velocity(x, t), t, x).prev_sample
    return x


def test_steps_of_second_order_after_a_window_are_dpm_solvers():
    """The formula of the paper in a loop; the first of them reads the estimate of the window's last step."""
    windows = [Window(1, 1, "dpm2")] * 3
    got, euler = run(windows), run([Window(1, 1)] * 3)
    for name in ("latents", "log_probs"):
        mine, theirs = getattr(got, name), getattr(euler, name)
        assert torch.equal(*(x if isinstance(x, torch.Tensor) else x[LATENTS] for x in (mine, theirs)))
    edges = got.latents[LATENTS]  # before and after step 1
    x, before = edges[:, 1], edges[:, 0] - SCHEDULE.sigmas[1] * velocity(edges[:, 0], SCHEDULE.timesteps[1])
    for i in range(2, STEPS):
        s0, s1, s2 = (float(s) for s in SCHEDULE.sigmas[i - 1 : i + 2])
        x0 = x - s1 * velocity(x, SCHEDULE.timesteps[i])
        if s2 == 0:
            x = x0
            break
        l0, l1, l2 = (torch.log(torch.tensor((1 - s) / s, dtype=torch.float64)) for s in (s0, s1, s2))
        slope = (x0 - before) / float((l1 - l0) / (l2 - l1))  # the first difference, midpoint form
        x = s2 / s1 * x - (1 - s2) * float(torch.expm1(-(l2 - l1))) * (x0 + 0.5 * slope)
        before = x0
    torch.testing.assert_close(got.final[LATENTS], x, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got.final[LATENTS], euler.final[LATENTS], atol=1e-4)


def test_second_order_agrees_with_diffusers_from_the_second_step_on():
    """Whose first step has no step before, and is of first order, as is its last."""
    x = normal(2, *SHAPE, seed=3)
    ours, before = x, None
    for i in range(2, STEPS):
        s, after = SCHEDULE.sigmas[i], SCHEDULE.sigmas[i + 1]
        v = velocity(ours, SCHEDULE.timesteps[i])
        clean, following = ours - s * v, ours + (after - s) * v
        if before is not None:
            following = following + second_order(clean, before, SCHEDULE.sigmas[i - 1], s, after)
        ours, before = following, clean
    torch.testing.assert_close(ours, dpm_solver(x, 2), rtol=1e-4, atol=1e-5)


def test_rows_inside_before_and_after_their_windows_keep_apart():
    """Windows at different places in one batch: each sample is what it is alone."""
    windows = [Window(0, 2, "dpm2"), Window(3, 2, "dpm2"), Window(1, 2, "dpm2")]
    together = run(windows)
    for row in range(3):
        alone = run(windows, rows=slice(row, row + 1))
        assert torch.equal(together.final[LATENTS][row], alone.final[LATENTS][0])
