"""The folder of a run."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError, LockLostError, OutputError
from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.metrics.samples import save_samples
from omnirl_hpc.run_directory import RunDirectory, describe_environment
from omnirl_hpc.sampling.samples import Media


def test_folders_and_files(tmp_path):
    run = RunDirectory(tmp_path / "a" / "run")
    run.create()
    run.create()  # every rank does
    run.write_start("seed: 1\n", {"recipe": "tiny"})
    run.add_choice("attention kernel, actor", "cuDNN")
    run.append_metrics({"step": 0, "loss": 0.5})
    run.append_metrics({"step": 1, "loss": 0.25})
    assert run.config.read_text() == "seed: 1\n"
    assert json.loads(run.environment.read_text())["choices"] == {
        "recipe": "tiny",
        "attention kernel, actor": "cuDNN",
    }
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [
        {"step": 0, "loss": 0.5},
        {"step": 1, "loss": 0.25},
    ]
    assert sorted(os.listdir(run.path)) == [
        "checkpoints",
        "config.yaml",
        "environment.json",
        "log",
        "metrics.jsonl",
        "samples",
    ]


def test_a_folder_of_another_run_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    run.check_same_run("seed: 1")  # a folder without a run may exist
    run.config.write_text("seed: 1\nsteps: 10\n")
    run.check_same_run("seed: 2\n")  # a start that failed before its first checkpoint binds nobody
    (run.checkpoints / "step_000000").mkdir(parents=True)
    run.check_same_run("seed: 1\nsteps: 20\n")  # a longer run of the same
    with pytest.raises(
        ConfigError, match=rf"run_dir={tmp_path} holds a run with other settings: seed=2 \(the run has 1\)"
    ):
        run.check_same_run("seed: 2\nsteps: 10\n")


def test_cut_forgets_later_steps_and_half_lines(tmp_path):
    run = RunDirectory(tmp_path)
    run.create()
    for step in range(3):
        run.append_metrics({"step": step})
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "rewa')
    run.hashes.write_text('{"step": 1, "hash": "a"}\n{"step": 2, "hash": "b"}\n')
    assert run.last_step() == 2
    run.cut(2, metrics=1)  # the second step is still to be evaluated
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [0]
    assert run.hashes.read_text() == '{"step": 1, "hash": "a"}\n'
    aside = (run.path / "abandoned_metrics.jsonl").read_text()
    assert aside == '{"step": 1}\n{"step": 2}\n{"step": 3, "rewa\n'  # nothing is lost
    run.metrics.unlink()
    assert run.last_step() == -1


@pytest.mark.parametrize("write", ["append_metrics", "write_start"])
def test_a_disk_that_refuses_is_one_sentence(tmp_path, write):
    run = RunDirectory(tmp_path / "gone")
    with pytest.raises(
        OutputError,
        match=rf"{tmp_path}/gone/\w+.\w+ cannot be written: No such file or directory: make room ",
    ):
        run.append_metrics({"step": 0}) if write == "append_metrics" else run.write_start("", {})


def test_who_lost_the_lock_writes_nothing(tmp_path):
    """Not even a line of its log."""
    lost = False

    def require_lock() -> None:
        if lost:
            raise LockLostError("taken over")

    run = RunDirectory(tmp_path, require_lock)
    run.create()
    run.append_metrics({"step": 0})
    hashes = StepHashes(run, rank=0, enabled=True)
    writes = (
        lambda: run.append_metrics({"step": 1}),
        lambda: run.write_start("seed: 1", {}),
        lambda: run.cut(0, metrics=0),
        lambda: hashes.gradients(0, 0, lambda: []),
        lambda: save_samples(
            run, 0, Media(torch.zeros(1, 1, 3, 4, 4, dtype=torch.uint8)), [Prompt("a", "a")], [0.0]
        ),
    )
    logger = logging.getLogger("omnirl_hpc")
    before = list(logger.handlers), logger.level
    try:
        run.log_to_file(0, 1)
        logger.info("while it is ours")
        lost = True
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for write in writes:
            with pytest.raises(LockLostError, match="^taken over$"):
                write()
        logger.info("afterwards")
    finally:
        for handler in set(logger.handlers) - set(before[0]):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before[1])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert (run.logs / "rank_0.log").read_text().endswith("INFO while it is ours\n")


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"run_dir={tmp_path}/file/run cannot be made"):
        RunDirectory(tmp_path / "file" / "run").create()


@pytest.mark.parametrize(
    ("rank", "world_size", "name"),
    [(0, 1, "rank_0.log"), (3, 10, "rank_3.log"), (3, 11, "rank_03.log"), (7, 128, "rank_007.log")],
)
def test_each_rank_has_a_log_whose_names_sort(tmp_path, rank, world_size, name):
    run = RunDirectory(tmp_path)
    run.create()
    logger = logging.getLogger("omnirl_hpc")
    before = list(logger.handlers), logger.level
    try:
        run.log_to_file(rank, world_size)
        logging.getLogger("omnirl_hpc.sync").info("LoRA version %d", 7)
    finally:
        for handler in set(logger.handlers) - set(before[0]):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before[1])
    assert os.listdir(run.logs) == [name]
    assert (run.logs / name).read_text().endswith("INFO LoRA version 7\n")


def test_environment_says_what_is_needed_to_run_again(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    environment = describe_environment()
    import torch

    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (
        environment["slurm"]["SLURM_JOB_ID"] == "1234" and "SLURM_RESTART_COUNT" not in environment["slurm"]
    )
    assert json.loads(json.dumps(environment)) == environment
