"""Starts the program as a user does, on one rank or on two with torchrun, and waits for its end.

tests/slurm starts it as jobs, and shares what needs no Slurm.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import omnirl_hpc
from omnirl_hpc.cli.main import main

ROOT = Path(omnirl_hpc.__file__).parent.parent
DEADLINE = 300.0  # seconds; only keeps a run that hangs from hanging the suite
DEAD_RANK_SECONDS = 60.0  # what the design promises between the death of a rank and the end of its job
OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_")

# Of the recipe flowgrpo_tiny: 4 prompts x 2 samples, 2 updates a step; a step takes about half a second on
# two ranks.
SMALL = (
    "model.height=32",
    "model.width=32",
    "data.prompts_per_step=4",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=3",
    "sampling.window.size=1",
    "sampling.window.last=2",
    "rollout.micro_batch_size=4",
    "actor.micro_batch_size=1",  # two on each rank in an update: sums of gradients have an order
    "actor.lora.rank=4",
    "actor.optimizer.warmup_updates=8",  # a schedule that a wrong resume would lose
    "logging.samples_every=2",
    "timeout_seconds=120",
)


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    output: str  # of all ranks and of the launcher


class Job:
    """A started job. Its output goes to a file, so that nothing waits for a reader."""

    def __init__(self, command: list[str], environ: dict[str, str], output: Path) -> None:
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )

    def wait(self, seconds: float = DEADLINE) -> Ended:
        return Ended(self.process.wait(timeout=seconds), self._output.read_text())

    def wait_for(self, file: Path) -> None:
        """Wait until the job has made a file."""
        wait_until(
            file.exists,
            f"the job to make {file}",
            self._output.read_text,
            over=lambda: self.process.poll() is not None,
        )

    def kill_everything(self) -> None:
        """kill -9 of the launcher, the ranks and their reward workers; returns when they have ended, which a
        busy disk delays.
        """
        killed = family(self.process.pid)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + DEADLINE
        while any(Path(f"/proc/{pid}/exe").exists() for pid in killed):  # what has ended has none
            assert time.monotonic() < deadline, f"of {killed} some survive kill -9"
            time.sleep(0.05)


def run_command(
    command: Sequence[str | Path], environ: Mapping[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """A command in the checkout, with both outputs in one."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def wait_until(
    condition: Callable[[], object],
    what: str,
    output: Callable[[], str],
    over: Callable[[], object] = lambda: False,
    seconds: float = DEADLINE,
) -> None:
    """Fails the test after `seconds`, or once it is `over` and there is nothing to wait for any more."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end or (over() and not condition()):
            pytest.fail(f"waited for {what} in vain: {output()}")
        time.sleep(0.1)


def go_on(run_dir: Path) -> None:
    """The end of a fault `pause`."""
    (run_dir / "GO").touch()
    wait_until(
        lambda: not (run_dir / "PAUSED").exists(), "the rank to go on", lambda: str(run_dir), seconds=20
    )


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            parents[int(fields["Pid"])] = int(fields["PPid"])
    found = [pid]
    for parent in found:  # grows while it is walked
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found


class Program:
    """`train` on the tiny model, with everything that tests do not vary."""

    def __init__(self, model: Path, prompts: Path, folder: Path, recipe: str = "flowgrpo_tiny") -> None:
        self._needed = (f"recipe={recipe}", *SMALL, f"model.path={model}", f"data.prompts={prompts}")
        self._folder = folder
        self._count = 0

    @contextlib.contextmanager
    def start(
        self, run_dir: Path, *overrides: str, ranks: int = 2, faults: tuple[str, ...] = (), **environ: str
    ) -> Iterator[Job]:
        arguments = ["train", *self._needed, f"run_dir={run_dir}", *overrides]
        program = ["-m", "tests.runs.inject", *faults, "--"] if faults else ["-m", "omnirl_hpc"]
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            if ranks > 1
            else []
        )
        kept = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        environ = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environ
        self._count += 1
        job = Job(
            [sys.executable, *launcher, *program, *arguments],
            environ,
            self._folder / f"output_{self._count}.txt",
        )
        try:
            yield job
        finally:
            if job.process.poll() is None:
                job.kill_everything()

    def run(self, run_dir: Path, *overrides: str, **options: Any) -> Ended:
        with self.start(run_dir, *overrides, **options) as job:
            return job.wait()

    def finish(self, run_dir: Path, *overrides: str, **options: Any) -> Ended:
        """Run a job that must end well."""
        ended = self.run(run_dir, *overrides, **options)
        assert ended.code == 0, ended.output
        return ended


def compare(first: Path, second: Path) -> tuple[int, str]:
    """`omnirl-hpc compare`: exit code and what it said."""
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(["compare", str(first), str(second)])
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_same_run(run_dir: Path, reference: Path) -> None:
    """Equal to the bit, with every line once: as if it had never been stopped. Nothing of the stops is left
    behind.
    """
    code, said = compare(reference, run_dir)
    assert code == 0, said
    steps = [line["step"] for line in lines(reference / "metrics.jsonl")]
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == steps == list(range(len(steps)))
    for name in ("hashes.jsonl", "samples/index.jsonl", "checkpoints/latest"):
        assert (run_dir / name).exists() == (reference / name).exists()  # some runs have no samples
        if (reference / name).exists():
            assert (run_dir / name).read_text() == (reference / name).read_text()
    last = f"checkpoints/step_{len(steps):06d}/adapter/adapter_model.safetensors"
    assert (run_dir / last).read_bytes() == (reference / last).read_bytes()
    assert not list(run_dir.glob("checkpoints/*.tmp"))
    assert not [
        path.name for path in run_dir.iterdir() if path.name.startswith(("STOP", "TERM", "REQUEUE", "lock"))
    ]
