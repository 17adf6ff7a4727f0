"""The checkpoints of a run as files: which there are, which are whole. Needs no torch, and may look on while
a run goes on.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from omnirl_hpc.errors import ConfigError

log = logging.getLogger(__name__)

DCP_PART = re.compile(r"__(\d+)_\d+\.distcp")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`, whole or not, in ascending order."""
    names = (path.name for path in folder.glob("step_*") if path.is_dir())
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def find_fault(
    path: Path, quickly: bool = False, mine: Callable[[str], bool] = lambda file: True
) -> str | None:
    """Why a checkpoint is not whole; None where it is.

    quickly: by the sizes of its files alone. mine: says which files to look at, where others look at the
    rest.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        return "has no manifest" if path.exists() else "does not exist"
    except OSError as error:
        return f"has a manifest that cannot be read ({error.strerror})"
    except (json.JSONDecodeError, UnicodeDecodeError):
        return "has a torn manifest"
    for name, (size, expected) in manifest.items():
        if not mine(name):
            continue
        try:
            found = (path / name).stat().st_size
            if found != size:
                return f"has {found} of {size} bytes of {name}"
            if not quickly and crc(path / name) != expected:
                return f"has other bytes in {name} than were written"
        except FileNotFoundError:
            return f"lacks {name}"
        except OSError as error:
            return f"has {name}, which cannot be read ({error.strerror})"
    return None


def whole_steps(
    folder: Path, steps: Sequence[int] | None = None, fault_of: Callable[[Path], str | None] = find_fault
) -> list[int]:
    """Those of `steps` (None: of all) whose checkpoints are whole."""
    steps = steps_in(folder) if steps is None else steps
    return [step for step in steps if fault_of(checkpoint_path(folder, step)) is None]


def find_checkpoint(
    folder: Path,
    step: int | None = None,
    setting: str = "step ",
    steps: Sequence[int] | None = None,
    fault_of: Callable[[Path], str | None] = find_fault,
) -> Path | None:
    """The checkpoint of `step`, else the newest whole one; None where there is none. Says which it passed
    over.

    steps: those to choose from, in ascending order (None: what is there). fault_of: why a checkpoint is not
    whole. Raises ConfigError where the one asked for (by `setting`) is not there or not whole.
    """
    steps = steps_in(folder) if steps is None else steps
    if step is not None:
        path = checkpoint_path(folder, step)
        if fault := fault_of(path):
            raise ConfigError(
                f"{setting}{step}: {path} {fault}; whole steps: {whole_steps(folder, steps, fault_of)}"
            )
        return path
    for step in reversed(steps):
        path = checkpoint_path(folder, step)
        fault = fault_of(path)
        if fault is None:
            return path
        log.warning("checkpoint %s is not whole (%s): going back to the one before", path, fault)
    return None


def writer(file: str) -> int:
    """The rank that wrote a file of a checkpoint: DCP names a rank's parts `__RANK_NUMBER.distcp`; the rest
    is rank 0's.
    """
    part = DCP_PART.fullmatch(PurePosixPath(file).name)
    return int(part[1]) if part else 0


def describe_files(folder: Path, rank: int) -> dict[str, tuple[int, int]]:
    """The entries that the files which `rank` wrote have in a manifest: name -> (size in bytes, CRC-32)."""
    files = sorted(path for path in folder.rglob("*") if writer(path.name) == rank and path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, crc(path)) for path in files}


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text())


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
