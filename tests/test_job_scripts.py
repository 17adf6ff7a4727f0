"""sbatch/ with stand-ins for Slurm's commands: what can be seen without Slurm. The rest: tests/slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import omnirl_hpc
from omnirl_hpc.config.quoting import setting
from tests.test_scripts import JOBS

ROOT = Path(omnirl_hpc.__file__).parent.parent

# `srun` does what $RANKS says in place of the ranks; a requeued job is ended as Slurm does it.
STAND_INS = {
    "scontrol": 'case $1 in requeue) echo "requeued $2"; kill -TERM $PPID ;; show) echo localhost ;; esac',
    "squeue": 'date --date="+${LIMIT:-3600} seconds" +%FT%T',
    "srun": 'exec bash -c "$RANKS" ranks "$@"',
}
# What a training script is, with a header of its own.
SCRIPT = """#!/usr/bin/env bash
#SBATCH --signal=B:USR1@300
set -euo pipefail
OMNIRL_ROOT={root}
source "$OMNIRL_ROOT/sbatch/common.sh"
train steps=3
"""
ASKS_FOR_A_REQUEUE = 'touch "$RUN_DIR/REQUEUE.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(tmp_path) -> Start:
    """`start(script, **environ)`: a batch shell, as slurmd starts it."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, does in STAND_INS.items():
        (stand_ins / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (stand_ins / name).chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(SCRIPT.format(root=ROOT))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    job = {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"},
        **{"SLURM_JOB_NODELIST": "localhost", "SLURM_SUBMIT_DIR": str(tmp_path), "PYTHON": sys.executable},
        **{
            "RECIPE": "flowgrpo_tiny",
            "MODEL": "/model",
            "PROMPTS": "/prompts",
            "RUN_DIR": str(tmp_path / "run"),
        },
        "RANKS": "true",
    }

    def begin(path: Path = script, **environ: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(path)],
            cwd=tmp_path,
            env=kept | job | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return begin


@pytest.fixture
def ended(start) -> Callable[..., tuple[int, str]]:
    def run(path: Path | None = None, **environ: str) -> tuple[int, str]:
        process = start(**({"path": path} if path else {}), **environ)
        said = process.communicate(timeout=120)[0]
        return process.returncode, said

    return run


def last(said: str) -> str:
    return said.splitlines()[-1][len("12:00:00 ") :]


def test_ranks_get_every_knob_as_it_is_and_all_that_is_exported(ended, tmp_path):
    """SLURM_EXPORT_ENV is what `sbatch --export=NONE` leaves for srun."""
    name = 'my run (1), a=b it\'s ünï {a} a#b "q"\\'
    ranks = (
        'printf "<%s>\\n" "$@"; echo "${SLURM_EXPORT_ENV-} ${SRUN_EXPORT_ENV-} $HF_HUB_OFFLINE $PYTHONPATH"'
    )
    environ = {"RUN_DIR": f"{tmp_path}/{name}", "MODEL": "-m", "PROMPTS": "???", "SLURM_EXPORT_ENV": "NONE"}
    code, said = ended(**environ, SRUN_EXPORT_ENV="NONE", RANKS=ranks, PYTHONPATH="/mine")
    assert code == 0, said
    for key, value in (
        ("recipe", "flowgrpo_tiny"),
        ("run_dir", f"{tmp_path}/{name}"),
        ("model.path", "./-m"),
        ("data.prompts", "./???"),
    ):
        assert f"<{setting(key, value)}>\n" in said
    assert f"<steps=3>\n  1 {ROOT}:/mine\n" in said
    assert last(said) == "the job ended with exit code 0"
    assert not list((tmp_path / name).iterdir())


def test_a_knob_that_was_not_passed_on_is_explained(ended):
    code, said = ended(MODEL="", SLURM_EXPORT_ENV="RUN_DIR")
    assert code == 2
    assert "sbatch --export=RUN_DIR passes on what it names; --export=ALL,… all" in said


@pytest.mark.parametrize(
    ("knob", "sentence"),
    [
        ({"MAX_REQUEUES": "abc"}, "job: MAX_REQUEUES=abc must be a whole number"),
        ({"MAX_REQUEUES": "-1"}, "job: MAX_REQUEUES=-1 must be a whole number"),
        ({"MAX_IDLE_STARTS": "1.5"}, "job: MAX_IDLE_STARTS=1.5 must be a whole number"),
        ({"PYTHON": "/not/there"}, "job: PYTHON=/not/there does not exist on "),
        ({"LAUNCHER": "ssh"}, "job: LAUNCHER=ssh is not known"),
        ({"CONTAINER": "/not/there.sif"}, "CONTAINER=/not/there.sif"),
        ({"RUN_DIR": "/dev/null/run"}, "job: RUN_DIR=/dev/null/run cannot be made"),
    ],
)
def test_a_wrong_knob_is_refused_before_ranks_start(ended, knob, sentence):
    code, said = ended(**knob, RANKS="echo STARTED")
    assert code == 2 and sentence in said and "STARTED" not in said
    assert last(said) == "the job ended with exit code 2"


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_a_script_submitted_from_elsewhere_says_what_it_needs(ended, tmp_path, script):
    code, said = ended(script, SLURM_ARRAY_TASK_ID="0")
    assert (code, said) == (2, f"OMNIRL_ROOT={tmp_path} is no checkout: submit from it, or set OMNIRL_ROOT\n")


def test_max_requeues(ended):
    asking = {"RANKS": ASKS_FOR_A_REQUEUE}
    code, said = ended(**asking, MAX_REQUEUES="08")
    assert code == 0 and "requeued 7\n" in said and "ended" not in said
    code, said = ended(**asking, MAX_REQUEUES="0")
    assert code == 1 and "not requeued (MAX_REQUEUES=0): the run is saved" in said and "already" not in said
    code, said = ended(**asking, MAX_REQUEUES="2", SLURM_RESTART_COUNT="2")
    assert code == 1 and "requeued 2 times already (MAX_REQUEUES=2): the run is saved" in said


def test_starts_without_a_step_are_not_requeued_for_ever(ended, tmp_path):
    """A newer checkpoint begins the count again, and so does another job with the same number."""

    def requeued(restart: int, step: int | None = None) -> bool:
        save = f'mkdir -p "$RUN_DIR/checkpoints"; printf step_{step} >"$RUN_DIR/checkpoints/latest"; '
        ranks = ("" if step is None else save) + ASKS_FOR_A_REQUEUE
        code, said = ended(RANKS=ranks, SLURM_RESTART_COUNT=str(restart), MAX_IDLE_STARTS="2")
        assert code == (0 if "requeued 7\n" in said else 1), said
        assert code == 0 or "no step in 2 starts (MAX_IDLE_STARTS=2)" in said
        return code == 0

    assert requeued(0) and requeued(1, step=3) and requeued(2) and not requeued(3)
    assert not list((tmp_path / "run").glob("STARTS.*"))
    assert requeued(0) and not requeued(1)


def warn(process: subprocess.Popen, run_dir: Path) -> None:
    """As Slurm does, once the ranks are there."""
    end = time.monotonic() + 60
    while not (run_dir / "started").exists():
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)


