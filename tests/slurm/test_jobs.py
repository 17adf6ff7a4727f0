"""The job scripts on a real Slurm, two hosts with two ranks each: launchers, the ways to stop, faults, chains.

What needs no Slurm (every phase a rank can die in, torn checkpoints, a full disk) is tested in tests/runs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.runs.program import DEAD_RANK_SECONDS, ROOT, compare, lines
from tests.slurm.cluster import SMALL, Job

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TINY = "sbatch/flowgrpo_tiny.sh"
ONE_RANK = ("--nodes=1", "--ntasks-per-node=1")
LAST = "checkpoints/step_000003/adapter/adapter_model.safetensors"


def assert_same_run(run_dir: Path, reference: Path) -> None:
    """Equal to the bit, every step once, nothing left behind."""
    code, said = compare(reference, run_dir)
    assert code == 0, said
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [0, 1, 2]
    assert (run_dir / LAST).read_bytes() == (reference / LAST).read_bytes()
    assert not [path.name for path in run_dir.iterdir() if path.name.startswith(("STOP", "REQUEUE", "lock"))]


@pytest.mark.parametrize(("launcher", "identity"), [("torchrun", "torchrun"), ("mpirun", "mpi"), ("pmix", "srun")])
def test_launchers_give_the_same_run(cluster, reference, tmp_path, launcher, identity):
    """As `srun python`, which made the reference."""
    job = cluster.submit(TINY, tmp_path / "run", LAUNCHER=launcher)
    assert job.wait() == 0, job.output()
    assert f"│ launcher    │ {identity} " in job.output()
    assert_same_run(tmp_path / "run", reference)


def test_a_warned_and_a_preempted_job_saves_and_goes_on_under_the_same_number(cluster, reference, tmp_path):
    """Both in the middle of step 1: the first stop, and right after it another, with no step done between."""
    run_dir = tmp_path / "run"
    job = cluster.submit(TINY, run_dir, faults=("pause:rollout:1:0",))
    job.wait_for(run_dir / "PAUSED")
    job.signal("USR1", "--batch")  # as before the time limit
    job.wait_for(run_dir / f"STOP.{job.number}.0")
    (run_dir / "GO").touch()
    job.wait_for_state("PENDING")
    (run_dir / "PAUSED").unlink()
    (run_dir / "GO").unlink()

    job.wait_for(run_dir / "PAUSED")
    urgent = cluster.submit_other("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    job.wait_for(run_dir / f"STOP.{job.number}.1")
    (run_dir / "GO").touch()
    assert urgent.wait() == 0, urgent.output()

    assert job.wait() == 0, job.output()
    assert job.show()["Restarts"] == "2"
    said = job.output()
    assert said.count(f"job {job.number}, start ") == 3
    assert [said.count(f"step    {step}/3") for step in (1, 2, 3)] == [1, 1, 1]
    assert_same_run(run_dir, reference)


def test_a_chain_goes_on_in_the_next_job_and_ends_with_the_run(cluster, reference, tmp_path):
    """USR1 to the first job while its rank starts: it is seen before the first step. The second completes the run."""
    run_dir = tmp_path / "run"
    settings = ("recipe=flowgrpo_tiny", f"run_dir={run_dir}", "ranks_per_node=1", "gpus_per_node=0", "cpus_per_task=1", "time=10")
    data = (f"model.path={cluster.environ['MODEL']}", f"data.prompts={cluster.environ['PROMPTS']}")
    command = ("-m", "omnirl_hpc", "submit", *settings, *data, *SMALL, "steps=1", f"python={sys.executable}", "chain=3")
    said = cluster.call(sys.executable, *command)
    first, second, third = (Job(cluster, line.split(",")[0].split()[1]) for line in said.splitlines())
    first.wait_for(run_dir / "log/rank_0.log")
    first.signal("USR1", "--batch")
    assert first.wait() == 1, first.output()
    assert "requeued 0 times already (MAX_REQUEUES=0): the run is saved" in first.output()
    assert (run_dir / "checkpoints/latest").read_text() == "step_000000"
    assert second.wait() == 0, second.output()
    third.wait()
    assert third.show()["JobState"] == "CANCELLED"
    assert len(lines(run_dir / "metrics.jsonl")) == 1


def test_a_run_that_minds_the_time_limit_itself(cluster, reference, tmp_path):
    """`stop_before` longer than the whole job: over at once."""
    options = (*ONE_RANK, "--time=10", "--signal=CONT@1")
    job = cluster.submit(TINY, tmp_path / "run", "stop_before=3600", options=options, MAX_REQUEUES="0")
    assert job.wait() == 1, job.output()
    assert "stopped for the system: everything is saved" in job.output()
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000000"


def test_stopped_by_people_and_by_a_death_and_submitted_again(cluster, reference, tmp_path):
    run_dir = tmp_path / "run"

    # A file STOP. Meanwhile a second job on the same folder is refused, and the first does not notice.
    job = cluster.submit(TINY, run_dir, faults=("pause:rollout:1:0",))
    job.wait_for(run_dir / "PAUSED")
    second = cluster.submit(TINY, run_dir, options=ONE_RANK)
    assert second.wait() == 2, second.output()
    assert f"run_dir={run_dir} is in use by slurm job {job.number} on hpc01" in second.output()
    (run_dir / "STOP").touch()
    (run_dir / "GO").touch()
    assert job.wait() == 0, job.output()
    assert f"stopped: everything is saved in {run_dir}" in job.output()
    assert job.show()["Restarts"] == "0"
    assert (run_dir / "checkpoints/latest").read_text() == "step_000001"

    # A rank is killed in step 2.
    every = "checkpoint.every=1"
    job = cluster.submit(TINY, run_dir, every, faults=("pause:rollout:2:0", "die:rollout:2:3"))
    (run_dir / "PAUSED").unlink()
    (run_dir / "GO").unlink()
    job.wait_for(run_dir / "PAUSED")
    (run_dir / "GO").touch()
    begin = time.monotonic()
    assert job.wait(DEAD_RANK_SECONDS) not in (0, 2), job.output()
    print(f"the death of a rank ended the job after {time.monotonic() - begin:.0f} s")
    assert "hpc02: task 3: Killed" in job.output()
    assert job.show()["Restarts"] == "0"

    # TERM to the ranks.
    (run_dir / "PAUSED").unlink()
    (run_dir / "GO").unlink()
    job = cluster.submit(TINY, run_dir, every, faults=("pause:rollout:2:0",))
    job.wait_for(run_dir / "PAUSED")
    job.signal("TERM")
    (run_dir / "GO").touch()
    assert job.wait() == 0, job.output()
    assert f"stopped: everything is saved in {run_dir}" in job.output()
    assert job.show()["Restarts"] == "0"

    job = cluster.submit(TINY, run_dir, every)
    assert job.wait() == 0, job.output()
    assert_same_run(run_dir, reference)


def test_repro_ends_with_the_answer(cluster, tmp_path):
    environ = {"WAIT": "1", "OPTIONS": " ".join(ONE_RANK)}
    command = ("bash", "sbatch/repro.sh", *SMALL, "steps=1")
    same = cluster.run(*command, RUN_DIR=str(tmp_path / "same"), **environ)
    assert same.returncode == 0, same.stdout
    assert Job(cluster, same.stdout.split()[-1]).output().startswith("equal: ")
    other = cluster.run(*command, RUN_DIR=str(tmp_path / "other"), SECOND="seed=1", **environ)
    assert other.returncode == 1, other.stdout
    assert Job(cluster, other.stdout.split()[-1]).output().startswith("different: step 0, phase rollout, tensor noise: ")


def test_in_a_container(cluster, reference, tmp_path):
    """A stand-in for apptainer, which notes how it is called: it says nothing about a real image."""
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "apptainer $1 $2 $3 $4 $5"\nshift 5\nexec {sys.executable} "$@"\n')
    stand_in.chmod(0o755)
    (tmp_path / "image.sif").touch()
    environ = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "CONTAINER": str(tmp_path / "image.sif"), "BINDS": "/opt/a:/b"}
    job = cluster.submit(TINY, tmp_path / "run", "steps=1", options=ONE_RANK, **environ)
    assert job.wait() == 0, job.output()
    binds = f"{ROOT},{tmp_path}/run,{reference}/model,{reference},/opt/a:/b"
    assert f"\napptainer exec --bind {binds} {tmp_path}/image.sif python\n" in job.output()


def test_sweep_trains_one_combination_in_each_task(cluster, reference, tmp_path):
    options = (*ONE_RANK, "--gpus-per-node=0", "--array=0-1")
    job = cluster.submit("sbatch/sweep.sh", tmp_path, "steps=1", "seed=3,4", options=options, RECIPE="flowgrpo_tiny")
    for task in ("0", "1"):
        part = Job(cluster, f"{job.number}_{task}")
        assert part.wait() == 0, part.output()
        config = (tmp_path / f"00{task}/config.yaml").read_text()
        assert f"\nseed: {3 + int(task)}\n" in config
        assert len(lines(tmp_path / f"00{task}/metrics.jsonl")) == 1


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "sbatch").glob("*.sh") if path.name != "common.sh"))
def test_slurm_would_take_the_script(cluster, script):
    cluster.call("sbatch", "--test-only", f"sbatch/{script}")
