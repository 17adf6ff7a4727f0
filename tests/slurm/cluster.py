"""A real Slurm on this machine (hosts/up.sh), and jobs in it, submitted as a user does: in the checkout, on a login host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable

import pytest

from tests.runs.program import DEADLINE, OURS, ROOT

HOSTS = Path(__file__).parent / "hosts"
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")

# 4 prompts x 2 samples: two for each of 4 ranks. On two cores, starting four ranks takes longer than the steps.
SMALL = (
    "model.height=32",
    "model.width=32",
    "data.prompts_per_step=4",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=3",
    "sampling.window.size=1",
    "sampling.window.last=2",
    "rollout.micro_batch_size=2",
    "actor.micro_batch_size=1",
    "actor.updates_per_step=1",
    "actor.lora.rank=4",
    "actor.optimizer.warmup_updates=8",  # a schedule that a wrong resume would lose
    "logging.samples_every=0",
    "timeout_seconds=120",
    "determinism=strict",
)

# Stands where a job script expects Python, and puts the faults of $FAULTS into `train`.
FAULTY_PYTHON = f"""#!/usr/bin/env bash
if [ "$3" = train ]; then exec '{sys.executable}' -m tests.runs.inject $FAULTS -- "${{@:3}}"; fi
exec '{sys.executable}' "$@"
"""


def wait_until(condition: Callable[[], object], what: str, seconds: float, output: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds:.0f} s for {what}: {output()}")
        time.sleep(0.2)


class Cluster:
    """Everything that tests do not vary is in `environ`, the environment of every command."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self._state = folder / "cluster"
        self._shared = ":".join(str(path) for path in (shared, ROOT, Path(sys.prefix), Path(sys.base_prefix)))
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith((*OURS, "SBATCH_"))}
        self.environ |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "SBATCH_OUTPUT": str(folder / "%x-%j.out")}
        self.environ |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }  # the pretend hosts know no other user
        self._faulty_python = folder / "python_with_faults"
        self._faulty_python.write_text(FAULTY_PYTHON)
        self._faulty_python.chmod(0o755)

    def up(self) -> None:
        command = [HOSTS / "up.sh", self._state, str(os.getpid())]
        subprocess.run(command, check=True, env=os.environ | {"SLURM_CI_SHARED": self._shared}, timeout=120)

    def down(self) -> None:
        subprocess.run([HOSTS / "down.sh", self._state], check=True, timeout=60)

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command on the login host, in the checkout."""
        return subprocess.run(
            [self._state / "bin/hpc", *command],
            cwd=ROOT,
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    def call(self, *command: str, **environ: str) -> str:
        """A command that must end well; what it said."""
        ended = self.run(*command, **environ)
        assert ended.returncode == 0, f"{command}: {ended.stdout}"
        return ended.stdout.strip()

    def submit(
        self,
        script: str,
        run_dir: Path,
        *overrides: str,
        options: tuple[str, ...] = (),
        faults: tuple[str, ...] = (),
        **environ: str,
    ) -> Job:
        """A job of four ranks, three steps where `overrides` says nothing else."""
        environ = {"RUN_DIR": str(run_dir), "FAULTS": " ".join(faults)} | environ
        if faults:
            environ["PYTHON"] = str(self._faulty_python)
        return Job(self, self.call("sbatch", "--parsable", *options, script, *SMALL, "steps=3", *overrides, **environ))

    def submit_other(self, *arguments: str) -> Job:
        """Anything but a run."""
        return Job(self, self.call("sbatch", "--parsable", *arguments))


class Job:
    """A submitted job, or a task of an array (`12_0`)."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.number, self._cluster = number, cluster

    def output(self) -> str:
        file = Path(self.show()["StdOut"])
        return file.read_text() if file.exists() else "(no output)"

    def show(self) -> dict[str, str]:
        """What Slurm knows of the job."""
        words = self._cluster.call("scontrol", "show", "job", "--oneliner", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, seconds: float = DEADLINE) -> int:
        """The exit code of the batch script; 128 + the signal that killed it."""
        wait_until(lambda: self.show()["JobState"] in ENDED, f"the end of job {self.number}", seconds, self.output)
        code, signal = map(int, self.show()["ExitCode"].split(":"))
        return 128 + signal if signal else code

    def wait_for(self, file: Path) -> None:
        """Until a running job has made a file."""

        def made() -> bool:
            if not file.exists() and self.show()["JobState"] in ENDED:
                pytest.fail(f"job {self.number} ended before it made {file}: {self.output()}")
            return file.exists()

        wait_until(made, f"{file} of job {self.number}", DEADLINE, self.output)

    def wait_for_state(self, state: str) -> None:
        wait_until(lambda: self.show()["JobState"] == state, f"job {self.number} to be {state}", DEADLINE, self.output)

    def signal(self, name: str, *options: str) -> None:
        self._cluster.call("scancel", f"--signal={name}", *options, self.number)
