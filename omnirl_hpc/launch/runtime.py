"""Settings of this process that must be made before libraries are imported or used."""

from __future__ import annotations

import logging
import os

from omnirl_hpc.launch.node_local import use_private_folder

log = logging.getLogger(__name__)


def forbid_downloads() -> None:
    """Compute nodes have no internet. The hub's libraries read this once, when they are imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare_process(threads_per_rank: int, local_rank: int = 0) -> None:
    """Fix torch's thread count and the place of temporary files, forbid hub downloads, silence loading bars.

    Raises ConfigError where the node has no safe place for temporary files.
    """
    forbid_downloads()
    if (said := use_private_folder(os.environ)) and local_rank == 0:
        log.warning("temporary files: %s", said)
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(threads_per_rank)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
