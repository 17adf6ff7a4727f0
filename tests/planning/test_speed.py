"""Seconds of a plan against seconds that were measured, and what settings change them."""

from __future__ import annotations

import pytest

from omnirl_hpc.planning.estimate import find_shape, training_branches
from omnirl_hpc.planning.gpus import find_gpu
from omnirl_hpc.planning.speed import step_flops, step_seconds
from tests.planning.cases import COMPILED, EAGER, MEASURED, full_size

H200 = find_gpu("h200")


def flops(*overrides: str, ranks: int = 1) -> dict[str, float]:
    return step_flops(*full_size(*overrides, ranks=ranks), text_width=64)


@pytest.mark.parametrize(
    ("overrides", "text", "expected"),
    [
        (COMPILED, 64, {"rollout": 32 * 0.618}),
        (COMPILED, 128, {"rollout": 32 * 0.653}),
        ((*COMPILED, "rollout.lora=adapter"), 64, {"rollout": 32 * (0.836 - 0.107), "sync": 0.222}),
        (COMPILED, 256, {"old_log_prob": 64 * 0.0408, "actor": 128 * 0.1329, "swap": 2.2}),
        (EAGER, 256, {"old_log_prob": 64 * 0.0565, "actor": 128 * 0.2143}),
    ],
)
def test_one_h200_as_measured(overrides, text, expected):
    """benchmarks/results/2026-11-30_h200_*.md: 32 images a step; half of them are not in the first update."""
    config, layout = full_size(*MEASURED, *overrides)
    seconds = step_seconds(config, layout, H200, text)
    for phase, measured in expected.items():
        assert seconds[phase] == pytest.approx(measured, rel=0.15 if phase == "swap" else 0.05), phase


def test_flops_of_a_step():
    """512 images, 10 steps, two branches, a window of 2; F and B as in flops.py of shared/reference."""
    forward, attention = 15.67e12, 4 * 60 * 3072 * 1088**2
    backward = forward + 1.5 * attention
    expected = {"rollout": 512 * 10 * 2 * forward, "old_log_prob": 256 * 2 * 2 * forward}
    expected["actor"] = 512 * 2 * 2 * (2 * forward + backward)
    assert flops() == pytest.approx(expected, rel=1e-3)
    assert flops(ranks=4) == pytest.approx({phase: value / 4 for phase, value in expected.items()}, rel=1e-3)


def test_what_is_not_computed_costs_nothing():
    assert flops("algorithm.old_log_prob=rollout")["old_log_prob"] == 0
    assert flops("sampling.true_cfg_scale=1.0")["rollout"] == flops()["rollout"] / 2
    forward = 2 * flops()["old_log_prob"]  # of all samples; half of them are in the first update
    assert flops("actor.updates_per_step=1")["old_log_prob"] == 0
    assert flops("actor.activation_checkpointing=false")["actor"] == pytest.approx(flops()["actor"] - forward)
    assert flops("algorithm.kl_coef=0.1")["actor"] == pytest.approx(flops()["actor"] + forward)
    assert flops("sampling.window.size=null")["old_log_prob"] == 5 / 2 * forward / 2  # from step 0 to step 5


def test_training_all_weights_costs_a_backward_pass_of_weights():
    """As much as a forward pass without attention; and the engine has no adapter beside its weights."""
    linear = 15.67e12 - 4 * 60 * 3072 * 1088**2
    assert flops("actor.train=full")["actor"] - flops()["actor"] == pytest.approx(
        512 * 2 * 2 * linear, rel=1e-3
    )
    full, merged, beside = (
        step_seconds(*full_size(*overrides), H200)
        for overrides in (("actor.train=full", "rollout.lora=adapter"), (), ("rollout.lora=adapter",))
    )
    assert full["rollout"] == merged["rollout"] < beside["rollout"]
    assert full["sync"] == pytest.approx(40.9 / 55, rel=0.01)  # GB through a link of 55 GB/s
    assert full["swap"] - merged["swap"] == pytest.approx(
        (2 * 245 - 41 - 10) / 55, rel=0.03
    )  # both ways; LoRA: base and 2 x 5 GB


def test_resident_does_not_swap():
    assert step_seconds(*full_size("residency=resident"), H200)["swap"] == 0


def test_a_slower_gpu_takes_longer():
    slow, fast = (step_seconds(*full_size(), find_gpu(name)) for name in ("a100-80", "h200"))
    assert slow["actor"] == pytest.approx(fast["actor"] * 989 / 312)
    assert slow["swap"] == pytest.approx(fast["swap"] * 2)  # PCIe 4 and 5


def test_learning_from_a_table_neither_samples_nor_syncs():
    """Each of 16 pairs is two samples: a forward pass, its repetition and backward of the current policy, and
    a forward pass of the reference, without guidance.
    """
    overrides = ("algorithm=dpo", "data.prompts_per_step=32", "actor.micro_batch_size=2")
    config, layout = full_size(*overrides, ranks=2)
    flops, shape = step_flops(config, layout, 64), find_shape(config)
    expected = 32 * (3 * shape.forward_flops(64) + shape.lora_backward_flops(64))
    assert flops == {"actor": pytest.approx(expected)}
    assert set(step_seconds(config, layout, find_gpu("h200"), 64)) == {"actor", "swap"}
    evaluated, _ = full_size(*overrides, "evaluation.every=5", ranks=2)
    assert set(step_seconds(evaluated, layout, find_gpu("h200"), 64)) == {"actor", "swap", "sync"}


@pytest.mark.parametrize(("algorithm", "branches"), [("awm", 2), ("flow_grpo", 2), ("dpo", 1)])
def test_what_is_trained_with_guidance_counts_both_branches(algorithm, branches):
    config, _ = full_size(f"algorithm={algorithm}")
    assert training_branches(config) == branches
