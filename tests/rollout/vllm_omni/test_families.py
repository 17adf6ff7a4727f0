"""vLLM-Omni's pipelines of all families on the CPU, in fp32, against diffusers with PEFT, and in a run.
Qwen-Image is what test_engine.py and test_train.py are about.
"""

from __future__ import annotations

import pytest

from tests.helpers import run_ranks
from tests.models.families import FAMILIES, FamilyCase
from tests.rollout.vllm_omni.family_cases import engines_side_by_side
from tests.runs.program import Program, lines

# A matrix product of another batch size may round otherwise.
ONE_SHAPE = ("rollout.micro_batch_size=2", "actor.micro_batch_size=2")


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name != "qwen_image"])
def case(request, tmp_path_factory) -> FamilyCase:
    return FamilyCase.make(request.param, tmp_path_factory.mktemp(request.param) / "tiny")


def test_both_engines_compute_the_same_with_and_without_an_adapter(case: FamilyCase, tiny_prompts, tmp_path):
    (found,) = run_ranks(
        1, engines_side_by_side, case.checkpoint, tiny_prompts, tmp_path, case.settings, deadline=300
    )
    assert found.keys() == {"adapter", "merged"}
    for lora in found.values():
        assert lora["bound"] == case.facts.adapted
        assert lora["conditions"] <= 1e-6
        assert lora["base"] <= 5e-6  # of latents, after four steps
        assert lora["adapted"] <= 1e-5 and lora["moved"] > 1e-2


def test_it_trains_on_two_ranks(case: FamilyCase, tiny_prompts, tmp_path):
    program = Program(case.checkpoint, tiny_prompts, tmp_path)
    program.finish(tmp_path / "run", *case.settings, *ONE_SHAPE, "rollout=vllm_omni", "steps=2")
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    # Some units in the last place: the engine multiplies by queries, keys and values at once
    assert all(step["ratio/first_update_max_abs_log"] <= case.facts.engine_gap for step in steps)
    assert {step["sync/bound"] for step in steps} == {case.facts.adapted}
