"""The checkpoints of a run as files: which there are, which are whole. Needs no torch, and may look on while
a run goes on.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from omnirl_hpc.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

DCP_PART = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Fault:
    """Why a checkpoint cannot be used."""

    text: str  # goes on from the checkpoint's path: "has no manifest"
    unreadable: bool = False  # the system refused to read: what is there may well be whole


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`, whole or not, in ascending order; none where there is no
    such folder.

    Raises ConfigError where the folder cannot be listed: what it holds is unknown then, and not nothing.
    """
    try:
        with os.scandir(folder) as entries:  # Path.glob would take a refusal for an empty folder
            names = [entry.name for entry in entries if entry.name.startswith("step_") and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be listed, says {socket.gethostname()}: {error.strerror}: regain access to it"
        ) from None
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def find_fault(
    path: Path, quickly: bool = False, mine: Callable[[str], bool] = lambda file: True
) -> Fault | None:
    """Why a checkpoint cannot be used; None where it is whole.

    quickly: by the sizes of its files alone. mine: says which files to look at, where others look at the
    rest.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        return Fault("has no manifest" if path.exists() else "does not exist")
    except OSError as error:
        return _unreadable("manifest.json", error)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return Fault("has a torn manifest")
    for name, (size, expected) in manifest.items():
        if not mine(name):
            continue
        try:
            with (path / name).open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    return Fault(f"has {found} of {size} bytes of {name}")
            if not quickly and crc(path / name) != expected:
                return Fault(f"has other bytes in {name} than were written")
        except FileNotFoundError:
            return Fault(f"lacks {name}")
        except OSError as error:
            return _unreadable(name, error)
    return None


def _unreadable(name: str, error: OSError) -> Fault:
    return Fault(f"has {name}, which cannot be read ({error.strerror})", unreadable=True)


def whole_steps(
    folder: Path, steps: Sequence[int] | None = None, fault_of: Callable[[Path], Fault | None] = find_fault
) -> list[int]:
    """Those of `steps` (None: of all) whose checkpoints are whole."""
    steps = steps_in(folder) if steps is None else steps
    return [step for step in steps if fault_of(checkpoint_path(folder, step)) is None]


def find_checkpoint(
    folder: Path,
    step: int | None = None,
    setting: str = "step ",
    steps: Sequence[int] | None = None,
    fault_of: Callable[[Path], Fault | None] = find_fault,
) -> Path | None:
    """The checkpoint of `step`, else the newest whole one; None where there is none at all. Says which it
    passed over.

    steps: those to choose from, in ascending order (None: what is there). fault_of: why a checkpoint cannot
    be used. Raises ConfigError where the one asked for (by `setting`) is not there or not whole; where there
    are some and none is whole; and where one cannot be read, since an older one is no substitute for it.
    """
    steps = steps_in(folder) if steps is None else steps
    if step is not None:
        path = checkpoint_path(folder, step)
        if fault := fault_of(path):
            raise ConfigError(
                f"{setting}{step}: {path} {fault.text}; whole steps: {whole_steps(folder, steps, fault_of)}"
            )
        return path
    faults = []
    for step in reversed(steps):
        path = checkpoint_path(folder, step)
        fault = fault_of(path)
        if fault is None:
            return path
        if fault.unreadable:
            raise ConfigError(
                f"{path} {fault.text}: regain access to it, or name an older one by {setting}N; "
                f"there are: {[other for other in steps if other < step]}"
            )
        log.warning("checkpoint %s is not whole (%s): going back to the one before", path, fault.text)
        faults.append(f"{path.name} {fault.text}")
    if faults:
        raise ConfigError(
            f"{folder} has no whole checkpoint ({'; '.join(faults)}): "
            "bring the files back, from a backup or a snapshot"
        )
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
    """Raises FileNotFoundError where the checkpoint is gone, CheckpointError where it cannot be read."""
    try:
        return json.loads((path / "state.json").read_text())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'state.json'} cannot be read: {error}") from None


def crc(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def follow_umask(folder: Path) -> None:
    """Give the files in `folder` the mode of a new file: safetensors makes its own 0600, whatever the
    umask.
    """
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is on the disk, and not only in memory, when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