def read_until(process: subprocess.Popen, sentence: str) -> None:
    said = ""
    while sentence not in said:
        assert (line := process.stdout.readline()), f"ended without it: {said}"
        said += line


WAITS = 'touch "$RUN_DIR/started"; until [ -e "$RUN_DIR/STOP.7.0" ]; do sleep 0.02; done; '


def test_a_warning_reaches_the_ranks_of_a_disk_without_a_free_inode(start, small_disk):
    """And the shell that a full disk does not end goes on to its last line."""
    run_dir = small_disk(kib=64, inodes=8) / "run"
    fill = 'touch "$RUN_DIR/started"; i=0; while touch "$RUN_DIR/file$((i += 1))"; do :; done; '
    process = start(RUN_DIR=str(run_dir), RANKS=fill + WAITS + "exit 1")
    warn(process, run_dir)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "No space left on device" in said
    assert last(said) == "the job ended with exit code 1"


def test_a_warning_that_cannot_be_passed_on_does_not_end_the_shell(start, tmp_path):
    run_dir = tmp_path / "run"
    gone = 'rm "$RUN_DIR"/ARMED.*; touch "$RUN_DIR/started"; '
    process = start(RANKS=gone + "until [ -e told ]; do sleep 0.02; done; exit 3")
    warn(process, run_dir)
    read_until(process, f"the ranks cannot be told: {run_dir}/STOP.7.0 cannot be made")
    (tmp_path / "told").touch()
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 3
    assert last(said) == "the job ended with exit code 3"


def test_a_warning_due_at_the_start_is_refused(start):
    process = start(LIMIT="300", RANKS="echo STARTED")
    read_until(process, "waiting a minute for that")
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "STARTED" not in said
    assert "job: the warning comes 300 s before the end (--signal) of a job of " in said


@pytest.mark.parametrize("environ", [{"LIMIT": "400"}, {"LIMIT": "300", "SBATCH_SIGNAL": "B:USR1@60"}])
def test_a_later_one_is_not_waited_for(ended, environ):
    code, said = ended(**environ)
    assert code == 0 and "waiting a minute" not in said


def test_folders_for_a_container_may_have_commas_and_colons(ended, tmp_path):
    image, apptainer = tmp_path / "image.sif", tmp_path / "bin/apptainer"
    for file in (image, apptainer):
        file.touch(0o755)
    environ = {"CONTAINER": str(image), "RUN_DIR": f"{tmp_path}/a,b:c", "PROMPTS": "/not/there/prompts"}
    code, said = ended(**environ, RANKS='printf "<%s>\\n" "$@"')
    assert code == 0, said
    assert f"<{tmp_path},{ROOT},{tmp_path}/a\\,b\\:c>\n" in said
