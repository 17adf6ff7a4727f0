"""Settings of this process that must be made before libraries are imported or used."""

from __future__ import annotations

import os


def forbid_downloads() -> None:
    """Compute nodes have no internet. The hub's libraries read this once, when they are imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare_process(threads_per_rank: int) -> None:
    """Fix torch's thread count, forbid hub downloads, silence loading bars."""
    forbid_downloads()
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(threads_per_rank)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
