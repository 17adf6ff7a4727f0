"""Shell scripts, as far as they can be judged without running them; tests/slurm runs them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import omnirl_hpc

ROOT = Path(omnirl_hpc.__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("sbatch/*.sh"), *ROOT.glob("tests/slurm/**/*.sh"), ROOT / ".ci/run"])
JOBS = [path for path in SCRIPTS if path.parent.name == "sbatch" and path.name != "common.sh"]


def options(script: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script.read_text(), re.MULTILINE))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_it_and_it_stops_at_errors(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.search(r"^set -e?uo pipefail$", script.read_text(), re.MULTILINE)


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_headers(script):
    found = options(script)
    assert found.keys().isdisjoint({"account", "partition", "qos", "constraint"}), "a site's affair"
    assert found["output"].startswith("logs/%x-%") and found["open-mode"] == "append"
    assert found["job-name"] == script.stem


@pytest.mark.parametrize(
    "script",
    [path for path in JOBS if path.name not in ("repro.sh", "evaluate.sh")],
    ids=lambda path: path.name,
)
def test_jobs_that_train_are_warned_and_requeued(script):
    found = options(script)
    assert "requeue" in found and re.fullmatch(r"B:USR1@\d+", found["signal"])
    gpus, tasks = found.get("gpus-per-node"), found["ntasks-per-node"]
    assert gpus in (None, tasks), "one task for each GPU"


def test_the_folder_for_logs_is_in_the_checkout():
    """Slurm does not make it, and ends a job without a word where it is missing."""
    assert (ROOT / "logs/.gitkeep").exists()


def launch_command(tasks: int, per_node: int | None) -> subprocess.CompletedProcess[str]:
    """How common.sh would start torchrun for a job of two nodes. What it would ask Slurm is set."""
    environ = {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_END_TIME": "4000000000",
        "SLURM_RESTART_COUNT": "3",
        "SLURM_NTASKS": f"{tasks}",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
        "LAUNCHER": "torchrun",
    } | ({} if per_node is None else {"SLURM_NTASKS_PER_NODE": f"{per_node}"})
    program = 'source sbatch/common.sh; choose_launcher train; echo "${launch[@]}"'
    return subprocess.run(
        ["bash", "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("tasks", "per_node"), [(3, 2), (3, None), (1, None)])
def test_torchrun_starts_all_tasks_or_is_refused(tasks, per_node):
    """`sbatch --nodes=2 --ntasks=3 --ntasks-per-node=2` would train on four ranks,
    without the last on two.
    """
    ended = launch_command(tasks, per_node)
    assert ended.returncode == 2 and f"{tasks} tasks on 2 nodes are not" in ended.stderr, ended


@pytest.mark.parametrize("per_node", [2, None])
def test_torchrun_of_one_start_of_a_job_meets_no_other(per_node):
    ended = launch_command(4, per_node)
    assert ended.returncode == 0, ended
    assert "--nnodes=2 --nproc-per-node=2 " in ended.stdout and " --rdzv-id=7.3 " in ended.stdout
