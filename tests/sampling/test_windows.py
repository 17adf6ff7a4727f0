"""Windows stay inside their limits, are uniform, and are shared as `window.per` says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnirl_hpc.config.schema import SamplingConfig, WindowConfig
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.windows import Window, compressed, draw_window


def sampling(steps: int = 10, **window) -> SamplingConfig:
    return SamplingConfig(num_inference_steps=steps, window=WindowConfig(**window))


@given(st.data(), st.integers(2, 50), st.integers(0, 100), st.integers(0, 1000))
def test_window_stays_inside_its_limits(data, steps, seed, step):
    last = data.draw(st.integers(1, steps - 1))
    first = data.draw(st.integers(0, last - 1))
    size = data.draw(st.integers(1, last - first))
    window = draw_window(sampling(steps, size=size, first=first, last=last), seed, step, "a", 0)
    assert window.size == size
    assert first <= window.start and window.start + size <= last


def test_every_place_is_drawn_about_equally_often():
    # [0, 5) holds 4 windows of 2. 4000 draws: mean 1000, standard deviation sqrt(4000 x 1/4 x 3/4) = 27; 5 of
    # them are allowed.
    starts = Counter(
        draw_window(sampling(size=2, first=0, last=5), 0, step, "a", 0).start for step in range(4000)
    )
    assert sorted(starts) == [0, 1, 2, 3]
    assert all(abs(count - 1000) < 5 * 27 for count in starts.values())


def test_null_means_every_step_but_the_last():
    assert draw_window(sampling(10, size=None, first=0, last=None), 0, 0, "a", 0) == Window(0, 9)
    assert draw_window(sampling(10, size=None, first=3, last=7), 0, 0, "a", 0) == Window(3, 4)


@pytest.mark.parametrize(
    ("per", "varies_by_prompt", "varies_by_sample"),
    [("step", False, False), ("prompt", True, False), ("sample", True, True)],
)
def test_what_shares_a_draw(per, varies_by_prompt, varies_by_sample):
    config = sampling(50, size=2, first=0, last=49, per=per)

    def draw(**identity) -> int:
        usual = {"seed": 0, "step": 0, "prompt_id": "a", "sample": 0}
        return draw_window(config, **(usual | identity)).start

    assert (len({draw(prompt_id=str(i)) for i in range(20)}) > 1) == varies_by_prompt
    assert (len({draw(sample=i) for i in range(20)}) > 1) == varies_by_sample
    assert len({draw(step=i) for i in range(20)}) > 1
    assert len({draw(seed=i) for i in range(20)}) > 1


def test_fewer_steps_after_a_window_are_at_even_distances():
    """Four steps after step 2 become two, at the places 2, 4 and 6 of the schedule; what comes before
    stays.
    """
    sigmas = torch.tensor([1.0, 0.9, 0.7, 0.6, 0.4, 0.3, 0.0])
    schedules = {"a": Schedule(sigmas, 1000 * sigmas[:-1])}
    made = compressed(schedules, Window(1, 1, compress=0.5))["a"]
    assert made.sigmas.tolist() == pytest.approx([1.0, 0.9, 0.7, 0.4, 0.0])
    assert made.timesteps.tolist() == pytest.approx([1000, 900, 700, 400])
    three = compressed(schedules, Window(1, 1, compress=0.75))["a"]  # places 2, 3 1/3, 4 2/3, 6
    assert three.sigmas.tolist() == pytest.approx([1.0, 0.9, 0.7, 0.6 - 0.2 / 3, 0.4 - 0.2 / 3, 0.0])
    assert compressed(schedules, Window(1, 1, compress=0.01))["a"].num_steps == 3  # one is left
    assert compressed(schedules, Window(1, 1)) is schedules
    assert compressed(schedules, Window(0, 0, compress=0.5)) is schedules


def test_a_window_knows_what_follows_it():
    drawn = draw_window(sampling(10, size=2, solver="dpm2", compress=0.4), 0, 0, "a", 0)
    assert (drawn.solver, drawn.compress) == ("dpm2", 0.4)
