"""Flow-GRPO on the tiny Stable Diffusion 3.5, on two ranks: engine and actor compute the same to the bit."""

from __future__ import annotations

import pytest

from omnirl_hpc.models.stable_diffusion_3.tiny import write_tiny
from tests.runs.program import Program, lines

pytestmark = pytest.mark.slow

# A matrix product of another batch size may round otherwise.
ONE_SHAPE = ("rollout.micro_batch_size=2", "actor.micro_batch_size=2")
MODULES = 31  # 8 targets in each of 3 blocks, 4 more in 2 of them, and no text to hand on in the last one


def test_it_trains(tiny_prompts, tmp_path):
    write_tiny(tmp_path / "model")
    program = Program(tmp_path / "model", tiny_prompts, tmp_path)
    run = tmp_path / "run"
    program.finish(
        run, "model=stable_diffusion_3", "model.height=32", "model.width=32", *ONE_SHAPE, "steps=2"
    )
    steps = lines(run / "metrics.jsonl")
    assert [step["ratio/first_update_max_abs_log"] for step in steps] == [0, 0]
    assert {step["sync/bound"] for step in steps} == {MODULES}
    assert all(step["grad_norm"] > 0 and step["ratio/max_abs_log"] > 0 for step in steps)
