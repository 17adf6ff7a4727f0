"""vLLM-Omni's pipeline of Stable Diffusion 3.5 on the CPU, in fp32, against diffusers with PEFT, and in a
run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from omnirl_hpc.models.stable_diffusion_3.tiny import write_tiny
from tests.helpers import run_ranks
from tests.rollout.vllm_omni.family_cases import engines_side_by_side
from tests.runs.program import Program, lines

MODULES = 31  # as in tests/runs/test_stable_diffusion_3.py
# A matrix product of another batch size may round otherwise.
ONE_SHAPE = ("rollout.micro_batch_size=2", "actor.micro_batch_size=2")
SETTINGS = ("model=stable_diffusion_3", "model.height=32", "model.width=48")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3") / "tiny"
    write_tiny(folder)
    return folder


@pytest.mark.parametrize("lora", ["adapter", "merged"])
def test_both_engines_compute_the_same_with_and_without_an_adapter(model, tiny_prompts, tmp_path, lora):
    (found,) = run_ranks(1, engines_side_by_side, model, tiny_prompts, tmp_path, SETTINGS, lora, deadline=300)
    assert found["bound"] == MODULES
    assert found["conditions equal"]
    assert found["base"] <= 1e-5
    assert found["adapted"] <= 1e-5 and found["moved"] > 1e-2


def test_it_trains_on_two_ranks(model, tiny_prompts, tmp_path):
    program = Program(model, tiny_prompts, tmp_path)
    program.finish(tmp_path / "run", *SETTINGS, *ONE_SHAPE, "rollout=vllm_omni", "steps=2")
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    # One unit in the last place: the engine multiplies by queries, keys and values at once
    assert all(step["ratio/first_update_max_abs_log"] <= 2.5e-7 for step in steps)
    assert {step["sync/bound"] for step in steps} == {MODULES}
