"""What tests of several rooms need. Model and prompts are made once for a whole run of the suite."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Callable, Iterator

import pytest
from hypothesis import settings

# No deadline: how long an example takes says something about the machine, not about the program.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Who may not mount file systems does not run the tests that need one; pytest counts them as deselected."""
    if os.geteuid() == 0:
        return
    needing = [item for item in items if "small_disk" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`small_disk(kib=…)` mounts a file system of that size, as only root may; gone after the test."""
    mounted = []

    def mount(kib: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
