"""Whole runs of two steps, on one rank and on two."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from omnirl_hpc import trainer as trainer_module
from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO
from omnirl_hpc.checkpoints.checkpointer import Checkpointer
from omnirl_hpc.checkpoints.run_state import find_start
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.load import LoadedConfig
from omnirl_hpc.errors import DataError, MismatchError, OutputError, RewardError
from omnirl_hpc.evaluation.evaluator import Evaluator
from omnirl_hpc.launch.stop import StopFlag, StopReason
from omnirl_hpc.layout import make_layout
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.metrics.trackers import Trackers
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.residency import ACTOR
from omnirl_hpc.rewards.runner import Scores
from omnirl_hpc.rollout.diffusers_engine import DiffusersEngine
from omnirl_hpc.run_directory import RunDirectory, writing
from omnirl_hpc.sources import generation as generation_module
from omnirl_hpc.sources import rollout as rollout_module
from omnirl_hpc.trainer import Trainer
from tests.helpers import CPU, load_small, one_rank_group, run_ranks

GAP = "ratio/first_update_max_abs_log"
PHASES = "encode rollout decode reward reward_exposed swap old_log_prob actor sync checkpoint step"
METRICS = {  # issue 2
    *"step reward/mean reward/std reward/zero_std_groups reward/failed loss".split(),
    *"ratio/mean ratio/max_abs_log clip_fraction kl grad_norm lr images_per_second".split(),
    *"memory/device_reserved memory/host_peak sync/bound sync/version".split(),
    *(f"time/{phase}" for phase in PHASES.split()),
    GAP,
}
OF_THE_CLOCK = ("time/", "memory/", "images_per_second")


@dataclass
class Run:
    """What one rank saw of a run."""

    metrics: list[dict[str, float]]  # of each step
    images: dict[tuple[int, int, int], Tensor]  # (step, group, sample) -> [3, H, W]
    weights: list[Tensor]  # of each step's samples in the loss, this rank's
    adapter: dict[str, Tensor]  # at the end

    @property
    def values(self) -> list[dict[str, float]]:
        """Everything that must be equal in an equal run."""
        return [{k: v for k, v in step.items() if not k.startswith(OF_THE_CLOCK)} for step in self.metrics]


class ObservedTrainer(Trainer):
    """A trainer that keeps what it generated."""

    def __init__(self, *args) -> None:
        self.seen = Run([], {}, [], {})
        super().__init__(*args)

        self.get_input, self.source.next = self.source.next, self.note_input

    def note_input(self, step, check_stop):
        given = self.get_input(step, check_stop)
        samples = given.batch.units
        images = [] if samples.media is None else samples.media.frames
        for image, group, sample in zip(images, samples.group.tolist(), samples.sample.tolist()):
            self.seen.images[step, group, sample] = image[0]
        self.seen.weights.append(given.batch.weights)
        return given


def train(loaded: LoadedConfig) -> Run:
    """A run in the process group that there is."""
    config = loaded.config
    layout = make_layout(config, dist.get_rank(), dist.get_world_size())
    directory = RunDirectory(config.run_dir)
    directory.create()
    if layout.rank == 0:
        directory.write_start(loaded.to_yaml(), {})
    trackers = Trackers(config, directory, layout.rank)
    checkpointer = Checkpointer(directory.checkpoints, config.checkpoint, layout.rank, config.timeout_seconds)
    start = find_start(directory, checkpointer)
    stop = StopFlag(config.run_dir)
    trainer = ObservedTrainer(loaded, layout, CPU, directory, PhaseTimer(CPU), stop, trackers, checkpointer)
    trackers.log = trainer.seen.metrics.append  # is told of every step on every rank
    try:
        assert trainer.train(start) == StopReason.NONE
        trainer.residency.give_to(ACTOR)
        trainer.seen.adapter = {name: tensor.clone() for name, tensor in trainer.actor.weights()}
        return trainer.seen
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def configured(tiny_model, tiny_prompts, tmp_path_factory):
    """Learning rate of the demo recipe: steps are large, so that what should be 0 does not only look like
    it.
    """
    return lambda *overrides: load_small(
        tiny_model, tiny_prompts, tmp_path_factory.mktemp("run"), "steps=2", *overrides
    )


@pytest.fixture(scope="module")
def config(configured) -> LoadedConfig:
    return configured()


@pytest.fixture(scope="module")
def run(config) -> Run:
    with one_rank_group():
        return train(config)


def test_every_metric_is_reported(config, run):
    written = [
        json.loads(line) for line in (Path(config.config.run_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    assert written == run.metrics
    assert [m["step"] for m in run.metrics] == [0, 1]
    for m in run.metrics:
        assert METRICS - m.keys() == set()
        assert all(math.isfinite(value) for value in m.values())
        assert m["sync/bound"] == 24
        assert m["sync/version"] == m["step"] + 1  # the number of finished steps
        assert m["reward/failed"] == 0
        assert m["reward/std"] > 0
        assert m["grad_norm"] > 0
        assert m["lr"] == 1e-2
        assert m["time/step"] >= sum(
            m[f"time/{phase}"] for phase in PHASES.split() if phase not in ("step", "reward")
        )
        assert m["images_per_second"] == pytest.approx(8 / m["time/step"])


def test_engine_and_actor_agree_before_the_first_update(run):
    assert [m[GAP] for m in run.metrics] == [0, 0]
    assert all(m["ratio/max_abs_log"] > 0 for m in run.metrics)  # the second of the two updates is off-policy


def test_samples_are_saved(config, run):
    """The first and the last step's, with prompts and scores."""
    folder = Path(config.config.run_dir) / "samples"
    index = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in index] == [0] * 8 + [1] * 8
    assert all(entry["prompt"] and math.isfinite(entry["reward"]) for entry in index)
    for i, entry in enumerate(index[:8]):
        image = Image.open(folder / entry["file"])
        assert image.size == (48, 32)
        assert image.tobytes() == run.images[0, i // 2, i % 2].permute(1, 2, 0).numpy().tobytes()
    for step, mean in enumerate(m["reward/mean"] for m in run.metrics):
        assert sum(entry["reward"] for entry in index if entry["step"] == step) / 8 == pytest.approx(mean)


def test_every_sample_has_the_same_weight(run):
    for weights in run.weights:
        assert torch.equal(weights, torch.full((8,), 1 / 4))  # two updates of four samples


def test_same_seed_gives_the_same_run(configured, run):
    with one_rank_group():
        again, other = train(configured()), train(configured("seed=1", "steps=1"))
    assert again.values == run.values
    assert all(torch.equal(again.images[place], run.images[place]) for place in run.images)
    assert all(torch.equal(again.adapter[name], run.adapter[name]) for name in run.adapter)
    assert other.values[0]["reward/mean"] != run.values[0]["reward/mean"]


VARIANTS = {
    "trusted": ["algorithm.old_log_prob=rollout"],
    "own windows": ["sampling.window.per=sample", "algorithm.old_log_prob=rollout", "steps=1"],
    "resident": ["residency=resident"],
    "kl": ["algorithm.kl_coef=1.0", "actor.activation_checkpointing=true"],
    "no guidance": ["sampling.true_cfg_scale=1.0"],
    "cps": ["sampling.transition=cps", "steps=1"],
    "dance": [
        "sampling.transition=dance",
        "sampling.window.size=null",
        "sampling.window.last=null",
        "steps=1",
    ],
}


@pytest.fixture(scope="module")
def variants(configured) -> dict[str, Run]:
    with one_rank_group():
        return {name: train(configured(*overrides)) for name, overrides in VARIANTS.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_trains_from_where_the_engine_sampled(variants, name):
    for m in variants[name].metrics:
        assert m[GAP] == 0
        assert METRICS - m.keys() == set()
        assert all(math.isfinite(value) for value in m.values())
        assert m["grad_norm"] > 0


def test_trusted_and_recomputed_log_probs_give_the_same_run(variants, run):
    """They are equal bitwise, so that everything after them is."""
    assert variants["trusted"].values == run.values
    assert variants["trusted"].metrics[0]["time/old_log_prob"] == 0


def test_residency_changes_nothing(variants, run, config):
    assert config.config.residency == "swap"
    assert variants["resident"].values == run.values
    assert all(torch.equal(variants["resident"].adapter[name], run.adapter[name]) for name in run.adapter)


def test_variants_differ(variants, run):
    assert variants["kl"].metrics[1]["kl_reference"] > 0
    assert torch.equal(variants["kl"].images[0, 0, 0], run.images[0, 0, 0])
    assert not torch.equal(variants["kl"].images[1, 0, 0], run.images[1, 0, 0])  # another gradient
    for name in ("own windows", "no guidance", "cps", "dance"):
        assert any(
            not torch.equal(variants[name].images[place], run.images[place])
            for place in variants[name].images
        )


def test_an_algorithm_from_outside_trains(configured, run):
    """One file, with points, settings and a policy of its own; samples are made by ODE steps alone."""
    with one_rank_group():
        settings = ("~algorithm.clip_range", "algorithm.step=2")  # the first is the recipe's, for its own
        loaded = configured("algorithm=tests.algorithms.toy:RewardWeighted", *settings)
        made = train(loaded)
    assert loaded.config.algorithm.step == 2
    for metrics in made.metrics:
        assert metrics["error"] > 0 and metrics["grad_norm"] > 0 and metrics["time/old_log_prob"] == 0
        assert not any(name.startswith("ratio/") for name in metrics)
    assert made.metrics[0]["distance"] >= 0 < made.metrics[1]["distance"]  # the teacher lags behind
    assert not torch.equal(made.images[0, 0, 0], run.images[0, 0, 0])
    checkpoint = Path(loaded.config.run_dir) / "checkpoints/step_000002"
    assert {"adapter", "teacher"} <= {path.name for path in checkpoint.iterdir()}


def test_what_only_latents_are_needed_of_is_not_decoded(configured, monkeypatch):
    """Its reward reads latents, and no sample is saved."""
    monkeypatch.setattr(QwenImage, "decode", None)
    with one_rank_group():
        settings = ("reward=tests.toy_reward_in_thread:CalmLatents", "logging.samples_every=0", "steps=1")
        (metrics,) = train(configured(*settings)).metrics
    assert metrics["reward/CalmLatents/mean"] < 0 < metrics["reward/std"]
    assert metrics["grad_norm"] > 0 == metrics["time/decode"]


GAPS = (GAP, "ratio/first_update_mean_abs_log")


@pytest.fixture
def engine_that_is_off(monkeypatch):
    """Every log-probability of the engine is too great by 1/8: exp(1/8) is far outside of the clip range."""
    generate = DiffusersEngine.generate

    def off(self, requests, *options):
        for batch in generate(self, requests, *options):
            made = replace(batch.trajectory, log_probs=batch.trajectory.log_probs + 0.125)
            yield replace(batch, trajectory=made)

    monkeypatch.setattr(DiffusersEngine, "generate", off)


def test_every_updates_old_log_probs_are_the_actors(configured, run, engine_that_is_off):
    """With old_log_prob=recompute the engine's only show in the gap, so that all else is as in `run`."""
    with one_rank_group():
        made = train(configured("rollout.max_log_prob_gap=1"))
    assert [m[GAP] for m in made.metrics] == pytest.approx([0.125] * 2, abs=1e-5)
    for step, expected in zip(made.values, run.values):
        assert {k: v for k, v in step.items() if k not in GAPS} == {
            k: v for k, v in expected.items() if k not in GAPS
        }
    assert all(torch.equal(made.adapter[name], run.adapter[name]) for name in run.adapter)


def test_an_engine_that_is_too_far_off_stops_the_run(configured, engine_that_is_off):
    loaded = configured("rollout.max_log_prob_gap=0.1", "steps=1")
    with one_rank_group(), pytest.raises(MismatchError, match="by up to 0.125, more than"):
        train(loaded)


def test_an_algorithm_is_told_of_the_end_of_every_step(configured, monkeypatch):
    """After the step's updates, before the engine gets what they made."""
    told = []

    def after_step(self, step):
        told.append((step, "after_step"))
        return ()

    monkeypatch.setattr(FlowGRPO, "after_step", after_step)
    monkeypatch.setattr(FSDPActor, "apply_gradients", noted(FSDPActor.apply_gradients, told, "update"))
    monkeypatch.setattr(DiffusersEngine, "load_lora", noted(DiffusersEngine.load_lora, told, "sync"))
    with one_rank_group():
        train(configured("actor.updates_per_step=1"))
    step = lambda i: ["update", (i, "after_step"), "sync"]  # noqa: E731
    assert told == ["sync", *step(0), *step(1)]


def noted(method, calls, name):
    def wrapped(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    return wrapped


class ProbedTrainer(ObservedTrainer):
    """Fits the engine's micro-batch before the first step, as on a GPU."""

    def train(self, start):
        self.source.fit(0)
        return super().train(start)


def test_fitting_the_micro_batch_uses_up_no_prompt(configured, run, monkeypatch):
    monkeypatch.setitem(globals(), "ObservedTrainer", ProbedTrainer)
    with one_rank_group():
        probed = train(configured("steps=1"))
    assert probed.values == run.values[:1]
    assert all(torch.equal(image, run.images[place]) for place, image in probed.images.items())


@pytest.mark.parametrize("determinism, may_shrink", [("strict", False), ("fast", True)])
def test_how_the_micro_batch_is_fitted(configured, monkeypatch, determinism, may_shrink):
    """On the widest prompts of the run; smaller where strict determinism does not fix its size."""
    asked = []
    fit = lambda engine, requests, width, device, may_shrink: asked.append((len(requests), width, may_shrink))  # noqa: E731
    monkeypatch.setattr(rollout_module, "fit_micro_batch_size", fit)
    monkeypatch.setitem(globals(), "ObservedTrainer", ProbedTrainer)
    monkeypatch.setattr(ProbedTrainer, "train_step", lambda self, step: 1 / 0)  # that is all it is asked
    loaded = configured(f"determinism={determinism}", "data.text_lengths=[64,128,256,320]")
    with one_rank_group(), pytest.raises(ZeroDivisionError):
        train(loaded)
    assert asked == [(8, 320, may_shrink)]


class PartlyFailing:
    """Scores in this process; gives no score for some of a rank's samples."""

    fails: set[int]  # places among this rank's samples
    rank: int | None = None  # of whom they fail; None: everybody

    tenants = ()

    def __init__(self, config, device):
        ((self._name, part),) = config.parts.items()
        self._reward, self._scores = find_class("reward", part.name)(part), []

    def submit(self, batch):
        self._scores += self._reward.score(batch.with_arrays(Tensor.numpy))

    def collect(self):
        here = self.fails if self.rank in (None, dist.get_rank()) else set()
        values = [math.nan if i in here else score for i, score in enumerate(self._scores)]
        self._scores = []
        return {self._name: Scores(values, 0.0, ["the scorer is out of paper"] if here else [])}

    def close(self):
        pass


@pytest.fixture
def failing(monkeypatch):
    def patch(*fails: int) -> None:
        monkeypatch.setattr(
            generation_module, "RewardMix", type("Failing", (PartlyFailing,), {"fails": set(fails)})
        )

    return patch


def test_samples_without_a_reward_are_trained_around(configured, failing, run):
    failing(1)
    with one_rank_group():
        masked = train(configured("reward.max_failed_fraction=0.125", "steps=1"))
    (m,) = masked.metrics
    assert m["reward/failed"] == 1
    assert m["reward/mean"] != run.metrics[0]["reward/mean"]
    assert all(math.isfinite(value) for value in m.values())
    third = pytest.approx(1 / 3)
    assert masked.weights[0].tolist() == [third, 0, third, third] + [1 / 4] * 4


def test_an_update_without_a_reward_changes_nothing(configured, failing):
    """All four samples of the second update fail: its gradient is 0, the first update's is not."""
    failing(4, 5, 6, 7)
    with one_rank_group():
        masked = train(configured("reward.max_failed_fraction=0.5", "steps=1"))
    (m,) = masked.metrics
    assert m["reward/failed"] == 4
    assert m["grad_norm"] == 0  # of the last update
    assert any(tensor.any() for name, tensor in masked.adapter.items() if ".lora_B." in name)
    assert masked.weights[0].tolist() == [1 / 4] * 4 + [0] * 4


def test_too_many_failures_stop_the_run(configured, failing):
    failing(1, 3)
    with one_rank_group(), pytest.raises(RewardError) as error:
        train(configured("reward.max_failed_fraction=0.125"))
    assert str(error.value) == (
        "reward jpeg_compressibility gave no finite score for 2 of 8 samples, more than "
        "reward.max_failed_fraction=0.125 allows; first failure on this rank: the scorer is out of paper"
    )


def sample_index(run_dir: Path, step: int) -> list[tuple[bytes, tuple[str, float]]]:
    """(pixels, (prompt, reward)) of the sample images of a step."""
    lines = map(json.loads, (run_dir / "samples" / "index.jsonl").read_text().splitlines())
    return [
        (Image.open(run_dir / "samples" / line["file"]).tobytes(), (line["prompt"], line["reward"]))
        for line in lines
        if line["step"] == step
    ]


def on_two_ranks(configs: dict[str, LoadedConfig], too_many: LoadedConfig) -> tuple[dict[str, Run], str]:
    runs = {name: train(config) for name, config in configs.items()}
    generation_module.RewardMix = type("Failing", (PartlyFailing,), {"fails": {0}, "rank": 1})
    try:
        train(too_many)
    except RewardError as error:
        return runs, str(error)
    raise AssertionError("a run without a valid reward went on")


def test_two_ranks_are_one(configured, config, run):
    configs = {
        "recomputed": configured(),
        "trusted": configured("algorithm.old_log_prob=rollout", "sampling.window.per=sample"),
    }
    ranks = run_ranks(2, on_two_ranks, configs, configured(), deadline=600)
    runs = [rank for rank, _ in ranks]
    for name in configs:
        first, second = runs[0][name], runs[1][name]
        assert [m[GAP] for m in first.metrics] == [0, 0]
        assert first.values == second.values  # metrics are those of all ranks
        assert first.images.keys().isdisjoint(second.images)
        assert all(torch.equal(first.adapter[k], second.adapter[k]) for k in first.adapter)

    images = runs[0]["recomputed"].images | runs[1]["recomputed"].images
    assert images.keys() == run.images.keys()
    assert all(torch.equal(images[place], run.images[place]) for place in images if place[0] == 0)
    saved = Path(configs["recomputed"].config.run_dir) / "samples"
    assert (saved / "step_000000_00.png").read_bytes() == (
        Path(config.config.run_dir) / "samples" / "step_000000_00.png"
    ).read_bytes()

    # Under an image is its own reward, and its own prompt, whoever made it and in whatever order.
    alone_index = dict(sample_index(Path(config.config.run_dir), step=0))
    shown = sample_index(Path(configs["recomputed"].config.run_dir), step=0)
    assert shown == [(pixels, alone_index[pixels]) for pixels, _ in shown]
    assert len(set(told for _, told in shown)) == 4

    # One step in: the same rewards exactly, and the same learning but for the order of summation.
    together, alone = runs[0]["recomputed"].values[0], run.values[0]
    assert together.keys() == alone.keys()
    assert together["reward/mean"] == alone["reward/mean"]
    for name in alone:
        assert together[name] == pytest.approx(alone[name], rel=1e-2, abs=1e-5), name

    for rank, (_, message) in enumerate(ranks):
        assert message.startswith("reward jpeg_compressibility gave no finite score for 1 of 8 samples")
        assert message.endswith("on this rank: the scorer is out of paper") == (rank == 1)


EVALUATION = (
    "evaluation.every=1",
    "evaluation.num_prompts=2",
    "evaluation.num_inference_steps=3",
    "actor.ema_decay=0.5",
)


def test_evaluations_change_nothing_and_keep_the_best(configured, run):
    """Between two steps the engine holds base and mean: the second step would show it."""
    loaded = configured(*EVALUATION, "checkpoint.keep=1")
    with one_rank_group():
        evaluated = train(loaded)
    scores = [{k: v for k, v in step.items() if k.startswith("evaluation/")} for step in evaluated.values]
    for step, expected, score in zip(evaluated.values, run.values, scores):
        assert {k: v for k, v in step.items() if k not in score} == expected
        assert score.keys() == {"evaluation/base", "evaluation/ema", "evaluation/adapter"}
    assert scores[0]["evaluation/base"] == scores[1]["evaluation/base"]
    assert all(torch.equal(evaluated.adapter[name], run.adapter[name]) for name in run.adapter)
    best = max((1, 2), key=lambda done: scores[done - 1]["evaluation/ema"])  # the first of equals
    assert (Path(loaded.config.run_dir) / "checkpoints/best").read_text() == f"step_00000{best}"


@pytest.mark.parametrize("place", ["evaluation", "metrics"])
def test_what_cannot_be_written_costs_no_step(configured, run, monkeypatch, place):
    """A disk that is full for a moment: the step is saved, and is evaluated and written down when the run
    goes on.
    """
    loaded = configured(*EVALUATION, "checkpoint.every=100")
    path = Path(loaded.config.run_dir)

    def refuse(*_):
        with writing(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with one_rank_group(), monkeypatch.context() as patch:
        if place == "metrics":
            patch.setattr(RunDirectory, "append_metrics", refuse)
        else:
            patch.setattr(Evaluator, "_save_media", refuse)
        with pytest.raises(OutputError, match="cannot be written: No space left on device"):
            train(loaded)
        assert not (path / "metrics.jsonl").exists()
    state = json.loads((path / "checkpoints/step_000001/state.json").read_text())
    assert state["unevaluated"]["step"] == 0
    with one_rank_group():
        again = train(loaded)
    assert [m["step"] for m in again.metrics] == [0, 1]
    assert all(torch.equal(again.adapter[name], run.adapter[name]) for name in run.adapter)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def test_an_image_without_a_score_ends_no_run(configured, failing):
    """Training allows none; an evaluation leaves it out of its means. The first two samples of a step are
    scored.
    """
    loaded = configured(  # evaluated since it is the last step
        "evaluation.every=5", "evaluation.num_prompts=2", "evaluation.num_inference_steps=2", "steps=1"
    )

    class InEvaluations(PartlyFailing):
        fails = {1}

        def collect(self):
            if len(self._scores) > 2:  # a step's
                self.fails = set()
            scored = super().collect()
            self.fails = {1}
            return scored

    with pytest.MonkeyPatch.context() as patch, one_rank_group():
        patch.setattr(generation_module, "RewardMix", InEvaluations)
        (step,) = train(loaded).metrics
    assert step["time/actor"] > 0 and step["time/evaluation"] > 0  # of the step and of its evaluation
    result = json.loads((Path(loaded.config.run_dir) / "evaluation/base/result.json").read_text())
    rewards = [sample["reward"] for sample in result["samples"]]
    assert rewards[1] is None and result["reward"] == rewards[0] == result["parts"]["jpeg_compressibility"]


def test_the_best_by_another_measure_says_nothing(configured, run):
    """The second leg evaluates with another seed, which scores lower: the best is of that measure all the
    same.
    """
    first = configured(*EVALUATION, "steps=1")
    with one_rank_group():
        train(first)
        second = configured(*EVALUATION, "evaluation.seed=6", f"run_dir={first.config.run_dir}")
        train(second)
    state = json.loads((Path(first.config.run_dir) / "checkpoints/step_000002/state.json").read_text())
    assert state["best"]["step"] == 2


def test_a_prompt_that_is_too_long_is_found_before_weights_load(configured, tmp_path, monkeypatch):
    pq.write_table(pa.table({"prompt": ["a cat", "b" * 2000]}), tmp_path / "long.parquet")
    monkeypatch.setattr(trainer_module, "make_actor", None)
    for table in ("data.prompts", "evaluation.prompts"):
        with (
            one_rank_group(),
            pytest.raises(
                DataError,
                match=r"1 of 2 rows of \S+ cannot be used: row group 0, row 1: a prompt of \d+ tokens ",
            ),
        ):
            train(configured(*EVALUATION, f"{table}={tmp_path / 'long.parquet'}"))
