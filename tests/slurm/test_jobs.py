"""The job scripts on a real Slurm, two hosts with two ranks each: launchers, the ways to stop, faults, chains.

What needs no Slurm (every phase a rank can die in, torn checkpoints, a full disk) is tested in tests/runs.
"""

from __future__ import annotations

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


def test_srun_and_torchrun_give_the_same_run(cluster, reference, tmp_path):
    job = cluster.submit(TINY, tmp_path / "run", LAUNCHER="torchrun")
    assert job.wait() == 0, job.output()
    assert "│ torchrun" in job.output()
    assert_same_run(tmp_path / "run", reference)


def test_a_warned_job_saves_and_goes_on_under_the_same_number(cluster, reference, tmp_path):
    """USR1 to the batch shell, as before a time limit or a preemption, in the middle of step 1."""
    run_dir = tmp_path / "run"
    job = cluster.submit(TINY, run_dir, faults=("pause:rollout:1:0",))
    job.wait_for(run_dir / "PAUSED")
    job.signal("USR1", "--batch")
    job.wait_for(run_dir / f"STOP.{job.number}.0")
    (run_dir / "GO").touch()  # and stay: the second start goes through the same place
    assert job.wait() == 0, job.output()
    assert job.show()["Restarts"] == "1"
    said = job.output()
    assert said.count(f"job {job.number}, start ") == 2
    assert said.count("step    2/3") == 1, "the step that was given up is made once"
    assert_same_run(run_dir, reference)


def test_too_many_requeues_end_the_job(cluster, reference, tmp_path):
    """USR1 while the ranks start: it is seen before the first step."""
    run_dir = tmp_path / "run"
    job = cluster.submit(TINY, run_dir, options=ONE_RANK, MAX_REQUEUES="0")
    job.wait_for(run_dir / "log/rank_0.log")
    job.signal("USR1", "--batch")
    assert job.wait() == 1, job.output()
    assert "requeued 0 times already (MAX_REQUEUES=0): the run is saved" in job.output()
    assert (run_dir / "checkpoints/latest").read_text() == "step_000000"


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


def test_repro_ends_with_the_answer(cluster, reference, tmp_path):
    same = cluster.run("bash", "sbatch/repro.sh", *SMALL, "steps=2", RUN_DIR=str(tmp_path / "same"), WAIT="1")
    assert same.returncode == 0, same.stdout
    environ = {"RUN_DIR": str(tmp_path / "other"), "WAIT": "1", "SECOND": "seed=1", "OPTIONS": " ".join(ONE_RANK)}
    other = cluster.run("bash", "sbatch/repro.sh", *SMALL, "steps=1", **environ)
    assert other.returncode == 1, other.stdout
    answer = Job(cluster, other.stdout.split()[-1]).output()
    assert answer.startswith("different: step 0, phase rollout, tensor noise: ")


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
