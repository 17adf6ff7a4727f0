"""A family and rewards from outside of the package, each in one file, in a run on two ranks."""

from __future__ import annotations

import wave

import pytest
from PIL import Image

from tests.runs.program import Program, compare, lines
from tests.toy_family import FRAMES, write_toy

pytestmark = pytest.mark.slow

REWARDS = {
    "QuietAndDark": "tests.toy_reward",
    "CalmLatents": "tests.toy_reward_in_thread",
    "ManyLetters": "tests.toy_reward_of_text",
    "Blend": "tests.toy_reward_on_device",
}
TOYS = (
    "model=tests.toy_family:Toy",
    f"reward=[{','.join(f'{module}:{name}' for name, module in REWARDS.items())}]",
    "determinism=strict",
)


def test_a_video_with_its_sound_is_trained(tiny_prompts, tmp_path):
    """Both streams are learned from, engine and actor agree to the bit, samples can be watched and heard, and
    the run can be made again.
    """
    write_toy(tmp_path / "model")
    program = Program(tmp_path / "model", tiny_prompts, tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    for run in (first, second):
        program.finish(run, *TOYS, "steps=2", "algorithm.kl_coef=0.1")
    code, said = compare(first, second)
    assert code == 0, said
    steps = lines(first / "metrics.jsonl")
    assert [step["ratio/first_update_max_abs_log"] for step in steps] == [0, 0]
    assert {step["sync/bound"] for step in steps} == {4}  # two layers in two blocks
    assert all(step["grad_norm"] > 0 and step["reward/std"] > 0 for step in steps)
    for step in steps:
        assert step["reward/mean"] == pytest.approx(sum(step[f"reward/{name}/mean"] for name in REWARDS))
        red, blue = (step[f"reward/Blend/{colour}/mean"] for colour in ("red", "blue"))
        assert step["reward/Blend/mean"] == pytest.approx(red - blue) and red > 0 < blue
        assert 0 < step["reward/ManyLetters/mean"] < 1 and step["reward/CalmLatents/mean"] < 0
        assert {"memory/reward_peak", "memory/rollout_peak", "memory/actor_peak"} <= step.keys()
    sample = first / "samples" / lines(first / "samples" / "index.jsonl")[0]["file"]
    with Image.open(sample) as video, wave.open(str(sample.with_suffix(".wav"))) as sound:
        assert video.n_frames == FRAMES and video.size == (16, 16)
        assert sound.getframerate() == 8000 and sound.getnframes() == 40
