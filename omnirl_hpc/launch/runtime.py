"""Settings of this process that must be made before libraries are imported or used."""

from __future__ import annotations

import os


def prepare_process(threads_per_rank: int) -> None:
    """Fix torch's thread count, forbid hub downloads (compute nodes have no internet), silence loading bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(threads_per_rank)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
