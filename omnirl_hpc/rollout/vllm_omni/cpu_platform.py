"""A CPU platform for vLLM-Omni, which has none of its own: the whole engine then runs in CI, over gloo.

Every kernel is plain torch, so that in fp32 the engine's transformer gives the same bits as diffusers'.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
import vllm.model_executor.layers.utils as linear_utils
import vllm.platforms
import vllm_omni.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """What the diffusion path asks of a platform. OOT ("out of tree") makes custom operators take their
    native version.
    """

    _omni_enum = OmniPlatformEnum.OOT
    dist_backend = "gloo"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def synchronize(cls, *device: torch.device) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        return cls.get_free_memory(), cls.get_device_total_memory()

    @classmethod
    def reset_peak_memory_stats(cls, *device: torch.device) -> None:
        pass

    @classmethod
    def max_memory_reserved(cls, *device: torch.device) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, *device: torch.device) -> int:
        return 0

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    @classmethod
    def supports_diffusion_dense_flash_attention(cls) -> bool:
        return False

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, *args, **kwargs
    ) -> str:
        return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config):
        from vllm.config.kernel import IrOpPriorityConfig  # 0.28 and later, and only they call this

        return IrOpPriorityConfig.with_default(["native"])


def activate() -> None:
    """Make this the platform of vllm and vllm_omni in this process."""
    if not vllm.platforms.current_platform.is_cpu():  # a CUDA wheel of vllm on a machine without a GPU
        vllm.platforms._current_platform = vllm.platforms.current_platform = CpuPlatform()
    vllm_omni.platforms._current_omni_platform = CpuOmniPlatform()
    # Modules of vllm_omni take the platform by value when they are imported, so this one comes after it is
    # set.
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

    # Attention raises for platforms it does not list; its CUDA version is plain torch SDPA.
    SDPAImpl.forward = SDPAImpl.forward_cuda
    # vllm's CPU linear layers repack their weights for oneDNN and drop `weight`, which loading and LoRA need.
    linear_utils.dispatch_cpu_unquantized_gemm = _plain_linear


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
