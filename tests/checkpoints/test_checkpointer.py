"""Checkpoints are whole or they are passed over."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.checkpoints import checkpointer as checkpoint_module
from omnirl_hpc.checkpoints import files as checkpoint_files
from omnirl_hpc.checkpoints.adapters import load_adapter
from omnirl_hpc.checkpoints.checkpointer import CheckpointContent, Checkpointer
from omnirl_hpc.checkpoints.files import find_fault, read_state, writer
from omnirl_hpc.config.schema import CheckpointConfig
from omnirl_hpc.errors import CheckpointError, ConfigError, LockLostError
from omnirl_hpc.models.qwen_image.family import QwenImage
from tests.helpers import ALONE, CPU, make_config, one_rank_group, run_ranks

NAMES = ("block.to_q.lora_A.weight", "block.to_q.lora_B.weight")


@pytest.fixture(scope="module", autouse=True)
def group():
    with one_rank_group():
        yield


def content(step: int, size: int = 5) -> CheckpointContent:
    """Values that differ between steps, odd ones among them."""
    generator = torch.Generator().manual_seed(step)
    lora = {name: torch.randn(3, size, generator=generator) for name in NAMES}
    lora[NAMES[0]][0, :2] = torch.tensor([-0.0, 1e-45])
    optimizer = {f"{name}.exp_avg": torch.randn(3, size, generator=generator) for name in NAMES} | {
        "step": torch.tensor(float(step))
    }
    return CheckpointContent(
        step, {"adapter": lora}, optimizer, {"step": step, "cursor": 7 * step, "text": "é"}, {"r": 3}
    )


def make(folder, **settings) -> Checkpointer:
    folder.mkdir(exist_ok=True)
    return Checkpointer(folder, CheckpointConfig(**settings), rank=0, timeout_seconds=60.0)


@pytest.fixture
def saved(tmp_path):
    """A folder with whole checkpoints of steps 1, 2 and 3, and its checkpointer."""
    checkpointer = make(tmp_path / "c", keep=5)
    for step in (1, 2, 3):
        checkpointer.save(content(step))
    return tmp_path / "c", checkpointer


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k].view(torch.int32), b[k].view(torch.int32)) for k in a
    )


def assert_loads(checkpointer: Checkpointer, path, step: int) -> None:
    expected = content(step)
    optimizer = {name: torch.full_like(tensor, 99.0) for name, tensor in expected.sharded.items()}
    checkpointer.load(path, optimizer)
    assert same(load_adapter(path / "adapter"), expected.adapters["adapter"])
    assert same(optimizer, expected.sharded)
    assert read_state(path) == expected.state


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_is_found_and_loaded_bit_for_bit(tmp_path, asynchronous):
    checkpointer = make(tmp_path / "c", asynchronous=asynchronous)
    assert checkpointer.find() is None
    checkpointer.save(content(4))
    checkpointer.wait()
    assert checkpointer.find() == tmp_path / "c" / "step_000004"
    assert (tmp_path / "c" / "latest").read_text() == "step_000004"
    assert_loads(make(tmp_path / "c"), tmp_path / "c" / "step_000004", 4)


def test_the_manifest_names_every_file(saved):
    path = saved[0] / "step_000002"
    files = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.keys() == files - {"manifest.json"}
    assert {
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
        "state.json",
        "optimizer/.metadata",
    } <= files
    assert all(size == (path / name).stat().st_size for name, (size, _) in manifest.items())


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path):
    checkpointer = make(tmp_path / "c", keep=2)
    for step in (0, 1, 2, 10):
        checkpointer.save(content(step))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["latest", "step_000002", "step_000010"]
    assert (tmp_path / "c" / "latest").read_text() == "step_000010"
    assert checkpointer.find() == tmp_path / "c" / "step_000010"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


ADAPTER = "adapter/adapter_model.safetensors"
TEARS = {
    "truncated": (ADAPTER, truncate, r"has \d+ of \d+ bytes of " + ADAPTER),
    "flipped": (
        "optimizer/__0_0.distcp",
        flip,
        "has other bytes in optimizer/__0_0.distcp than were written",
    ),
    "metadata": ("optimizer/.metadata", flip, "has other bytes in optimizer/.metadata"),
    "state": ("state.json", lambda path: path.unlink(), "lacks state.json"),
    "no manifest": ("manifest.json", lambda path: path.unlink(), "has no manifest"),
    "torn manifest": ("manifest.json", truncate, "has a torn manifest"),
    "empty manifest": ("manifest.json", lambda path: path.write_bytes(b""), "has a torn manifest"),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_checkpoint_is_passed_over_and_said_so(saved, caplog, tear):
    folder, checkpointer = saved
    name, damage, fault = TEARS[tear]
    for step in ("step_000003", "step_000002"):
        damage(folder / step / name)
        assert re.match(fault, find_fault(folder / step).text)
    with caplog.at_level(logging.WARNING, logger="omnirl_hpc"):
        assert checkpointer.find() == folder / "step_000001"
    said = [record.getMessage() for record in caplog.records]
    for line, step in zip(said, (3, 2), strict=True):
        assert re.search(rf"step_00000{step} is not whole \({fault}.*\): going back to the one before", line)
    assert_loads(checkpointer, folder / "step_000001", 1)
    assert (folder / "latest").read_text() == "step_000001"
    assert sorted(p.name.rpartition("_")[0] for p in folder.glob("abandoned_*")) == [
        "abandoned_step_000002",
        "abandoned_step_000003",
    ]


def test_a_save_that_was_killed_leaves_nothing_that_is_found(saved):
    folder, checkpointer = saved
    (folder / "step_000004.tmp" / "adapter").mkdir(parents=True)
    (folder / "step_000004.tmp" / "manifest.json").write_text("{}")
    assert checkpointer.find() == folder / "step_000003"
    checkpointer.save(content(4))  # writes over the leavings
    assert find_fault(folder / "step_000004") is None and not list(folder.glob("*.tmp"))


def test_a_checkpoint_that_was_being_replaced_is_found(saved):
    """A kill between the two renames: both are whole, neither has its name."""
    folder, _ = saved
    (folder / "step_000003").rename(folder / "step_000003.old")
    (folder / "step_000003.tmp").mkdir()
    (folder / "step_000002.old").mkdir()  # killed after both renames, before the removal
    assert make(folder).find() == folder / "step_000003"
    assert find_fault(folder / "step_000002") is None
    assert_loads(make(folder), folder / "step_000003", 3)
    assert not [*folder.glob("*.old"), *folder.glob("*.tmp")]  # of a large model they would fill the disk


def test_a_checkpoint_that_cannot_be_replaced_stays(saved, monkeypatch):
    folder, checkpointer = saved
    rename = Path.rename

    def refuse(path, target):
        if path.suffix == ".tmp" and Path(target) == folder / "step_000003":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(
        CheckpointError, match="could not complete checkpoint 3 .* earlier checkpoints are untouched"
    ):
        checkpointer.save(content(3))
    assert find_fault(folder / "step_000003") is None


def test_none_whole_is_an_error_and_nothing_is_lost(saved):
    folder, _ = saved
    for path in folder.glob("step_*"):
        truncate(path / ADAPTER)
    (folder / "step_000003").rename(folder / "step_000003.old")
    (folder / "step_000004.tmp").mkdir()
    with pytest.raises(ConfigError) as refused:
        make(folder).find()
    said = str(refused.value)
    assert (
        said.startswith(f"{folder} has no whole checkpoint (step_000003 has ") and "step_000001 has " in said
    )
    assert said.count(f"says rank 0 on {socket.gethostname()}") == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest",
        *(f"step_00000{step}" for step in (1, 2, 3)),
        "step_000004.tmp",
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("file", [ADAPTER, "manifest.json"])
def test_what_cannot_be_read_is_not_passed_over(saved, monkeypatch, number, file):
    """It may well be whole: going on from the one before would erase what came after that."""
    folder, _ = saved
    opened = io.open

    def refuse(path, *arguments, **options):
        if str(path) == str(folder / "step_000003" / file):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(io, "open", refuse)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ConfigError) as refused:
        make(folder).find()
    said = str(refused.value)
    assert (
        f"{folder}/step_000003 has {file}, which cannot be read ({os.strerror(number)}), says rank 0 on"
        in said
    )
    assert said.endswith("or name an older one by checkpoint.resume_step=N; there are: [1, 2]")
    assert make(folder, resume_step=2).find() == folder / "step_000002"
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_folder_that_cannot_be_listed_is_not_empty(saved, monkeypatch):
    folder, checkpointer = saved

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ConfigError, match=f"{folder} cannot be listed, says {socket.gethostname()}: Permission"
    ):
        checkpointer.find()


def test_a_save_that_was_killed_before_its_last_rename_is_whole(saved):
    folder, _ = saved
    (folder / "step_000003").rename(folder / "step_000003.tmp")
    assert make(folder).find() == folder / "step_000003"


def test_older_ones_go_when_the_new_one_is_in_its_place(saved, monkeypatch):
    """A kill at any moment of a save leaves what is needed: the manifest before the rename, `latest` and the
    pruning after it.
    """
    folder, _ = saved
    rename, seen = Path.rename, []

    def watched(path, target):
        if path.suffix == ".tmp" and path.parent == folder:
            whole = [step for step in (1, 2, 3) if find_fault(folder / f"step_00000{step}") is None]
            new = folder / f"step_000004{'.tmp' if Path(target).name == 'step_000004' else ''}"
            seen.append((Path(target).name, whole, find_fault(new), (folder / "latest").read_text()))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    make(folder, keep=1).save(content(4))
    assert seen == [
        ("step_000004", [1, 2, 3], None, "step_000003"),
        ("latest", [1, 2, 3], None, "step_000003"),
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_000004"]


def test_a_step_that_is_asked_for(saved):
    folder, _ = saved
    assert make(folder, resume_step=2).find() == folder / "step_000002"
    with pytest.raises(
        ConfigError,
        match=r"resume_step=7: .*step_000007 does not exist, says rank 0 on .*; whole steps: \[1, 2, 3\]",
    ):
        make(folder, resume_step=7).find()
    truncate(folder / "step_000002" / "state.json")
    with pytest.raises(
        ConfigError, match=r"resume_step=2: .*bytes of state.json, says rank 0 on .*; whole steps: \[1, 3\]"
    ):
        make(folder, resume_step=2).find()


def test_later_checkpoints_are_put_aside_when_a_run_goes_another_way(saved):
    folder, checkpointer = saved
    assert_loads(checkpointer, folder / "step_000001", 1)
    assert (folder / "latest").read_text() == "step_000001"
    assert checkpointer.find() == folder / "step_000001"
    checkpointer.save(content(2))  # the step is free again
    assert checkpointer.find() == folder / "step_000002"
    assert_loads(checkpointer, folder / "step_000001", 1)  # and back again, in the same process
    aside = sorted(folder.glob("abandoned_step_*"))
    assert [path.name.removeprefix("abandoned_step_") for path in aside] == [
        "000002_1",
        "000002_2",
        "000003_1",
    ]
    assert [find_fault(path) for path in aside] == [None] * 3  # nothing is lost


def test_the_same_step_can_be_saved_again(saved):
    folder, checkpointer = saved
    other = {name: tensor + 1 for name, tensor in content(3).adapters["adapter"].items()}
    checkpointer.save(replace(content(3), adapters={"adapter": other}))
    assert same(load_adapter(folder / "step_000003" / "adapter"), other)
    checkpointer.save(content(3))
    assert_loads(checkpointer, folder / "step_000003", 3)


def test_training_does_not_leak_into_a_background_save(tmp_path, monkeypatch):
    """The save is held back until training has changed everything."""
    go = threading.Event()
    save_adapter = checkpoint_module.save_adapter
    monkeypatch.setattr(checkpoint_module, "save_adapter", lambda *a: go.wait(60) and save_adapter(*a))
    checkpointer = make(tmp_path / "c", asynchronous=True)
    given = content(1)
    checkpointer.save(given)
    checkpointer.poll()
    assert checkpointer.find() is None  # not there yet
    for tensor in (*given.adapters["adapter"].values(), *given.sharded.values()):
        tensor.fill_(-1)
    go.set()
    checkpointer.wait()
    assert_loads(checkpointer, tmp_path / "c" / "step_000001", 1)


def test_asynchronous_and_synchronous_write_the_same(tmp_path):
    for name, asynchronous in (("a", False), ("b", True)):
        checkpointer = make(tmp_path / name, asynchronous=asynchronous)
        checkpointer.save(content(1))
        checkpointer.wait()
    a, b = tmp_path / "a/step_000001", tmp_path / "b/step_000001"
    for name in (ADAPTER, "adapter/adapter_config.json", "state.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    assert_loads(make(tmp_path / "b"), b, 1)


def test_a_background_save_is_completed_by_a_later_poll(tmp_path):
    checkpointer = make(tmp_path / "c", asynchronous=True)
    checkpointer.save(content(1))
    checkpointer._pending[1].result(timeout=60)
    checkpointer.poll()
    assert checkpointer.find() == tmp_path / "c" / "step_000001"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("too_large", ["adapter", "optimizer"])
def test_a_full_disk_is_named_and_costs_nothing_that_was_there(small_disk, asynchronous, too_large):
    disk = small_disk(kib=1024)
    checkpointer = make(disk / "c", asynchronous=asynchronous)
    checkpointer.save(content(1))
    checkpointer.wait()
    large = content(2, size=200_000)
    small = content(2)
    adapters, optimizer = (
        (large.adapters, small.sharded) if too_large == "adapter" else (small.adapters, large.sharded)
    )
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(replace(small, adapters=adapters, sharded=optimizer))
        checkpointer.wait()
    message = str(error.value)
    assert message.startswith(f"could not write checkpoint 2 in {disk / 'c'}: rank 0: ")
    assert "No space left on device" in message and "\n" not in message
    assert message.endswith("earlier checkpoints are untouched")
    assert sorted(p.name for p in (disk / "c").iterdir()) == ["latest", "step_000001"]
    assert_loads(checkpointer, disk / "c" / "step_000001", 1)
    checkpointer.save(content(3))  # where there is room again, the run could go on
    checkpointer.wait()
    assert find_fault(disk / "c" / "step_000003") is None


def save_on_a_full_disk(folder) -> str:
    """Only rank 0 writes the adapter, and only that does not fit."""
    rank = dist.get_rank()
    checkpointer = Checkpointer(folder, CheckpointConfig(), rank, timeout_seconds=60.0)
    checkpointer.save(content(1))
    with pytest.raises(CheckpointError) as error:
        checkpointer.save(replace(content(2), adapters=content(2, size=200_000).adapters))
    checkpointer.save(content(3))
    return str(error.value)


def test_a_rank_that_cannot_write_is_known_to_all(small_disk):
    disk = small_disk(kib=1024)
    messages = run_ranks(2, save_on_a_full_disk, disk)
    assert messages[0] == messages[1]
    assert (
        messages[0].startswith(f"could not write checkpoint 2 in {disk}: rank 0: ")
        and "No space left" in messages[0]
    )
    assert sorted(p.name for p in disk.iterdir()) == ["latest", "step_000001", "step_000003"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_lost_the_lock_touches_no_checkpoint(tmp_path, asynchronous):
    """Neither a new one, nor old ones that would be deleted, nor what another run is writing."""
    lost = False

    def require_lock() -> None:
        if lost:
            raise LockLostError("taken over")

    config = CheckpointConfig(keep=1, asynchronous=asynchronous)
    checkpointer = Checkpointer(tmp_path, config, 0, 60.0, require_lock)
    checkpointer.save(content(1))
    checkpointer.wait()
    checkpointer.save(content(2))
    if asynchronous:  # written, and not yet published
        checkpointer._pending[1].result()
    (tmp_path / "step_000003.tmp").mkdir()
    lost = True
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    change = (
        checkpointer.wait if asynchronous else lambda: checkpointer.save(content(3)),
        lambda: checkpointer.save(content(3)),
        lambda: checkpointer.load(tmp_path / "step_000002", content(2).sharded),
        lambda: Checkpointer(tmp_path, config, 0, 60.0, require_lock),
    )
    for action in change[:2] if asynchronous else change[1:]:
        with pytest.raises(LockLostError, match="^rank 0: taken over$"):
            action()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def save_and_find_on_two_ranks(folder) -> dict:
    """What a rank reads to checksum it, at each save and when the run goes on; what is found, also when a
    part is torn.
    """
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    sharded = {name: distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]) for name in NAMES}
    read, crc = [], checkpoint_files.crc
    checkpoint_files.crc = lambda path: read.append(str(path.relative_to(path.parents[1]))) or crc(path)
    said = []
    checkpoint_files.log.warning = lambda text, *values: said.append(text % values)
    result = {}
    for step, asynchronous in ((1, False), (2, True)):
        checkpointer = Checkpointer(
            folder, CheckpointConfig(asynchronous=asynchronous), rank, timeout_seconds=60.0
        )
        checkpointer.save(replace(content(step), sharded=sharded))
        checkpointer.wait()
        result[f"save {step}"], read[:] = sorted(read), []
    result["found"] = checkpointer.find()
    result["find"], read[:] = sorted(read), []
    dist.barrier()
    if rank == 0:
        flip(folder / "step_000002/optimizer/__1_0.distcp")
    dist.barrier()
    result |= {"found when torn": checkpointer.find(), "said": list(said)}
    checkpoint_files.crc = lambda path: refuse_reading() if rank else 0  # torn for one, closed to the other
    with pytest.raises(ConfigError) as refused:
        checkpointer.find()
    return result | {"refused": str(refused.value)}


def refuse_reading():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_each_rank_reads_what_it_wrote_and_all_agree(tmp_path):
    first, second = run_ranks(2, save_and_find_on_two_ranks, tmp_path)
    step, torn = tmp_path / "step_000001", tmp_path / "step_000002"
    for number in (1, 2):
        rest = [
            f"step_00000{number}.tmp/state.json",
            ADAPTER,
            "adapter/adapter_config.json",
            "optimizer/.metadata",
        ]
        assert first[f"save {number}"] == sorted([*rest, "optimizer/__0_0.distcp"])
        assert second[f"save {number}"] == ["optimizer/__1_0.distcp"]
    assert second["find"] == ["optimizer/__1_0.distcp"] and len(first["find"]) == len(first["save 2"])
    for rank in (first, second):
        assert (rank["found"], rank["found when torn"]) == (torn, step)
        (line,) = rank["said"]
        fault = "has other bytes in optimizer/__1_0.distcp than were written"
        assert (
            f"step_000002 is not whole ({fault}, says rank 1 on {socket.gethostname()}): going back" in line
        )
    assert first["refused"] == second["refused"]
    assert (
        f"{torn} has optimizer/__1_0.distcp, which cannot be read (Input/output error), says rank 1 on "
        in first["refused"]
    )
    # on another number of ranks
    assert make(tmp_path).find() == step
    loaded = {name: torch.zeros(4, 2) for name in NAMES}
    make(tmp_path).load(step, loaded)
    assert all(torch.equal(tensor, torch.arange(8.0).view(4, 2)) for tensor in loaded.values())
    flip(step / "optimizer/__1_0.distcp")
    with pytest.raises(ConfigError, match="has no whole checkpoint"):
        make(tmp_path).find()


def test_the_writer_of_a_file():
    files = [
        "state.json",
        ADAPTER,
        "optimizer/.metadata",
        *(f"optimizer/__{rank}_0.distcp" for rank in range(12)),
    ]
    assert [writer(file) for file in files] == [0, 0, 0, *range(12)]


def test_a_file_that_cannot_be_read_is_a_fault_and_no_rank_waits(saved, monkeypatch):
    folder, checkpointer = saved

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint_files, "crc", fail)
    fault = find_fault(folder / "step_000003")
    assert fault.unreadable and re.match(r"has \S+, which cannot be read \(Input/output error\)", fault.text)


def test_an_adapter_only_checkpoint_is_no_larger_than_adapter_and_optimizer(
    tiny_model, tiny_prompts, tmp_path
):
    """Rank 64, the recipe's: names and headers are small beside the tensors, as in the real model."""
    config = make_config(tiny_model, tiny_prompts, tmp_path / "run", "actor.lora.rank=64")
    actor = FSDPActor(config, QwenImage(config.model), ALONE, CPU)
    lora, optimizer = dict(actor.weights()), actor.optimizer_state()
    checkpointer = make(tmp_path / "c")
    checkpointer.save(CheckpointContent(0, {"adapter": lora}, optimizer, {"step": 0}, actor.adapter_config))
    written = sum(f.stat().st_size for f in (tmp_path / "c" / "step_000000").rglob("*") if f.is_file())
    payload = sum(t.numel() * t.element_size() for t in [*lora.values(), *optimizer.values()])
    assert payload < written <= 1.1 * payload


