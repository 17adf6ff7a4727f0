"""What tests of several rooms need. Model and prompts are made once for a whole run of the suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: how long an example takes says something about the machine, not about the program.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `omnirl-hpc tiny-model`."""
    from omnirl_hpc.models.tiny_qwen_image import write_tiny_qwen_image

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_qwen_image(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table of `omnirl-hpc prompts --kind ocr --count 16 --seed 0`."""
    from omnirl_hpc.data.ocr_prompts import write_ocr_table

    file = tmp_path_factory.mktemp("prompts") / "prompts.parquet"
    write_ocr_table(str(file), count=16, seed=0)
    return file
