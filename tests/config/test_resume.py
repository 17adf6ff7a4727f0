"""Which settings may differ when a run goes on."""

from __future__ import annotations

import fnmatch

import pytest
from omegaconf import OmegaConf

from omnirl_hpc.config.load import load_config
from omnirl_hpc.config.resume import MAY_CHANGE, check_same_run, flatten
from omnirl_hpc.errors import ConfigError

NEEDED = ("recipe=flowgrpo_tiny", "run_dir=/runs/a", "model.path=/m", "data.prompts=/p")


def settings(*overrides: str) -> str:
    return load_config([*NEEDED, *overrides]).to_yaml()


@pytest.mark.parametrize(
    "override",
    [
        "run_dir=/runs/b",
        "steps=99",
        "residency=resident",
        "timeout_seconds=5",
        "init_adapter=/x",
        "model.path=/elsewhere",
        "data.prompts=/elsewhere",
        "actor.shard_size=1",
        "actor.activation_checkpointing=true",
        "rollout.embedding_cache_size=1",
        "rollout.tensor_parallel_size=2",
        "reward.parts.jpeg_compressibility.workers=2",
        "reward.parts.jpeg_compressibility.timeout_seconds=1",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "checkpoint.asynchronous=true",
        "checkpoint.resume_step=3",
        "logging.samples_every=1",
    ],
)
def test_what_does_not_decide_results_may_change(override):
    assert settings(override) != settings()
    with pytest.raises(ConfigError) as error:  # what is named is the other setting alone
        check_same_run(settings(), settings(override, "seed=5"), "/runs/a")
    assert "with other settings: seed=5 (the run has 0). Take" in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1", "seed=1 (the run has 0)"),
        ("determinism=strict", "determinism=strict (the run has fast)"),
        ("threads_per_rank=2", "threads_per_rank=2 (the run has 1)"),
        ("model.height=32", "model.height=32 (the run has 64)"),
        ("data.samples_per_prompt=4", "data.samples_per_prompt=4 (the run has 8)"),
        (
            "data.prompts_per_step=8",
            "data.prompts_per_step=8 (the run has 4)",
        ),  # not data.prompts, which may change
        ("data.negative_prompt=ugly", "data.negative_prompt=ugly (the run has  )"),
        ("sampling.window.size=null", "sampling.window.size=null (the run has 2)"),
        ("rollout.dtype=bfloat16", "rollout.dtype=bfloat16 (the run has float32)"),
        ("rollout.micro_batch_size=4", "rollout.micro_batch_size=4 (the run has 8)"),
        ("actor.lora.rank=4", "actor.lora.rank=4 (the run has 8)"),
        ("actor.optimizer.lr=1e-3", "actor.optimizer.lr=0.001 (the run has 0.01)"),
        ("actor.micro_batch_size=4", "actor.micro_batch_size=4 (the run has 8)"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef=0.1 (the run has 0.0)"),
        (
            "reward.parts.jpeg_compressibility.weight=0.5",
            "reward.parts.jpeg_compressibility.weight=0.5 (the run has 1.0)",
        ),
        ("reward.max_failed_fraction=0.5", "reward.max_failed_fraction=0.5 (the run has 0.0)"),
    ],
)
def test_what_decides_results_is_refused_by_name(override, said):
    with pytest.raises(ConfigError) as error:
        check_same_run(settings(), settings(override), "/runs/a")
    assert (
        str(error.value)
        == f"run_dir=/runs/a holds a run with other settings: {said}. Take its settings, or another run_dir"
    )


def test_every_difference_is_named():
    with pytest.raises(ConfigError, match=r"actor.lora.rank=4 \(the run has 8\); seed=3 \(the run has 0\)\."):
        check_same_run(settings(), settings("seed=3", "steps=5", "actor.lora.rank=4"), "/runs/a")


def test_a_key_that_one_side_does_not_know_is_null_there():
    """A run of an older or a newer version."""
    with pytest.raises(ConfigError, match=r": cache=null \(the run has 3\); width=2 \(the run has null\)\."):
        check_same_run("cache: 3\nsize: null\n", "width: 2\n", "/runs/a")  # size is null on both sides


def test_settings_that_are_newer_than_the_run_have_their_defaults():
    saved = (
        settings("reward=ocr")
        .replace("      min_confidence: 0.5\n", "")
        .replace("  clip_range: 0.01\n", "  clip_range: 1.0e-05\n")
    )
    assert "min_confidence" not in saved
    with pytest.raises(ConfigError, match=r"min_confidence=0.4 \(the run has 0.5\)\."):
        check_same_run(
            saved,
            settings("reward=ocr", "algorithm.clip_range=1e-5", "reward.parts.ocr.min_confidence=0.4"),
            "/runs/a",
        )
    with pytest.raises(ConfigError, match=r"settings: seed=5 \(the run has 0\)\."):  # and nothing else
        check_same_run(
            saved.replace("  clip_range: 1.0e-05\n", ""),
            settings("reward=ocr", "algorithm.clip_range=1e-5", "seed=5"),
            "/runs/a",
        )


def test_what_may_change_is_there():
    keys = flatten(OmegaConf.to_container(OmegaConf.create(settings())))
    for entry in MAY_CHANGE:
        assert fnmatch.filter(keys, entry), entry


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2]}) == {"a.b": 1, "a.c.d": None, "e": [1, 2]}
