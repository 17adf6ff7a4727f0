"""Nobody else has a hand in temporary files and in compiled code."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch import node_local
from omnirl_hpc.launch.node_local import CACHES, use_private_folder


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Path:
    """A node's disk, open to all as /tmp is."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = tmp_path / "disk"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def own(disk: Path) -> Path:
    return disk / f"omnirl-{os.geteuid()}"


def refused(disk: Path) -> str:
    with pytest.raises(ConfigError, match="set TMPDIR to a folder of your own") as error:
        use_private_folder({"TMPDIR": str(disk)})
    return str(error.value)


def test_everything_goes_to_a_folder_that_only_the_user_can_enter(disk):
    environ = {"TMPDIR": str(disk), "TRITON_CACHE_DIR": "/mine"}
    assert use_private_folder(environ) == ""
    assert stat.S_IMODE(own(disk).lstat().st_mode) == 0o700
    assert (
        environ["TMPDIR"] == str(own(disk)) and environ["TORCHINDUCTOR_CACHE_DIR"] == f"{own(disk)}/inductor"
    )
    assert environ["TRITON_CACHE_DIR"] == "/mine"
    assert environ.keys() == {"TMPDIR", *CACHES}


def test_a_second_start_finds_it_again_and_so_does_a_process_within(disk):
    environ = {"TMPDIR": str(disk)}
    use_private_folder(environ)
    (own(disk) / "inductor").mkdir()
    again = {"TMPDIR": str(disk)}
    use_private_folder(again)
    inner = {"TMPDIR": environ["TMPDIR"]}
    use_private_folder(inner)
    assert environ == again == inner
    assert [path.name for path in own(disk).iterdir()] == ["inductor"]


def test_torch_and_tempfile_use_it(disk):
    """Torch's own choice is a folder that anybody can make first."""
    program = (
        "from omnirl_hpc.launch.runtime import prepare_process; prepare_process(1)\n"
        "import tempfile\nfrom torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print(tempfile.gettempdir(), cache_dir())"
    )
    environ = {name: value for name, value in os.environ.items() if name not in (*CACHES, "SLURM_TMPDIR")}
    said = subprocess.run(
        [sys.executable, "-c", program],
        env=environ | {"TMPDIR": str(disk)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == [str(own(disk)), f"{own(disk)}/inductor"]


def test_a_folder_that_others_can_write_to_is_refused(disk):
    own(disk).mkdir()
    own(disk).chmod(0o777)
    assert f"{own(disk)} on " in (said := refused(disk)) and "can be written to by others (mode 777)" in said
    assert stat.S_IMODE(own(disk).lstat().st_mode) == 0o777  # what is in it stays suspect


def test_one_that_others_could_only_read_is_closed(disk):
    own(disk).mkdir(mode=0o755)
    use_private_folder({"TMPDIR": str(disk)})
    assert stat.S_IMODE(own(disk).lstat().st_mode) == 0o700


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_a_link_is_refused(disk, tmp_path, target):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own(disk).symlink_to(tmp_path / target)
    assert "is a link" in refused(disk)


def test_a_file_is_refused(disk):
    own(disk).touch()
    assert "is not a folder" in refused(disk)


def test_another_users_folder_is_refused(disk, monkeypatch):
    """Seen as somebody else: whoever runs the tests may not be able to give a folder away."""
    me = os.geteuid()
    monkeypatch.setattr(node_local.os, "geteuid", lambda: me + 1)
    (disk / f"omnirl-{me + 1}").mkdir(mode=0o700)
    assert "belongs to " in refused(disk)


def test_a_disk_on_which_anybody_can_replace_folders_is_left_out(disk):
    disk.chmod(0o777)
    within = disk / "mine"
    within.mkdir(mode=0o700)
    for folder in (disk, within):
        environ = {"SLURM_TMPDIR": str(folder), "TMPDIR": "/tmp"}
        said = use_private_folder(environ)
        assert said.startswith(
            f"SLURM_TMPDIR={folder}: anybody can replace what is in {disk} (no sticky bit); "
        )
        assert environ["TMPDIR"].startswith("/tmp/")


def test_a_disk_that_a_container_does_not_bind_is_said_and_left_out(disk):
    environ = {"SLURM_TMPDIR": "/not/bound", "TMPDIR": str(disk)}
    assert use_private_folder(environ) == (
        "SLURM_TMPDIR=/not/bound cannot be written to here (in a container it may need BINDS=/not/bound); "
        f"{own(disk)} is used instead"
    )
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == f"{own(disk)}/inductor"
