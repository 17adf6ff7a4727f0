"""A real Slurm on this machine (hosts/up.sh), and jobs in it, submitted as a user does: in the checkout, on a
login host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.runs import program
from tests.runs.program import DEADLINE, OURS, ROOT, run_command, wait_until

HOSTS = Path(__file__).parent / "hosts"
ENDED = (
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "CANCELLED",
    "PREEMPTED",
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
)

# On two cores, starting four ranks takes longer than the steps. Each rank has two samples.
SMALL = (*program.SMALL, "rollout.micro_batch_size=2", "actor.updates_per_step=1", "determinism=strict")

TWO_RANKS = ("--ntasks-per-node=1",)  # options of a job: one on each host, in place of two

# Stands where a job script expects Python, and puts the faults of $FAULTS into `train`, also behind torchrun.
FAULTY_PYTHON = f"""#!/usr/bin/env bash
words=("$@")
for i in "${{!words[@]}}"; do
  if [ "${{words[i]}} ${{words[i + 1]}}" = "omnirl_hpc train" ]; then
    words=("${{words[@]:0:i}}" tests.runs.inject $FAULTS -- "${{words[@]:i + 1}}")
    break
  fi
done
exec '{sys.executable}' "${{words[@]}}"
"""


class Cluster:
    """Everything that tests do not vary is in `environ`, the environment of every command."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self._state = folder / "cluster"
        self._shared = ":".join(str(path) for path in (shared, ROOT, Path(sys.prefix), Path(sys.base_prefix)))
        self.environ = {
            key: value for key, value in os.environ.items() if not key.startswith((*OURS, "SBATCH_"))
        }
        self.environ |= {
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "SBATCH_OUTPUT": str(folder / "%x-%j.out"),
        }
        self.environ |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }  # they know no other user
        self._faulty_python = folder / "python_with_faults"
        self._faulty_python.write_text(FAULTY_PYTHON)
        self._faulty_python.chmod(0o755)

    def up(self) -> None:
        command = [HOSTS / "up.sh", self._state, str(os.getpid())]
        subprocess.run(command, check=True, env=os.environ | {"SLURM_CI_SHARED": self._shared}, timeout=120)

    def down(self) -> None:
        subprocess.run([HOSTS / "down.sh", self._state], check=True, timeout=60)

    def crash(self, host: str) -> None:
        """The power goes: nobody hears of it, not even that connections are closed."""
        self.call("ip", "link", "delete", f"p-{host}")
        os.kill(int((self._state / f"run/{host}.pid").read_text()), signal.SIGKILL)

    def boot(self, host: str) -> None:
        subprocess.run([HOSTS / "boot.sh", self._state, host], check=True, timeout=60)

    @contextlib.contextmanager
    def taken_port(self, host: str, port: int) -> Iterator[None]:
        """Another program listens there."""
        listen = (
            f"import socket; s = socket.create_server(('', {port})); "
            "print('listening', flush=True)\nwhile True: s.accept()"
        )
        command = [self._state / "bin/hpc", sys.executable, "-c", listen]
        with subprocess.Popen(
            command, env=self.environ | {"HPC_HOST": host}, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout.readline() == "listening\n"
            try:
                yield
            finally:
                other.kill()

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command on the login host, in the checkout."""
        return run_command([self._state / "bin/hpc", *command], self.environ | environ, DEADLINE)

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
        """A job of four ranks where `options`, three steps where `overrides` say nothing else."""
        environ = {"RUN_DIR": str(run_dir), "FAULTS": " ".join(faults)} | environ
        if faults:
            environ["PYTHON"] = str(self._faulty_python)
        return Job(
            self,
            self.call("sbatch", "--parsable", *options, script, *SMALL, "steps=3", *overrides, **environ),
        )

    def preempt(self, job: Job) -> Job:
        """Submit a more urgent job for all nodes, and wait until Slurm has told `job` to make way for it."""
        options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
        restarts = job.show()["Restarts"]
        urgent = Job(self, self.call("sbatch", "--parsable", *options, "--wrap=true"))

        def told() -> bool:
            shown = job.show()
            return shown.get("PreemptTime", "None") != "None" or shown["Restarts"] != restarts

        wait_until(told, f"the preemption of job {job.number}", job.output)
        return urgent


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

    def over(self) -> bool:
        return self.show()["JobState"] in ENDED

    def wait(self, seconds: float = DEADLINE) -> int:
        """The exit code of the batch script; 128 + the signal that killed it."""
        wait_until(self.over, f"the end of job {self.number}", self.output, seconds=seconds)
        code, killed_by = map(int, self.show()["ExitCode"].split(":"))
        return 128 + killed_by if killed_by else code

    def wait_for(self, file: Path) -> None:
        """Until a running job has made a file."""
        wait_until(file.exists, f"job {self.number} to make {file}", self.output, over=self.over)

    def wait_for_start(self, number: int) -> None:
        """Until it has been requeued `number` times, and waits or runs."""
        what = f"start {number} of job {self.number}"
        wait_until(lambda: self.show()["Restarts"] == str(number), what, self.output, over=self.over)

    def signal(self, name: str, *options: str) -> None:
        self._cluster.call("scancel", f"--signal={name}", *options, self.number)