def test_an_adapter_of_another_program_is_read_under_our_names(tmp_path):
    save_file(
        {"base_model.model.transformer.block.to_q.lora_A.weight": torch.ones(2, 3)},
        tmp_path / "adapter_model.safetensors",
    )
    assert load_adapter(tmp_path).keys() == {"block.to_q.lora_A.weight"}
    (tmp_path / "adapter_model.safetensors").write_text("not safetensors")
    with pytest.raises(CheckpointError, match="adapter_model.safetensors cannot be read"):
        load_adapter(tmp_path)


def test_state_is_readable_without_loading(saved):
    assert read_state(saved[0] / "step_000002")["cursor"] == 14


def test_the_best_one_stays_whatever_its_age(tmp_path):
    checkpointer = make(tmp_path / "c", keep=1)
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2)):
        checkpointer.save(replace(content(step), best=best))
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names == ["best", "latest", "step_000002", "step_000004"]
    assert (tmp_path / "c" / "best").read_text() == "step_000002"
    checkpointer.save(replace(content(5), best=5))
    assert sorted(p.name for p in (tmp_path / "c").glob("step_*")) == ["step_000004", "step_000005"]
    optimizer = dict(content(4).sharded)
    make(tmp_path / "c", resume_step=4).load(tmp_path / "c" / "step_000004", optimizer)
    assert not (tmp_path / "c" / "best").exists()  # step 5 is put aside: it belongs to another way


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_running_mean_has_a_folder_of_its_own(tmp_path, asynchronous):
    checkpointer = make(tmp_path / "c", asynchronous=asynchronous)
    mean = {name: tensor + 1 for name, tensor in content(1).adapters["adapter"].items()}
    checkpointer.save(replace(content(1), adapters=content(1).adapters | {"ema": mean}))
    checkpointer.wait()
    assert same(load_adapter(tmp_path / "c/step_000001/ema"), mean)
    assert same(load_adapter(tmp_path / "c/step_000001/adapter"), content(1).adapters["adapter"])
