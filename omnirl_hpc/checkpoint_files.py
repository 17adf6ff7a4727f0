"""The checkpoints of a run as files: which there are, which are whole. Needs no torch, and may look on while a run goes on."""

from __future__ import annotations

import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any

from omnirl_hpc.errors import CheckpointError

log = logging.getLogger(__name__)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`, whole or not, in ascending order."""
    names = (path.name for path in folder.glob("step_*") if path.is_dir())
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def whole_steps(folder: Path) -> list[int]:
    return [step for step in steps_in(folder) if find_fault(checkpoint_path(folder, step)) is None]


def find_checkpoint(folder: Path, step: int | None = None, setting: str = "step ") -> Path | None:
    """The checkpoint of `step`, else the newest whole one; None where there is none. Says which it passed over.

    Raises CheckpointError where the one asked for (by `setting`) is not there or not whole.
    """
    if step is not None:
        path = checkpoint_path(folder, step)
        if fault := find_fault(path):
            raise CheckpointError(f"{setting}{step}: {path} {fault}; whole steps: {whole_steps(folder)}")
        return path
    for step in reversed(steps_in(folder)):
        path = checkpoint_path(folder, step)
        fault = find_fault(path)
        if fault is None:
            return path
        log.warning("checkpoint %s is not whole (%s): going back to the one before", path, fault)
    return None


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text())


def find_fault(path: Path, quickly: bool = False) -> str | None:
    """Why a checkpoint is not whole; None where it is. quickly: by the sizes of its files alone."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        return "has no manifest" if path.exists() else "does not exist"
    except (json.JSONDecodeError, UnicodeDecodeError):
        return "has a torn manifest"
    for name, (size, expected) in manifest.items():
        try:
            found = (path / name).stat().st_size
            if found != size:
                return f"has {found} of {size} bytes of {name}"
            if not quickly and crc(path / name) != expected:
                return f"has other bytes in {name} than were written"
        except FileNotFoundError:
            return f"lacks {name}"
    return None


def crc(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is on the disk, and not only in memory, when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
