"""A family and rewards from outside of the package, each in one file, in a run on two ranks."""

from __future__ import annotations

import wave

import pytest
from PIL import Image

from omnirl_hpc.checkpoints.adapters import load_adapter
from tests.runs.program import Program, assert_same_run, compare, lines
from tests.toy_experts import write_toy_experts
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


def test_networks_that_take_turns_are_trained_and_saved_together(tiny_prompts, tmp_path):
    """The window lies on both sides of the boundary; a run that was stopped goes on as if it had not been."""
    write_toy_experts(tmp_path / "model")
    program = Program(tmp_path / "model", tiny_prompts, tmp_path)
    settings = (
        "model=tests.toy_experts:ToyExperts",
        "reward=tests.toy_reward:QuietAndDark",
        "determinism=strict",
        "sampling.window.size=2",
        "logging.samples_every=0",
    )
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    program.finish(straight, *settings, "steps=2")
    for steps in (1, 2):
        program.finish(stopped, *settings, f"steps={steps}")
    assert_same_run(stopped, straight)
    for step in lines(straight / "metrics.jsonl"):
        assert step["ratio/first_update_max_abs_log"] == 0 and step["sync/bound"] == 8
    adapter = load_adapter(straight / "checkpoints/step_000002/adapter")
    moved = {name for name, tensor in adapter.items() if ".lora_B." in name and tensor.any()}
    assert len(moved) == 8 and sum(name.startswith("transformer_2.") for name in moved) == 4
