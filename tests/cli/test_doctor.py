"""`omnirl-hpc doctor` as a user starts it: alone, and on ranks that stand for nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnirl_hpc.cli import doctor
from omnirl_hpc.rollout.vllm_omni.versions import Versions
from tests.cli.test_commands import LAUNCHER_VARIABLES, ROOT, omnirl, said

HOST = socket.gethostname()


class Ranks:
    """Two ranks, each with a folder to be in, its own environment, and its output in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self._port = str(probe.getsockname()[1])

    def start(self, rank: int, command: str, *arguments: str, cwd: Path, **environ: str) -> subprocess.Popen:
        kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        # local rank 0 each: two nodes, which look at their files both
        world = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": self._port,
        }
        environ = (
            kept | world | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environ
        )
        with (self._folder / f"rank_{rank}.txt").open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "omnirl_hpc", command, *arguments],
                cwd=cwd, env=environ, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def said(self, rank: int) -> str:
        return (self._folder / f"rank_{rank}.txt").read_text()

    def end(self, *processes: subprocess.Popen) -> list[int]:
        """Exit codes; the timeout only keeps ranks that hang from hanging the suite."""
        try:
            return [process.wait(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


@pytest.fixture
def settings(tiny_prompts):
    """Relative paths: each rank looks for them where it stands."""
    return (
        "recipe=flowgrpo_tiny",
        "run_dir=run",
        "model.path=model",
        f"data.prompts={tiny_prompts}",
        "actor.micro_batch_size=4",
    )


@pytest.fixture
def nodes(tmp_path, tiny_model):
    """Two folders that look like one to the ranks in them: the same model, the same run_dir."""
    here, there = tmp_path / "here", tmp_path / "there"
    for node in (here, there):
        node.mkdir()
        shutil.copytree(tiny_model, node / "model")
    (here / "run").mkdir()
    (there / "run").symlink_to(here / "run")
    return here, there


def test_alone_it_describes_the_installation(tmp_path):
    result = omnirl("doctor", HF_HUB_OFFLINE="1")
    assert result.returncode == 0 and result.stderr == ""
    assert "engines       diffusers: ready; vllm_omni: " in result.stdout
    for line in (
        "ok       ranks        1 on 1 node(s): ",
        "-        model files  not checked: add model.path=…",
    ):
        assert line in result.stdout
    assert "-        all-reduce   one rank" in result.stdout and "FAILED" not in result.stdout


def test_a_wrong_setting_is_one_sentence(tmp_path):
    assert said(omnirl("doctor", "stps=3")) == "omnirl-hpc doctor: unknown setting stps; did you mean steps?"
    assert "--nproc-per-node" in omnirl("doctor", "--help").stdout


def test_a_run_is_checked_as_train_checks_it(tiny_model, tiny_prompts, tmp_path):
    needed = (f"run_dir={tmp_path}", f"model.path={tiny_model}", f"data.prompts={tiny_prompts}")
    assert "steps=0 must be a number greater than 0" in said(omnirl("doctor", *needed, "steps=0"))


def test_healthy_nodes(ranks, nodes, settings):
    started = [ranks.start(rank, "doctor", *settings, cwd=nodes[rank]) for rank in (0, 1)]
    assert ranks.end(*started) == [0, 0], ranks.said(0) + ranks.said(1)
    table = ranks.said(0)
    assert ranks.said(1) == ""
    for line in (
        f"ok       ranks        2 on 1 node(s): {HOST} (0-1)",
        "ok       devices      ",
        "ok       model files  complete: model",
        "ok       run_dir      seen and writable by all ranks, ",
        "ok       all-reduce   gloo, 2 ranks: 1 MiB ",
    ):
        assert line in table, table
    assert list((nodes[0] / "run").iterdir()) == []  # nothing is left behind


def test_every_fault_of_a_node_is_named_with_its_rank(ranks, nodes, settings, tmp_path):
    """Rank 1 stands on a node with half a model, its own run_dir and another version of peft."""
    there = nodes[1]
    weights = there / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 8)
    (there / "run").unlink()
    (there / "run").mkdir()
    (tmp_path / "site" / "peft-0.1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "peft-0.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: peft\nVersion: 0.1.0\n"
    )
    path = f"{tmp_path / 'site'}:{ROOT}"
    started = [
        ranks.start(0, "doctor", *settings, cwd=nodes[0]),
        ranks.start(1, "doctor", *settings, cwd=there, PYTHONPATH=path),
    ]
    assert ranks.end(*started) == [1, 1]
    table = ranks.said(0)
    where = f"rank 1 on {HOST}"
    assert f"FAILED   model files  {where}: transformer/{weights.name} has " in table
    assert f"FAILED   run_dir      {where}: run_dir=run is another folder than rank 0's" in table
    assert f"FAILED   packages     {where} has peft 0.1.0, rank 0 on {HOST} has peft " in table
    assert "omnirl-hpc doctor: 3 of 10 checks failed" in table and "all-reduce" not in table
    assert ranks.said(1) == "" and "Traceback" not in table


def test_a_rank_that_never_comes_is_named(ranks, nodes, settings):
    zero = ranks.start(0, "doctor", *settings, "timeout_seconds=2", cwd=nodes[0])
    assert ranks.end(zero) == [1]
    assert "omnirl-hpc doctor: rank(s) 1 of 2 did not arrive within 2 s" in ranks.said(0)


def test_ctrl_c_ends_it_at_once(ranks, nodes, settings):
    zero = ranks.start(0, "doctor", *settings, "timeout_seconds=1000", cwd=nodes[0])
    end = time.monotonic() + 60
    while "engines" not in ranks.said(0):  # from then on it waits for rank 1, which never comes
        assert time.monotonic() < end and zero.poll() is None, ranks.said(0)
        time.sleep(0.05)
    zero.send_signal(signal.SIGINT)
    assert ranks.end(zero) == [-signal.SIGINT]
    assert "Traceback" not in ranks.said(0)


def test_train_refuses_before_it_loads_anything(ranks, nodes, settings):
    (nodes[1] / "model" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    started = [
        ranks.start(rank, "train", *settings, "timeout_seconds=60", cwd=nodes[rank]) for rank in (0, 1)
    ]
    assert ranks.end(*started) == [1, 1]
    (line,) = ranks.said(0).splitlines()
    assert line.startswith(
        f"omnirl-hpc train: preflight: model files: rank 1 on {HOST}: vae/ has no *.safetensors, "
        "in model.path=model"
    )
    assert ranks.said(1) == "" and not (nodes[0] / "run" / "metrics.jsonl").exists()


def test_versions_that_vllm_omni_was_not_released_with():
    installed = {"torch": "2.13.0", "diffusers": "0.38.0", "transformers": "5.14.1", "accelerate": None}
    assert doctor.warnings(installed, Versions("0.30.0", "0.30.0")) == [
        "vllm-omni 0.30.0 was released with diffusers 0.40, 0.38.0 is installed",
        "vllm-omni 0.30.0 was released with accelerate 1.12, none is installed",
    ]
    assert doctor.warnings(installed, Versions(None, None)) == []


def test_words_for_the_engine():
    assert doctor.describe_vllm_omni(Versions(None, None)).startswith(
        "vllm_omni: not installed (on a machine without a GPU"
    )
    assert (
        doctor.describe_vllm_omni(Versions("0.30.0", "0.30.0"))
        == "vllm_omni: ready (vllm-omni 0.30.0 with vllm 0.30.0)"
    )
    assert "same minor version" in doctor.describe_vllm_omni(Versions("0.28.0", "0.30.0"))
