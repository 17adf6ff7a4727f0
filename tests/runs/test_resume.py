"""A strict run that is stopped, killed and resumed is, to the bit, the run that was never stopped."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from omnirl_hpc.checkpoints.adapters import load_adapter
from omnirl_hpc.checkpoints.files import read_state
from tests.runs.conftest import STRICT
from tests.runs.program import DEAD_RANK_SECONDS, assert_same_run, compare, go_on, lines

pytestmark = pytest.mark.slow

# After six steps, of which two were made on one rank and not on two: |difference| / |adapter|, both as one
# vector. Gradients are summed in another order, and AdamW divides by their size, so that the rounding of tiny
# ones counts too. Measured: 2.4e-7 on one kind of CPU, 3.5e-4 on another (the same before and after the
# contracts of policies and samples, so by its kernels).
OTHER_RANKS_BOUND = 2e-3


def test_the_same_command_gives_the_same_run_and_a_second_job_on_it_is_refused(program, reference, tmp_path):
    run_dir = tmp_path / "again"
    with program.start(run_dir, *STRICT, faults=("pause:rollout:1:0",)) as first:
        first.wait_for(run_dir / "PAUSED")
        second = program.run(run_dir, *STRICT)
        assert first.process.poll() is None
        go_on(run_dir)
        ended = first.wait()
    assert second.code != 0
    assert "exitcode  : 2" in second.output  # as torchrun reports the rank that ended first
    said = [line for line in second.output.splitlines() if line.startswith("omnirl-hpc train: ")]
    assert len(said) <= 1  # rank 0 speaks, unless torchrun ends it because rank 1 was faster
    assert all(f"run_dir={run_dir} is in use by torchrun run " in line for line in said)
    *_, last, _ = second.output.splitlines()  # of torchrun: it puts a rule below
    assert (
        last.startswith("  traceback : omnirl-hpc train: ")
        and f"run_dir={run_dir} is in use by torchrun run " in last
    )
    assert ended.code == 0, ended.output  # the first did not notice
    assert_same_run(run_dir, reference)


def test_another_seed_differs_from_step_0_on(program, reference, tmp_path):
    program.finish(tmp_path / "other", *STRICT, "seed=1", "steps=1")
    code, said = compare(reference, tmp_path / "other")
    assert code == 1
    assert said.startswith("different: step 0, phase rollout, tensor noise: ")


def test_killed_after_three_steps_with_a_torn_checkpoint(program, reference, tmp_path):
    """The last whole checkpoint is of step 2: what was written about the third step is written again."""
    every = "checkpoint.every=1"
    run_dir = tmp_path / "killed"
    with program.start(run_dir, *STRICT, every, faults=("pause:rollout:3:1",)) as job:
        job.wait_for(run_dir / "PAUSED")
        job.kill_everything()
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [0, 1, 2]
    with (run_dir / "hashes.jsonl").open("a") as file:
        file.write('{"step": 3, "pha')  # a line that was being written
    (run_dir / "checkpoints/step_000003/state.json").write_text("{")
    ended = program.finish(run_dir, *STRICT, every)
    assert (
        "step_000003 is not whole (has 1 of " in ended.output and "going on from step 2 of 6" in ended.output
    )
    assert_same_run(run_dir, reference)


def test_a_run_whose_checkpoints_are_all_torn_does_not_start_over(program, reference, tmp_path):
    """Two ranks, and rank 0 speaks for both, before weights load; nothing is changed."""
    run_dir = tmp_path / "torn"
    shutil.copytree(reference, run_dir)
    for adapter in run_dir.glob("checkpoints/step_*/adapter/adapter_model.safetensors"):
        adapter.write_bytes(adapter.read_bytes()[:-1])

    def state():
        places = ("checkpoints", "samples", "*.jsonl", "config.yaml", "environment.json")
        files = [path for place in places for path in (run_dir.glob(place))]
        files += [path for folder in files for path in folder.rglob("*")]
        return {path: path.read_bytes() for path in files if path.is_file()}

    before = state()
    ended = program.run(run_dir, *STRICT, "steps=8")
    assert "exitcode  : 2" in ended.output
    (said,) = [line for line in ended.output.splitlines() if line.startswith("omnirl-hpc train: ")]
    assert (
        f"run_dir={run_dir} holds a run that cannot go on: {run_dir}/checkpoints has no whole checkpoint"
        in said
    )
    assert "step_000006 has " in said and "adapter_model.safetensors, says rank 0 on " in said
    assert said.endswith(
        "go back with checkpoint.resume_step=N to a step that is whole, or take another run_dir"
    )
    assert state() == before


def test_stopped_again_and_again(program, reference, tmp_path):
    run_dir = tmp_path / "stopped"
    rare = "checkpoint.every=3"
    # A user's STOP between two updates of step 1: the step is given up.
    ended = program.finish(run_dir, *STRICT, rare, faults=("stop:actor:1:1",))
    assert f"stopped: everything is saved in {run_dir}" in ended.output
    assert not (run_dir / "STOP").exists()
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [0]
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000001"

    # USR1 to one rank in the first micro-batch after that: stopped twice in a row, no step done between.
    ended = program.finish(
        run_dir, *STRICT, rare, faults=("usr1:rollout:1:1",), SLURM_JOB_ID="77", SLURM_RESTART_COUNT="2"
    )
    assert "stopped for the system" in ended.output
    (run_dir / "REQUEUE.77.2").unlink()  # as the batch shell does
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [0]

    # TERM to one rank while it saves.
    ended = program.finish(run_dir, *STRICT, rare, faults=("term:save:3:1",))
    assert "stopped by SIGTERM: everything is saved" in ended.output
    assert not list(run_dir.glob("REQUEUE.*.0"))
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000003"

    program.finish(run_dir, *STRICT, rare)
    assert_same_run(run_dir, reference)


def test_a_rank_dies_in_each_phase(program, reference, tmp_path):
    """The job ends by itself, and goes on from its last checkpoint."""
    run_dir = tmp_path / "deaths"
    for fault in ("die:rollout:1:1", "die:actor:2:0", "die:sync:3:1"):
        with program.start(
            run_dir, *STRICT, "checkpoint.every=1", faults=(f"pause:rollout:{fault.split(':')[2]}:0", fault)
        ) as job:
            job.wait_for(run_dir / "PAUSED")
            go_on(run_dir)
            ended = job.wait(DEAD_RANK_SECONDS)
        assert ended.code != 0
        assert "-9" in ended.output  # torchrun names the signal
        assert (run_dir / "checkpoints" / "latest").read_text() == f"step_{int(fault.split(':')[2]):06d}"
    program.finish(run_dir, *STRICT, "checkpoint.every=1")
    assert_same_run(run_dir, reference)


def test_resident_and_swapped_are_the_same(program, reference, tmp_path):
    """Stopped in the rollout of a step, where the resident actor has not been touched since the step
    before.
    """
    run_dir = tmp_path / "resident"
    program.finish(run_dir, *STRICT, "residency=resident", faults=("stop:rollout:3:0",))
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000003"
    program.finish(run_dir, *STRICT, "residency=resident")
    assert_same_run(run_dir, reference)


def test_checkpoints_in_the_background_are_the_same(program, reference, tmp_path):
    """Resumed from one that was written while training went on."""
    run_dir = tmp_path / "background"
    background = ("checkpoint.asynchronous=true", "checkpoint.every=1", "checkpoint.keep=3")
    program.finish(run_dir, *STRICT, *background)
    assert_same_run(run_dir, reference)
    written = "checkpoints/step_000005/adapter/adapter_model.safetensors"
    assert (run_dir / written).read_bytes() == (reference / written).read_bytes()
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["latest"] + [
        f"step_00000{n}" for n in (4, 5, 6)
    ]
    program.finish(run_dir, *STRICT, "checkpoint.resume_step=5")
    assert_same_run(run_dir, reference)


def test_two_ranks_then_one_then_two(program, reference, tmp_path):
    """Back to step 2, which is asked for; two steps on one rank; the rest on two."""
    run_dir = tmp_path / "ranks"
    shutil.copytree(reference, run_dir)
    program.finish(run_dir, *STRICT, "checkpoint.resume_step=2", "steps=4", ranks=1)
    checkpoints = run_dir / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step_000004"
    assert [read_state(checkpoints / f"step_00000{n}")["world_size"] for n in (2, 4)] == [2, 1]
    assert len(list(checkpoints.glob("abandoned_step_*"))) == 4  # 3 to 6
    program.finish(run_dir, *STRICT)

    metrics, straight = lines(run_dir / "metrics.jsonl"), lines(reference / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(6))
    assert (
        metrics[2]["reward/mean"] == straight[2]["reward/mean"]
    )  # samples do not depend on the number of ranks
    hashes = {(h["step"], h["tensor"]): h["hash"] for h in lines(run_dir / "hashes.jsonl")}
    expected = {(h["step"], h["tensor"]): h["hash"] for h in lines(reference / "hashes.jsonl")}
    assert hashes.keys() == expected.keys()
    for tensor in ("noise", "embeddings", "latents", "log_probs", "images", "rewards", "advantages"):
        assert hashes[2, tensor] == expected[2, tensor]
    ours, theirs = (
        torch.cat(
            [t.flatten() for _, t in sorted(load_adapter(folder / "checkpoints/step_000006/adapter").items())]
        )
        for folder in (run_dir, reference)
    )
    assert (ours - theirs).norm() <= OTHER_RANKS_BOUND * theirs.norm()


def test_a_running_mean_and_the_best_score_survive_a_stop(program, tmp_path):
    """Stopped in the second step and in the third one's evaluation: what follows is as if it had not been,
    evaluations too.

    The third step was trained, and is not trained again.
    """
    evaluation = (
        "evaluation.every=1",
        "evaluation.num_prompts=2",
        "evaluation.num_inference_steps=2",
        "actor.ema_decay=0.9",
    )
    arguments = (*evaluation, "determinism=strict", "steps=4", "checkpoint.every=2")
    program.finish(tmp_path / "straight", *arguments)
    program.finish(tmp_path / "stopped", *arguments, faults=("stop:actor:1:0",))
    for fault in ("stop:sync:2:0", "term:evaluation:2:1"):  # twice in a row, the second time in the middle
        program.finish(tmp_path / "stopped", *arguments, faults=(fault,))
        assert (tmp_path / "stopped/checkpoints/latest").read_text() == "step_000003"
        assert [line["step"] for line in lines(tmp_path / "stopped/metrics.jsonl")] == [0, 1]
    ended = program.finish(tmp_path / "stopped", *arguments)
    assert "going on from step 3 of 4" in ended.output and "step    3/4" in ended.output
    code, said = compare(tmp_path / "straight", tmp_path / "stopped")
    assert code == 0, said
    ours, theirs = (tmp_path / name / "checkpoints" for name in ("stopped", "straight"))
    for name in ("best", "step_000004/ema/adapter_model.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert read_state(ours / "step_000004")["best"] == read_state(theirs / "step_000004")["best"]


def test_a_run_starts_from_an_adapter(program, reference, tmp_path):
    adapter = reference / "checkpoints/step_000006/adapter"
    program.finish(tmp_path / "warm", f"init_adapter={adapter}", "steps=1", "determinism=strict", ranks=1)
    start = tmp_path / "warm/checkpoints/step_000000"
    given, taken = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter, start / "adapter")
    )
    assert given.keys() == taken.keys() and all(torch.equal(given[name], taken[name]) for name in given)
    assert read_state(start)["schedule"]["last_epoch"] == 0  # the adapter alone, with a new optimizer
    assert "version 0: 24 LoRA modules bound" in (tmp_path / "warm/log/rank_0.log").read_text()


def test_a_folder_of_another_run_is_refused_by_the_names_of_the_keys(program, reference):
    before = (reference / "metrics.jsonl").read_bytes()
    ended = program.run(
        reference,
        *STRICT,
        "sampling.noise_level=0.5",
        "actor.lora.alpha=32",
        "logging.samples_every=1",
        ranks=1,
    )
    assert ended.code == 2
    (line,) = ended.output.splitlines()
    assert "actor.lora.alpha=32 (the run has 16); sampling.noise_level=0.5 (the run has 0.7)" in line
    assert "samples_every" not in line
    assert (reference / "metrics.jsonl").read_bytes() == before


def test_a_step_that_is_not_there_is_named_in_seconds(program, reference):
    ended = program.run(reference, *STRICT, "checkpoint.resume_step=7", ranks=1)
    assert ended.code == 2
    (line,) = ended.output.splitlines()
    assert "checkpoint.resume_step=7" in line and line.endswith("step_000005, step_000006")
