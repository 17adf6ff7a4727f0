"""A folder of this user's own on the node's own disk, for temporary files and for what libraries compile.

Such a disk is shared with strangers, and libraries use names there that can be foreseen: torch keeps pickles
and machine code in /tmp/torchinductor_USER, and runs what it finds. Who makes that folder first runs code as
USER.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from omnirl_hpc.errors import ConfigError

# Thousands of small files, from every rank at once. By user and not by job: a requeued job finds them again.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "MIOPEN_USER_DB_PATH": "miopen",
}
BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def use_private_folder(environ: MutableMapping[str, str]) -> str:
    """Send temporary files, and the caches that `environ` does not place, to a folder that is this user's
    alone.

    Returns a sentence where the disk is not the one that was asked for (SLURM_TMPDIR, TMPDIR), and nothing
    otherwise. Raises ConfigError where there is no disk, or somebody else has a hand in the folder.
    """
    disk, refused = _find_disk(environ)
    folder = disk if _is_private(disk) else disk / f"omnirl-{os.geteuid()}"
    make_private(folder)
    environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # it asks once
    for name, cache in CACHES.items():
        environ.setdefault(name, str(folder / cache))
    return "; ".join([*refused, f"{folder} is used instead"]) if refused else ""


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter. Several ranks may do so at once.

    Raises ConfigError where it is there and is a link, another user's, or open to others for writing: then it
    cannot be known who made what is in it.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except FileExistsError:
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder} on {socket.gethostname()} cannot be made: {error.strerror}") from None
    if why := _why_not_ours(found):
        raise ConfigError(
            f"{folder} on {socket.gethostname()} {why}: what others put there would be run as you; have it "
            "removed, or set TMPDIR to a folder of your own on that node"
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _why_not_ours(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to {_name(found.st_uid)}"
    if found.st_mode & BY_OTHERS:
        return f"can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _find_disk(environ: MutableMapping[str, str]) -> tuple[Path, list[str]]:
    """The first of SLURM_TMPDIR, TMPDIR and /tmp that can be used, and why those before it cannot."""
    refused = []
    wanted = {name: environ[name] for name in ("SLURM_TMPDIR", "TMPDIR") if environ.get(name)}
    for name, folder in {**wanted, "": "/tmp"}.items():
        said = f"{name}={folder}" if name else folder
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            refused.append(f"{said} cannot be written to here (in a container it may need BINDS={folder})")
        elif loose := _who_may_replace(Path(folder).resolve()):
            refused.append(f"{said}: anybody can replace what is in {loose} (no sticky bit)")
        else:
            return Path(folder).resolve(), refused
    raise ConfigError(
        f"no place for temporary files on {socket.gethostname()}: {'; '.join(refused)}; set TMPDIR"
    )


def _who_may_replace(folder: Path) -> Path | None:
    """The first of a folder and those around it in which others may rename what is not theirs."""
    for place in (folder, *folder.parents):
        mode = place.stat().st_mode
        if mode & BY_OTHERS and not mode & stat.S_ISVTX:
            return place
    return None


def _is_private(folder: Path) -> bool:
    found = folder.stat()
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0
