"""Runs that train all weights: equal to the bit whatever interrupts them, and exported as they were sampled
with.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from omnirl_hpc.cli.main import main
from omnirl_hpc.data.prompts import Prompt, PromptTable
from omnirl_hpc.evaluation.evaluator import NO_STEP
from omnirl_hpc.hashing import stream_checksum
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.rollout.diffusers_engine import DiffusersEngine
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.sampling.samples import SampleIdentity
from omnirl_hpc.sampling.streams import LATENTS
from omnirl_hpc.sampling.windows import NO_STEPS
from omnirl_hpc.sync import confirm_weights, send_weights
from tests.cli.test_export import STEPS, plain_latents
from tests.helpers import CPU, make_config
from tests.runs.program import compare, lines
from tests.sync_cases import ALL, Weights

pytestmark = pytest.mark.slow

FULL = (
    "actor.train=full",
    "actor.optimizer.lr=1e-3",
    "determinism=strict",
    "steps=3",
    "checkpoint.every=1",
    "checkpoint.keep=9",
)


@pytest.fixture(scope="module")
def full(program, tmp_path_factory) -> Path:
    """Three straight steps on two ranks, engine and actor in turns."""
    run_dir = tmp_path_factory.mktemp("runs") / "full"
    program.finish(run_dir, *FULL, "residency=swap")
    return run_dir


def checksum(run_dir: Path, version: int) -> str:
    """Of the last sync of a version, from the log."""
    (*_, line) = (
        x
        for x in (run_dir / "log/rank_0.log").read_text().splitlines()
        if f"version {version}: {ALL} weights bound" in x
    )
    return line.rpartition(" ")[2]


def test_engine_and_actor_compute_the_same_policy(full):
    steps = lines(full / "metrics.jsonl")
    assert [step["sync/version"] for step in steps] == [1, 2, 3] and {
        step["sync/bound"] for step in steps
    } == {ALL}
    assert all(step["ratio/first_update_max_abs_log"] <= 1e-6 and step["grad_norm"] > 0 for step in steps)
    assert len({checksum(full, version) for version in range(4)}) == 4
    assert not list(full.glob("checkpoints/*/adapter"))


def test_resident_is_the_same(program, full, tmp_path):
    program.finish(tmp_path / "run", *FULL, "residency=resident")
    assert compare(full, tmp_path / "run")[0] == 0


def test_stopped_in_mid_step_killed_and_resumed_is_the_same(program, full, tmp_path):
    run_dir = tmp_path / "run"
    program.finish(
        run_dir, *FULL, "checkpoint.every=3", faults=("stop:actor:1:1",)
    )  # after the first of two updates
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000001"
    with program.start(run_dir, *FULL, faults=("pause:rollout:2:1",)) as job:
        job.wait_for(run_dir / "PAUSED")
        job.kill_everything()
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [0, 1]
    program.finish(run_dir, *FULL)
    code, said = compare(full, run_dir)
    assert code == 0, said


def test_a_rank_that_dies_before_the_proof_ends_the_run_and_one_rank_goes_on(program, full, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(full, run_dir)
    ended = program.run(run_dir, *FULL, "checkpoint.resume_step=1", faults=("die:sync:1:1",))
    assert ended.code != 0
    program.finish(run_dir, *FULL, "steps=2", ranks=1)
    metrics, straight = lines(run_dir / "metrics.jsonl"), lines(full / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1]
    assert (
        metrics[1]["reward/mean"] == straight[1]["reward/mean"]
    )  # samples do not depend on the number of ranks
    assert metrics[1]["grad_norm"] == pytest.approx(straight[1]["grad_norm"], rel=1e-3)


def test_exported_weights_are_what_the_engine_computed_with(
    full, tiny_model, tiny_prompts, tmp_path, monkeypatch
):
    """Their checksum is that of the last sync; plain diffusers makes the images of the engine with them, and
    not the base's.
    """
    out = tmp_path / "out"
    main(["export", str(full), str(out)])
    exported = QwenImageTransformer2DModel.from_pretrained(out)
    assert stream_checksum(exported.named_parameters()) == checksum(full, 3)
    main(["export", str(full), str(tmp_path / "earlier"), "--step", "2"])
    earlier = QwenImageTransformer2DModel.from_pretrained(tmp_path / "earlier")
    assert stream_checksum(earlier.named_parameters()) == checksum(full, 2)

    config = make_config(tiny_model, tiny_prompts, tmp_path, "actor.train=full")
    engine, prompts, latents = DiffusersEngine(config, QwenImage(config.model), CPU, PhaseTimer(CPU)), [], []
    weights = Weights(config, seed=None)
    weights._transformer = exported
    engine.sleep()
    sent = send_weights(weights, engine, torch.float32, 1)
    engine.wake()
    confirm_weights(engine, sent, 1)
    decode = QwenImage.decode
    monkeypatch.setattr(
        QwenImage, "decode", lambda self, pipeline, x: latents.append(x[LATENTS]) or decode(self, pipeline, x)
    )
    prompts = PromptTable(tiny_prompts).first(2)
    negative = engine.encode(Prompt("", " "))
    requests = [
        SampleRequest(
            SampleIdentity(0, NO_STEP, prompt.id, 0), i, NO_STEPS, engine.encode(prompt), negative, width=256
        )
        for i, prompt in enumerate(prompts)
    ]
    list(engine.generate(requests, num_steps=STEPS))
    pipeline = QwenImagePipeline.from_pretrained(tiny_model)
    base = plain_latents(pipeline, prompts)
    pipeline.transformer = exported
    torch.testing.assert_close(plain_latents(pipeline, prompts), torch.cat(latents), rtol=0, atol=1e-5)
    assert (base - torch.cat(latents)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("export", ("--merge",), "--merge is for adapters, and "),
        ("export", ("--policy", "ema"), "--policy ema is for adapters, and "),
        (
            "export",
            ("--model", "/nowhere"),
            "a run that trains all weights needs the model, and model.path=/nowhere is none",
        ),
        ("export", ("--step", "9"), "--step 9: "),
        (
            "evaluate",
            (),
            "trains all weights, and evaluate compares adapters: omnirl-hpc export writes its transformer",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(full, tmp_path, capsys, command, options, said):
    with pytest.raises(SystemExit):
        main([command, str(full), str(tmp_path / "out"), *options])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"omnirl-hpc {command}: ") and said in line
    assert not (tmp_path / "out").exists()
