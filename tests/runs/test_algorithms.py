"""The recipes of all algorithms as strict runs of four steps on two ranks, in one process group: stopped in
mid-step and resumed they are, to the bit, the run that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from omnirl_hpc.checkpoints.adapters import load_adapter
from omnirl_hpc.checkpoints.checkpointer import Checkpointer
from omnirl_hpc.checkpoints.run_state import find_start
from omnirl_hpc.checks.rules import check
from omnirl_hpc.config.load import load_config
from omnirl_hpc.config.schema import RewardConfig
from omnirl_hpc.determinism import enable_strict
from omnirl_hpc.launch.stop import StopFlag, StopReason
from omnirl_hpc.layout import make_layout
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.metrics.trackers import Trackers
from omnirl_hpc.models.qwen_image.tiny import write_tiny
from omnirl_hpc.report.records import RunRecords, describe_rewards
from omnirl_hpc.rewards.reward import RewardBatch
from omnirl_hpc.rewards.runner import Scores
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sources import generation
from omnirl_hpc.trainer import Trainer
from tests.helpers import CPU, run_ranks
from tests.runs.inject import Faults, patch
from tests.runs.program import assert_same_run, lines
from tests.sources.cases import write_images

pytestmark = pytest.mark.slow

RANKS, STEPS, STOPPED = 2, 4, 3

# Small, whatever the recipe says, on the tiny model; a rank has one micro-batch in each of two updates.
SMALL = (
    "model.height=32",
    "model.width=32",
    "data.prompts_per_step=4",
    "data.samples_per_prompt=2",
    "data.text_lengths=[256,512]",
    "sampling.num_inference_steps=4",
    "sampling.window.last=3",
    "sampling.window.size=2",
    "rollout.micro_batch_size=4",
    "actor.micro_batch_size=2",
    "actor.updates_per_step=2",
    "actor.lora.rank=4",
    "actor.optimizer.warmup_updates=8",  # a schedule that a wrong resume would lose
    "actor.ema_decay=0.9",
    "evaluation.every=0",
    "logging.samples_every=2",
    "determinism=strict",
    "timeout_seconds=120",
    f"steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep=10",
)
# A recipe, and what it is called here where there are several of it -> what is set besides: what a short run
# would not show. {folder} is where the runs are, in this order.
RECIPES: dict[str, tuple[str, ...]] = {
    "flowgrpo_glyph": (
        "algorithm.kl_coef=0.1",
        "algorithm.correction.importance=sequence",
        "algorithm.correction.rejection=step",
    ),
    "grpoguard_glyph": (),
    "flowdppo_glyph": (),
    "tempflowgrpo_glyph": (),
    "dancegrpo_glyph": (),
    # the window moves in every step, and fewer steps of second order follow it
    "mixgrpo_glyph": (
        "algorithm.iterations=1",
        "sampling.window.size=1",
        "sampling.window.solver=dpm2",
        "sampling.window.compress=0.5",
    ),
    "awm_glyph": ("algorithm.points_per_sample=2",),
    "diffusionnft_glyph": ("algorithm.old_decay=delayed", "algorithm.old_every=2"),
    "diffusionopd_glyph-adapter": (
        "algorithm.teacher={folder}/flowgrpo_glyph/straight/checkpoints/step_000004/adapter",
    ),
    "diffusionopd_glyph-checkpoint": (
        "algorithm.teacher={folder}/teacher",
        "algorithm.policy_coef=1",
        "algorithm.kl_coef=0.1",
    ),
    "onlinedpo_glyph": ("data.refill_rounds=1", "actor.micro_batch_size=1"),
    "dpo_tiny": ("algorithm.beta=2000", "data.prompts_per_step=8", "actor.micro_batch_size=1"),
}


class InProcessRewards:
    """Stands for RewardMix, whose processes take seconds to start: the brightness of a part of each image."""

    tenants: tuple[()] = ()

    def __init__(self, config: RewardConfig, device: torch.device) -> None:
        self._parts, self._values = tuple(config.parts), []

    def submit(self, batch: RewardBatch) -> None:
        self._values += [
            float(image[:, : image.shape[1] // 2].float().mean()) / 255 for image in batch.images
        ]

    def collect(self) -> dict[str, Scores]:
        values, self._values = self._values, []
        return {name: Scores(values, 0.0, []) for name in self._parts}

    def close(self) -> None: ...


def run(overrides: list[str]) -> StopReason:
    """A run in the process group that there is, or what is left of it. Why it ended."""
    loaded = load_config(overrides)
    config = loaded.config
    check(config, RANKS)
    layout = make_layout(config, dist.get_rank(), RANKS)
    directory = RunDirectory(config.run_dir)
    directory.create()
    if layout.rank == 0:
        directory.write_start(loaded.to_yaml(), loaded.choices)
    checkpointer = Checkpointer(directory.checkpoints, config.checkpoint, layout.rank, config.timeout_seconds)
    start = find_start(directory, checkpointer)
    stop = StopFlag(config.run_dir)
    with Trackers(config, directory, layout.rank) as trackers:
        trainer = Trainer(loaded, layout, CPU, directory, PhaseTimer(CPU), stop, trackers, checkpointer)
        reason = trainer.train(start)
        trainer.leave()
        trainer.close()
    if layout.rank == 0:
        stop.acknowledge(reason)
    return reason


def straight_and_stopped(runs: dict[str, list[str]], folder: Path) -> None:
    """On one rank: each of the runs from end to end, and once more stopped between two updates of a step that
    no checkpoint precedes directly, and resumed.
    """
    enable_strict()
    faults = Faults([], folder)
    patch(faults, [])
    generation.RewardMix = InProcessRewards
    for name, overrides in runs.items():
        assert run([*overrides, f"run_dir={folder / name / 'straight'}"]) == StopReason.NONE
        faults.run_dir = folder / name / "stopped"
        if dist.get_rank() == 0:
            faults.orders = [("stop", "actor", STOPPED)]
        for expected in (StopReason.USER, StopReason.NONE):
            assert run([*overrides, f"run_dir={faults.run_dir}"]) == expected


def make_runs(folder: Path, model: Path, prompts: Path, recipes: Iterable[str], *more: str) -> None:
    """The runs of some of RECIPES, each in a folder of its name. more: settings of all."""
    write_tiny(folder / "teacher", seed=1)
    tables = {"dpo_tiny": write_images(folder / "pairs.parquet")}
    settings = {
        recipe: [
            f"recipe={recipe.partition('-')[0]}",
            *SMALL,
            f"model.path={model}",
            f"data.prompts={tables.get(recipe, prompts)}",
            *(setting.format(folder=folder) for setting in RECIPES[recipe]),
            *more,
        ]
        for recipe in recipes
    }
    run_ranks(RANKS, straight_and_stopped, settings, folder, deadline=900)


def assert_resumed(folder: Path) -> None:
    """The run in `folder` that was stopped and resumed is, to the bit, the one that was not."""
    straight, stopped = folder / "straight", folder / "stopped"
    assert_same_run(stopped, straight)
    metrics = lines(straight / "metrics.jsonl")
    assert all(step["grad_norm"] > 0 and math.isfinite(step["loss"]) for step in metrics)
    names = {path.name for path in (straight / f"checkpoints/step_{STEPS:06d}").iterdir() if path.is_dir()}
    assert {"adapter", "ema"} <= names
    for policy in names & {"adapter", "ema", "old", "teacher"}:
        ours, theirs = (adapter(run, STEPS, policy) for run in (straight, stopped))
        assert largest_difference(ours, theirs) == 0
    assert largest_difference(adapter(straight, 0, "adapter"), adapter(straight, STEPS, "adapter")) > 0


@pytest.fixture(scope="module")
def runs(tiny_model, tiny_prompts, tmp_path_factory) -> Path:
    """The folder that holds a folder for each recipe."""
    folder = tmp_path_factory.mktemp("algorithms")
    make_runs(folder, tiny_model, tiny_prompts, RECIPES)
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_stopped_and_resumed_it_is_the_run_that_was_never_stopped(runs, recipe):
    assert_resumed(runs / recipe)


def adapter(run: Path, step: int, policy: str) -> dict[str, torch.Tensor]:
    return load_adapter(run / f"checkpoints/step_{step:06d}" / policy)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_engine_and_actor_see_the_same_steps_whatever_the_algorithm(runs):
    """With shared noise, moving windows and fewer steps after them; nothing is rejected then."""
    for recipe in ("flowgrpo_glyph", "dancegrpo_glyph", "mixgrpo_glyph", "flowdppo_glyph"):
        for step in lines(runs / recipe / "straight" / "metrics.jsonl"):
            assert step["ratio/first_update_max_abs_log"] <= 1e-6
    corrected = lines(runs / "flowgrpo_glyph" / "straight" / "metrics.jsonl")[0]
    assert corrected["correction/rejected"] == 0 and corrected["correction/importance"] == pytest.approx(1)


def test_the_old_policy_of_diffusion_nft_lags_behind_by_its_own_schedule(runs):
    run = runs / "diffusionnft_glyph" / "straight"
    metrics = lines(run / "metrics.jsonl")
    assert all(step["time/old_log_prob"] == 0 for step in metrics)
    assert not any(name.startswith("ratio/") for name in metrics[0])
    assert metrics[0]["distance/reference"] > 0  # the second update is off it
    # Steps 0 and 2 leave the old policy alone, steps 1 and 3 copy: their decay is 0 up to step 75.
    at = {(step, policy): adapter(run, step, policy) for step in (0, 2, 4) for policy in ("adapter", "old")}
    assert largest_difference(at[0, "adapter"], at[0, "old"]) == 0
    assert largest_difference(at[2, "adapter"], at[2, "old"]) == 0
    assert largest_difference(at[4, "old"], at[2, "old"]) > 0
    # In step 3 the current policy has moved away from the one that samples, which images are of.
    assert metrics[3]["distance/old"] > 0


@pytest.mark.parametrize("kind", ["adapter", "checkpoint"])
def test_a_teacher_is_given_and_stays(runs, kind):
    run = runs / f"diffusionopd_glyph-{kind}" / "straight"
    first = lines(run / "metrics.jsonl")[0]
    assert first["kl_teacher"] > 0 and first["ratio/first_update_max_abs_log"] < 1e-6
    if kind == "checkpoint":  # no weights of it are the run's
        assert first["kl_reference"] >= 0 and not (run / "checkpoints/step_000004/teacher").exists()
        return
    given = adapter(runs / "flowgrpo_glyph" / "straight", STEPS, "adapter")
    for step in (0, STEPS):
        assert largest_difference(adapter(run, step, "teacher"), given) == 0


def test_dpo_on_a_table_generates_nothing_and_asks_no_reward(runs):
    run = runs / "dpo_tiny" / "straight"
    assert describe_rewards(RunRecords.read(run)) == "no reward"
    metrics = lines(run / "metrics.jsonl")
    assert not any(name.startswith(("reward/", "sync/", "ratio/")) for name in metrics[0])
    assert all(step["time/rollout"] == 0 for step in metrics)
    assert not list((run / "samples").glob("*.png"))
    phases = {line["phase"] for line in lines(run / "hashes.jsonl")}
    assert phases == {"pairs", "update_0", "update_1", "end"}
