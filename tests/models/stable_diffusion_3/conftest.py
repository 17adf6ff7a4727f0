"""The tiny checkpoint, made once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `omnirl-hpc tiny-model --family stable_diffusion_3`."""
    from omnirl_hpc.models.stable_diffusion_3.tiny import write_tiny

    folder = tmp_path_factory.mktemp("sd3") / "tiny"
    write_tiny(folder, seed=0)
    return folder
