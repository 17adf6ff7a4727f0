"""determinism=strict: two runs of the same recipe on the same layout are equal to the bit,
and can prove it.
"""

from __future__ import annotations

import os

# Before the CUDA context exists: deterministic cuBLAS workspaces, and NCCL sums in a fixed order.
STRICT_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def enable_strict() -> None:
    """Make torch refuse what is not deterministic. Call before the first CUDA call."""
    os.environ.update(STRICT_ENVIRONMENT)
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling costs time, and nothing here reads such memory. The module has it as a property.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
