"""Shell scripts, as far as they can be judged without running them; tests/slurm runs them."""

from __future__ import annotations

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
