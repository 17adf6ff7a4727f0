"""Algorithms with the vLLM-Omni engine, on two ranks: stopped and resumed a run is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.program import lines
from tests.runs.test_algorithms import assert_resumed, make_runs

RECIPES = ("flowgrpo_glyph", "diffusionnft_glyph", "onlinedpo_glyph")


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("algorithms")
    make_runs(folder, tiny_model, tiny_prompts, RECIPES, "rollout=vllm_omni", "rollout.dtype=float32")
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_and_resumes(runs: Path, recipe: str):
    assert_resumed(runs / recipe)
    assert {step["sync/bound"] for step in lines(runs / recipe / "straight" / "metrics.jsonl")} == {24}
