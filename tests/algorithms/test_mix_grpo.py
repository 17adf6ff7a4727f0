"""Where MixGRPO's window is at each training step."""

from __future__ import annotations

from collections import Counter

import pytest

from omnirl_hpc.algorithms.mix_grpo import MixGRPO, MixGRPOConfig
from omnirl_hpc.config.schema import Config, SamplingConfig, WindowConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.sampling.windows import draw_window


def make(
    steps: int = 10, size: int | None = 2, first: int = 0, last: int | None = 6, seed: int = 0, **settings
):
    window = WindowConfig(size=size, first=first, last=last, solver="dpm2", compress=0.4)
    sampling = SamplingConfig(num_inference_steps=steps, window=window)
    return MixGRPO(Config(seed=seed, sampling=sampling, algorithm=MixGRPOConfig(**settings)))


def starts(algorithm: MixGRPO, steps: int) -> list[int]:
    return [algorithm.window(step).first for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 5 places of 2 steps in [0, 6), 3 training steps at each
        ({"iterations": 3}, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 0, 0, 0, 1]),
        ({"iterations": 3, "wrap": False}, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4]),
        # the whole window at a time: places 0, 2, 4
        ({"iterations": 2, "stride": 2}, [0, 0, 2, 2, 4, 4, 0, 0, 2]),
        ({"iterations": 2, "stride": 2, "wrap": False}, [0, 0, 2, 2, 4, 4, 4, 4, 4]),
        # a stride that does not reach the last place: 0 and 3
        ({"iterations": 1, "stride": 3}, [0, 3, 0, 3]),
        ({"iterations": 1, "stride": 9}, [0, 0, 0]),
    ],
)
def test_progressive(settings, expected):
    assert starts(make(**settings), len(expected)) == expected


def test_it_stays_between_first_and_last():
    assert starts(make(first=3, last=6, iterations=1), 4) == [3, 4, 3, 4]
    whole = make(steps=5, size=None, first=1, last=None, iterations=1)  # every step but the last: one place
    assert [whole.window(step).last for step in range(3)] == [4, 4, 4] and starts(whole, 3) == [1, 1, 1]


def test_random_is_the_same_for_all_samples_and_ranks_and_uniform():
    """A function of run seed and step alone."""
    drawn = starts(make(order="random"), 2000)
    assert drawn == starts(make(order="random"), 2000) != starts(make(order="random", seed=1), 2000)
    # 5 places: mean 400, standard deviation sqrt(2000 x 1/5 x 4/5) = 18; 5 of them are allowed
    counts = Counter(drawn)
    assert sorted(counts) == [0, 1, 2, 3, 4] and all(abs(count - 400) < 90 for count in counts.values())


def test_samples_are_drawn_where_it_says():
    """With what follows the window, whatever the sample."""
    algorithm = make(iterations=3)
    for step in (0, 4, 14):
        sampling = SamplingConfig(num_inference_steps=10, window=algorithm.window(step))
        places = {draw_window(sampling, 0, step, prompt, sample) for prompt in "ab" for sample in range(3)}
        assert {(p.start, p.size, p.solver, p.compress) for p in places} == {(step // 3, 2, "dpm2", 0.4)}
    assert algorithm.points_per_unit == 2


def test_windows_of_their_own_are_refused():
    sampling = SamplingConfig(window=WindowConfig(per="sample"))
    with pytest.raises(ConfigError, match="sampling.window.per=sample is not for .*: set it to step"):
        MixGRPO(Config(sampling=sampling, algorithm=MixGRPOConfig()))


@pytest.mark.parametrize(("key", "value"), [("order", "backwards"), ("iterations", 0), ("stride", 0)])
def test_settings_check_themselves(key, value):
    with pytest.raises(ConfigError, match=f"^algorithm.{key}={value} "):
        MixGRPOConfig(**{key: value})
