"""The real vLLM-Omni engine on the CPU, in fp32, against diffusers with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omnirl_hpc.rollout.vllm_omni.importing import CHANGED_BY_IMPORT
from tests.helpers import run_ranks
from tests.rollout.vllm_omni import engine_cases

MODULES = 24  # 12 targets in each of the tiny model's 2 blocks


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank found; see engine_cases.alone."""
    (found,) = run_ranks(
        1, engine_cases.alone, tiny_model, tiny_prompts, tmp_path_factory.mktemp("alone"), deadline=300
    )
    return found


def test_the_process_stays_ours(alone):
    assert alone["changed"] <= CHANGED_BY_IMPORT
    assert alone["process is as it was"]
    assert alone["default group works"] == 1


def test_base_trajectories_are_those_of_diffusers_to_the_bit(alone):
    assert alone["embeddings equal"]
    assert alone["base equal"]
    assert alone["base requires grad"]  # no tensor of inference mode leaves the engine


def test_a_sample_is_the_same_alone_and_among_prompts_of_other_lengths(alone):
    assert alone["alone and in a batch"] <= 1e-6


@pytest.mark.parametrize("mode", ["adapter", "merged"])
class TestLora:
    def test_it_is_diffusers_with_peft(self, alone, mode):
        assert alone[f"{mode} modules"] == MODULES
        assert alone[f"{mode} distance"] <= 1e-5
        assert alone[f"{mode} second distance"] <= 1e-5

    def test_new_weights_change_images_and_old_ones_bring_them_back(self, alone, mode):
        assert alone[f"{mode} moved"] > 1e-2
        assert alone[f"{mode} old weights again equal"]

    def test_sleep_and_wake_change_nothing(self, alone, mode):
        assert alone[f"{mode} woken equal"]
        assert len(alone[f"{mode} asleep"]) == 4
        assert all("EngineError: the rollout engine is asleep" in error for error in alone[f"{mode} asleep"])

    def test_a_module_that_the_engine_lacks_is_an_error_naming_it(self, alone, mode):
        assert "img_mlp.nothing" in alone[f"{mode} bad target"]
        assert "the actor trains 24 modules, the engine has bound 22" in alone[f"{mode} bad target"]

    def test_what_is_not_trained_is_the_base_again(self, alone, mode):
        """A part of a fused layer, and a whole layer, in each of the two blocks."""
        assert alone[f"{mode} fewer modules"] == MODULES - 4
        assert alone[f"{mode} fewer distance"] <= 1e-5

    def test_the_actors_tensors_are_not_changed(self, alone, mode):
        assert alone[f"{mode} sent tensors untouched"]


TWO_RANKS = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "lora": "merged"},
    {"ulysses_degree": 2},
    {"cfg_parallel_size": 2},
    {"cfg_parallel_size": 2, "lora": "merged"},
]
FOUR_RANKS = [{"tensor_parallel_size": 2}, {"ulysses_degree": 2, "lora": "merged"}]


@pytest.mark.parametrize(("ranks", "settings"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_replicas_of_several_ranks(
    ranks: int, settings, tiny_model: Path, tiny_prompts: Path, tmp_path: Path
):
    found = run_ranks(
        ranks, engine_cases.parallel, tiny_model, tiny_prompts, tmp_path, settings, deadline=300
    )
    for case, setting in enumerate(settings):
        for rank in range(ranks):
            result = found[rank][case]
            assert result["distance"] <= 1e-5, (setting, rank)
            assert result["lora distance"] <= 1e-5, (setting, rank)
            assert result["modules"] == MODULES, (setting, rank)
            assert result["woken equal"], (setting, rank)
            for field in ("latents", "log_probs"):  # the ranks of a replica must agree to the bit
                assert torch.equal(result[field], found[rank // 2 * 2][case][field]), (setting, rank, field)
    assert all(results[-1]["ranks kept"] for results in found)
