"""The job scripts on a real Slurm, two hosts with two ranks each: launchers, the ways to stop, faults,
chains.

What needs no Slurm is tested without it: every phase that a rank can die in (tests/runs), torn checkpoints, a
full disk (tests/checkpoints/test_checkpointer.py).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from omnirl_hpc.config.quoting import setting
from omnirl_hpc.launch.identity import slurm_port
from tests.runs.program import DEAD_RANK_SECONDS, ROOT, assert_same_run, go_on, lines
from tests.slurm.cluster import SMALL, TWO_RANKS, Cluster, Job

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TINY = "sbatch/flowgrpo_tiny.sh"
ONE_RANK = ("--nodes=1", "--ntasks-per-node=1")
EVERY = "checkpoint.every=1"


def train_command(cluster: Cluster, run_dir: Path) -> tuple[str, ...]:
    """What common.sh makes of the tiny job, for a user's own srun."""
    environ = cluster.environ
    paths = (f"run_dir={run_dir}", f"model.path={environ['MODEL']}", f"data.prompts={environ['PROMPTS']}")
    settings = ("recipe=flowgrpo_tiny", *paths, "data.prompts_per_step=8", *SMALL, "steps=3")
    return (sys.executable, "-m", "omnirl_hpc", "train", *settings)


def test_an_mpirun_in_each_task_of_a_step_is_refused(cluster, reference, tmp_path):
    """Two runs of one rank in one folder, where the user meant one of two. On one node: mpirun starts its
    daemons on others by a step of its own, which would wait for this one.
    """
    step = ("srun", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--mpi=none", "mpirun", "-n", "1")
    ended = cluster.run(*step, *train_command(cluster, tmp_path / "run"))
    assert ended.returncode != 0, ended.stdout
    assert ended.stdout.count("MPI says 1 ranks (OMPI_COMM_WORLD_SIZE), the Slurm step has 2 tasks") == 2, (
        ended
    )
    assert not (tmp_path / "run").exists()


def test_mpirun_gives_the_same_run(cluster, reference, tmp_path):
    """As `srun python`, which made the reference."""
    job = cluster.submit(TINY, tmp_path / "run", LAUNCHER="mpirun")
    assert job.wait() == 0, job.output()
    assert "│ launcher    │ mpi " in job.output()
    assert_same_run(tmp_path / "run", reference)


def test_pmix_gives_the_same_run_on_another_port_than_one_that_is_taken(cluster, reference, tmp_path):
    job = cluster.submit(TINY, tmp_path / "run", options=("--hold",), LAUNCHER="pmix")
    port = slurm_port({"SLURM_JOB_ID": job.number})
    with cluster.taken_port("hpc01", port):
        cluster.call("scontrol", "release", job.number)
        assert job.wait() == 0, job.output()
    assert "│ launcher    │ srun " in job.output()
    assert re.search(rf"^  MASTER_PORT +{port + 1}$", job.output(), re.MULTILINE), job.output()
    assert_same_run(tmp_path / "run", reference)


def test_torchrun_loses_a_rank_and_gives_the_same_run(cluster, reference, tmp_path):
    """Also: the second job takes over the folder of a first one that did not end well."""
    run_dir = tmp_path / "run"
    job = cluster.submit(
        TINY, run_dir, EVERY, faults=("pause:rollout:1:0", "die:rollout:1:3"), LAUNCHER="torchrun"
    )
    job.wait_for(run_dir / "PAUSED")
    go_on(run_dir)
    assert job.wait(DEAD_RANK_SECONDS) not in (0, 2), job.output()
    assert "host      : hpc02" in job.output() and "Signal 9 (SIGKILL)" in job.output()
    assert job.show()["Restarts"] == "0"

    job = cluster.submit(TINY, run_dir, EVERY, LAUNCHER="torchrun")
    assert job.wait() == 0, job.output()
    assert "│ launcher    │ torchrun " in job.output() and "going on from step 1 of 3" in job.output()
    assert_same_run(run_dir, reference)


def test_a_warned_and_a_preempted_job_saves_and_goes_on_under_the_same_number(
    cluster, reference_of_two_ranks, tmp_path
):
    """While it starts, twice in the middle of step 1 with no step done between, and while it saves."""
    run_dir = tmp_path / "run"
    job = cluster.submit(
        TINY, run_dir, EVERY, options=TWO_RANKS, faults=("pause:rollout:1:0", "pause:save:2:0")
    )
    job.wait_for(run_dir / "lock")
    cluster.preempt(job)
    job.wait_for_start(1)
    assert not (run_dir / "metrics.jsonl").exists()

    job.wait_for(run_dir / "PAUSED")
    job.signal("USR1", "--batch")  # as before the time limit
    job.wait_for(run_dir / f"STOP.{job.number}.1")
    go_on(run_dir)
    job.wait_for_start(2)

    job.wait_for(run_dir / "PAUSED")
    cluster.preempt(job)
    go_on(run_dir)
    job.wait_for_start(3)
    assert len(lines(run_dir / "metrics.jsonl")) == 1

    job.wait_for(run_dir / "PAUSED")
    go_on(run_dir)
    job.wait_for(run_dir / "PAUSED")
    urgent = cluster.preempt(job)
    go_on(run_dir)
    assert urgent.wait() == 0
    assert (run_dir / "checkpoints/latest").read_text() == "step_000002"

    assert job.wait() == 0, job.output()
    assert job.show()["Restarts"] == "4"
    said = job.output()
    assert said.count(f"job {job.number}, start ") == 5
    assert [said.count(f"step    {step}/3") for step in (1, 2, 3)] == [1, 1, 1]
    assert_same_run(run_dir, reference_of_two_ranks)


def test_a_lost_node_requeues_the_job(cluster, reference_of_two_ranks, tmp_path):
    """By Slurm itself, within its own timeout."""
    run_dir = tmp_path / "run"
    job = cluster.submit(TINY, run_dir, EVERY, options=TWO_RANKS, faults=("pause:rollout:1:0",))
    job.wait_for(run_dir / "PAUSED")
    cluster.crash("hpc02")
    go_on(run_dir)
    job.wait_for_start(1)
    cluster.boot("hpc02")
    job.wait_for(run_dir / "PAUSED")
    go_on(run_dir)
    assert job.wait() == 0, job.output()
    assert "going on from step 1 of 3" in job.output()
    assert_same_run(run_dir, reference_of_two_ranks)


def test_a_chain_goes_on_in_the_next_job_and_ends_with_the_run(cluster, reference, tmp_path):
    """USR1 to the first job while its rank starts: it is seen before the first step. The second completes the
    run.

    Submitted from an empty folder, and with names that Hydra, the shell and Slurm would read as syntax.
    """
    run_dir = tmp_path / "q(1), it's {a} #b ünï"
    settings = (
        "recipe=flowgrpo_tiny",
        setting("run_dir", str(run_dir)),
        'job_name=it\'s"a"#1',
        "ranks_per_node=1",
        "gpus_per_node=0",
        "cpus_per_task=1",
        "time=10",
    )
    data = (f"model.path={cluster.environ['MODEL']}", f"data.prompts={cluster.environ['PROMPTS']}")
    command = (
        "-m",
        "omnirl_hpc",
        "submit",
        *settings,
        *data,
        *SMALL,
        "steps=1",
        "chain=3",
    )
    (tmp_path / "empty").mkdir()
    said = cluster.call("env", "--chdir", str(tmp_path / "empty"), sys.executable, *command, PYTHON="")
    first, second, third = (Job(cluster, line.split(",")[0].split()[1]) for line in said.splitlines())
    first.wait_for(run_dir / "log/rank_0.log")
    first.signal("USR1", "--batch")
    assert first.wait() == 1, first.output()
    assert "not requeued (MAX_REQUEUES=0): the run is saved" in first.output()
    assert first.show()["JobName"] == 'it\'s"a"#1'
    assert (run_dir / "checkpoints/latest").read_text() == "step_000000"
    assert second.wait() == 0, second.output()
    third.wait()
    assert third.show()["JobState"] == "CANCELLED"
    assert len(lines(run_dir / "metrics.jsonl")) == 1


def test_a_job_that_would_be_told_to_stop_at_once_is_refused(cluster, reference, tmp_path):
    """By the warning of the script's header, or by `stop_before` longer than the whole job."""
    warned = cluster.submit(TINY, tmp_path / "warned", options=(*ONE_RANK, "--time=2"))
    options = (*ONE_RANK, "--time=10", "--signal=CONT@1")
    job = cluster.submit(TINY, tmp_path / "run", "stop_before=3600", options=options)
    assert job.wait() == 2, job.output()
    assert re.search(
        r"stop_before=3600, and the job ends in \d+ s, which leaves no time to train", job.output()
    )
    assert warned.wait() == 2, warned.output()
    assert "the warning comes 120 s before the end (--signal) of a job of " in warned.output()
    assert warned.show()["Restarts"] == job.show()["Restarts"] == "0"


@pytest.mark.parametrize("launcher", ["srun", "mpirun -n 1"])
def test_ranks_get_what_is_exported_for_them_whatever_the_job_was_given(cluster, tmp_path, launcher):
    script = tmp_path / "script.sh"
    script.write_text(
        f"#!/usr/bin/env bash\nOMNIRL_ROOT={ROOT} PYTHON=true\nsource $OMNIRL_ROOT/sbatch/common.sh\n"
        f"echo shell; export -p; echo rank; {launcher} bash -c 'export -p'\n"
    )
    passed_on = "--export=OMPI_ALLOW_RUN_AS_ROOT,OMPI_ALLOW_RUN_AS_ROOT_CONFIRM,PATH"
    job = Job(
        cluster, cluster.call("sbatch", "--parsable", "--nodes=1", "--ntasks=1", passed_on, str(script))
    )
    assert job.wait() == 0, job.output()
    shell, rank = (set(said.splitlines()) for said in job.output().split("shell\n")[1].split("rank\n"))
    exported = {line for line in shell if not line.startswith(("declare -x SLURM", "declare -x SHLVL"))}
    assert exported <= rank, exported - rank
    assert any("HF_HUB_OFFLINE" in line for line in exported)


def test_stopped_by_people_and_by_a_death_and_submitted_again(cluster, reference_of_two_ranks, tmp_path):
    run_dir = tmp_path / "run"

    # A file STOP. Meanwhile a second job on the same folder is refused, and the first does not notice.
    job = cluster.submit(TINY, run_dir, options=TWO_RANKS, faults=("pause:rollout:1:0",))
    job.wait_for(run_dir / "PAUSED")
    second = cluster.submit(TINY, run_dir, options=ONE_RANK)
    assert second.wait() == 2, second.output()
    holder = rf"slurm job {job.number} of \w+, step 0 \(process \d+ on hpc01\)"
    refusal = f"run_dir={run_dir} is in use by {holder}: choose another run_dir"
    assert re.search(refusal, second.output()), second.output()
    # So is a second step of the same job, on its other node.
    step = ("srun", f"--jobid={job.number}", "--overlap", "--nodelist=hpc02", "--nodes=1", "--ntasks=1")
    ended = cluster.run(*step, *train_command(cluster, run_dir))
    assert ended.returncode == 2 and re.search(refusal, ended.stdout), ended.stdout
    (run_dir / "STOP").touch()
    go_on(run_dir)
    assert job.wait() == 0, job.output()
    assert f"stopped: everything is saved in {run_dir}" in job.output()
    assert job.show()["Restarts"] == "0"
    assert (run_dir / "checkpoints/latest").read_text() == "step_000001"

    # A rank is killed in step 2.
    job = cluster.submit(
        TINY, run_dir, EVERY, options=TWO_RANKS, faults=("pause:rollout:2:0", "die:rollout:2:1")
    )
    job.wait_for(run_dir / "PAUSED")
    go_on(run_dir)
    assert job.wait(DEAD_RANK_SECONDS) not in (0, 2), job.output()
    assert "hpc02: task 1: Killed" in job.output()
    assert job.show()["Restarts"] == "0"

    # TERM to the ranks, which Slurm sends for a preemption, too.
    job = cluster.submit(TINY, run_dir, EVERY, options=TWO_RANKS, faults=("pause:rollout:2:0",))
    job.wait_for(run_dir / "PAUSED")
    job.signal("TERM")
    go_on(run_dir)
    assert job.wait() == 0, job.output()
    assert f"stopped by SIGTERM: everything is saved in {run_dir}" in job.output()
    assert job.show()["Restarts"] == "0"

    job = cluster.submit(TINY, run_dir, EVERY, options=TWO_RANKS)
    assert job.wait() == 0, job.output()
    assert_same_run(run_dir, reference_of_two_ranks)


def test_repro_ends_with_the_answer(cluster, tmp_path):
    """Both chains side by side. WAIT=1 would end with the exit code of the last job."""
    command = ("bash", "sbatch/repro.sh", *SMALL, "steps=1")
    answers = {}
    for name, environ in (("same", {}), ("other", {"SECOND": "seed=1"})):
        said = cluster.call(*command, RUN_DIR=str(tmp_path / name), OPTIONS=" ".join(ONE_RANK), **environ)
        answers[name] = Job(cluster, said.split()[-1])
    assert answers["same"].wait() == 0, answers["same"].output()
    assert answers["same"].output().startswith("equal: ")
    assert answers["other"].wait() == 1, answers["other"].output()
    assert answers["other"].output().startswith("different: step 0, phase rollout, tensor noise: ")


def test_in_a_container(cluster, reference, tmp_path):
    """A stand-in for apptainer, which notes how it is called: it says nothing about a real image."""
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "apptainer $1 $2 $3 $4 $5"\nshift 5\nexec {sys.executable} "$@"\n')
    stand_in.chmod(0o755)
    (tmp_path / "image.sif").touch()
    environ = {
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "CONTAINER": str(tmp_path / "image.sif"),
        "BINDS": "/opt/a:/b",
        "SLURM_TMPDIR": "/not/bound",
    }
    job = cluster.submit(TINY, tmp_path / "run", "steps=1", options=ONE_RANK, **environ)
    assert job.wait() == 0, job.output()
    binds = f"{ROOT},{tmp_path}/run,{reference}/model,{reference},/opt/a:/b"
    assert f"\napptainer exec --bind {binds} {tmp_path}/image.sif python\n" in job.output()
    said = (
        "temporary files: SLURM_TMPDIR=/not/bound cannot be written to here (in a container it may need BINDS"
    )
    assert job.output().count(said) == 1


def test_the_preflight_by_hand_and_an_evaluation(cluster, reference, tmp_path):
    ranks = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    said = cluster.call(
        "srun",
        *ranks,
        sys.executable,
        "-m",
        "omnirl_hpc",
        "doctor",
        "recipe=flowgrpo_tiny",
        f"run_dir={tmp_path}/run",
    )
    assert re.search(r"ok +ranks +4 on 2 node\(s\): hpc01 \(0-1\), hpc02 \(2-3\)", said), said
    assert re.search(r"ok +run_dir +seen and writable by all ranks", said) and re.search(
        r"ok +all-reduce +gloo, 4 ranks", said
    ), said
    few = ("evaluation.num_prompts=4", "evaluation.num_inference_steps=3")
    job = cluster.submit("sbatch/evaluate.sh", reference, *few, OUT=str(tmp_path / "out"))
    assert job.wait() == 0, job.output()
    assert re.search(r"^\| adapter \| -0\.\d+ \|", job.output(), re.M), job.output()
    assert (tmp_path / "out/step_000003/comparison.jpg").exists()


def test_sweep_trains_one_combination_in_each_task(cluster, reference, tmp_path):
    """The last task of an array has the array's own number: it is warned, and requeued without the other."""
    options = (*ONE_RANK, "--gpus-per-node=0", "--array=0-1")
    array = cluster.submit(
        "sbatch/sweep.sh", tmp_path, "steps=1", "seed=3,4", options=options, RECIPE="flowgrpo_tiny"
    )
    tasks = [Job(cluster, f"{array.number}_{task}") for task in (0, 1)]
    tasks[1].wait_for(tmp_path / "001/log/rank_0.log")
    assert tasks[1].show()["JobId"] == array.number
    tasks[1].signal("USR1", "--batch")
    for task, restarts in ((0, "0"), (1, "1")):
        assert tasks[task].wait() == 0, tasks[task].output()
        assert tasks[task].show()["Restarts"] == restarts
        config = (tmp_path / f"00{task}/config.yaml").read_text()
        assert f"\nseed: {3 + task}\n" in config
        assert len(lines(tmp_path / f"00{task}/metrics.jsonl")) == 1


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (ROOT / "sbatch").glob("*.sh") if path.name != "common.sh")
)
def test_slurm_would_take_the_script(cluster, script):
    cluster.call("sbatch", "--test-only", f"sbatch/{script}")
