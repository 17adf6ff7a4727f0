"""Files that many tests read: made once, never written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnirl_hpc.data.ocr_prompts import write_ocr_table


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen-Image."""
    from omnirl_hpc.models.tiny_qwen_image import write_tiny_qwen_image

    folder = tmp_path_factory.mktemp("tiny_model")
    write_tiny_qwen_image(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt table of 16 rows."""
    path = tmp_path_factory.mktemp("tiny_prompts") / "prompts.parquet"
    write_ocr_table(str(path), count=16, seed=0)
    return path
