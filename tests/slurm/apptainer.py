"""The real Apptainer: the machine's own, or the one of install_apptainer.sh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.runs.program import run_command

# Where install_apptainer.sh keeps what it made. bin/ has the command for machines without one.
CACHE = Path(os.environ.get("OMNIRL_TEST_CACHE") or Path.home() / ".cache/omnirl_hpc_tests")
ENVIRON = {"PATH": f"{os.environ['PATH']}:{Path(__file__).parent / 'bin'}", "OMNIRL_TEST_CACHE": str(CACHE)}


# A network of its own, which ends at this machine.
WITHOUT_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run(*arguments: str, without_network: bool = False) -> subprocess.CompletedProcess[str]:
    """`apptainer …` in the checkout."""
    return run_command(
        [*(WITHOUT_NETWORK if without_network else ()), "apptainer", *arguments], os.environ | ENVIRON
    )


def call(*arguments: str, without_network: bool = False) -> str:
    """The same where it must end well; what it said."""
    ended = run(*arguments, without_network=without_network)
    assert ended.returncode == 0, f"apptainer {arguments}: {ended.stdout}"
    return ended.stdout


def problem() -> str | None:
    """Why no image can be built or run here."""
    if not (CACHE / "rootfs").exists() or not (CACHE / "wheels").exists():
        return "Apptainer and what it needs are missing (tests/slurm/install_apptainer.sh)"
    ended = run("exec", str(CACHE / "rootfs"), "true")
    return (
        None
        if ended.returncode == 0
        else f"apptainer cannot start a container: {ended.stdout.strip().splitlines()[-1]}"
    )
