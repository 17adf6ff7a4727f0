"""Tests that need a real Slurm and root: left out, with a line that says so, where they cannot run; under CI
they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import apptainer
from tests.slurm.cluster import TWO_RANKS, Cluster

TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey", "mpirun", "ip", "nsenter", "unshare")
MISSING = next(
    (f"{tool} is missing (tests/slurm/install.sh)" for tool in TOOLS if shutil.which(tool) is None), None
)
PROBLEM = "the pretend hosts can be made by root only" if os.geteuid() else MISSING
LEFT_OUT = PROBLEM is not None and os.environ.get("CI", "").lower() not in ("1", "true")
NEED_SLURM = ["test_jobs.py"]

# Unlike Slurm it cannot be had everywhere: without it CI, too, goes on with a stand-in, and says so.
NO_APPTAINER = PROBLEM or apptainer.problem()
NEED_APPTAINER = ["test_containers.py"]

collect_ignore = (NEED_SLURM if LEFT_OUT else []) + (NEED_APPTAINER if NO_APPTAINER else [])


def pytest_terminal_summary(terminalreporter) -> None:
    if LEFT_OUT:
        terminalreporter.write_line(f"left out: tests/slurm/{{{','.join(NEED_SLURM)}}}: {PROBLEM}")
    if NO_APPTAINER:
        instead = "" if LEFT_OUT else "; only a STAND-IN for it is tested (test_jobs.py: test_in_a_container)"
        terminalreporter.write_line(f"left out: tests/slurm/{NEED_APPTAINER[0]}: {NO_APPTAINER}{instead}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pretend hosts and a login host, up for the whole session."""
    if PROBLEM is not None:
        pytest.fail(PROBLEM)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), shared=tmp_path_factory.getbasetemp())
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed job, by `srun python`, as a user submits it first: the job makes the model and the
    prompts itself.
    """
    run_dir = tmp_path_factory.mktemp("slurm_runs") / "reference"
    job = cluster.submit("sbatch/flowgrpo_tiny.sh", run_dir, "checkpoint.every=1")
    assert job.wait() == 0, job.output()
    cluster.environ |= {"MODEL": str(run_dir / "model"), "PROMPTS": str(run_dir / "prompts.parquet")}
    return run_dir


@pytest.fixture(scope="session")
def reference_of_two_ranks(
    cluster: Cluster, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same with one rank on each host, for tests that start jobs again and again."""
    run_dir = tmp_path_factory.mktemp("slurm_runs") / "reference_of_two_ranks"
    job = cluster.submit("sbatch/flowgrpo_tiny.sh", run_dir, options=TWO_RANKS)
    assert job.wait() == 0, job.output()
    return run_dir
