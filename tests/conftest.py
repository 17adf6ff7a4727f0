"""What tests of several rooms need. Model and prompts are made once for a whole run of the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_")

# No deadline: how long an example takes says something about the machine, not about the program.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Who may not mount file systems does not run tests that need one; pytest counts them as deselected."""
    if os.geteuid() == 0:
        return
    needing = [item for item in items if "small_disk" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `omnirl-hpc tiny-model`."""
    from omnirl_hpc.models.qwen_image.tiny import write_tiny

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder, seed=0)
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
    """`small_disk(kib=…, inodes=…)` mounts a file system of that size, as only root may, for the test."""
    mounted = []

    def mount(kib: int, inodes: int = 0) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        options = f"size={kib}k,nr_inodes={inodes}"  # 0: as many as fit
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def finished_run(tiny_model, tiny_prompts, tmp_path_factory) -> Path:
    """The folder of a run of three steps on one rank, with two evaluations and a running mean. Tests look, or
    copy it.
    """
    from tests.helpers import SMALL

    folder = tmp_path_factory.mktemp("finished") / "run"
    paths = (f"run_dir={folder}", f"model.path={tiny_model}", f"data.prompts={tiny_prompts}")
    evaluation = (
        "evaluation.every=2",
        "evaluation.num_prompts=2",
        "evaluation.num_inference_steps=5",
        "actor.ema_decay=0.9",
    )
    program = [
        sys.executable,
        "-m",
        "omnirl_hpc",
        "train",
        *SMALL,
        *paths,
        *evaluation,
        "steps=3",
        "logging.samples_every=1",
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    root = Path(__file__).parent.parent
    environ = kept | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=600, env=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (folder / "output.txt").write_text(ended.stdout)
    return folder
