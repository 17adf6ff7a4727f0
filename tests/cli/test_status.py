"""`omnirl-hpc status` on runs in every state."""

from __future__ import annotations

import json
import os
import socket

import pytest

from omnirl_hpc.cli.main import main
from omnirl_hpc.launch import lock
from tests.cli.run_states import make_state


@pytest.fixture
def status(finished_run, tmp_path, capsys):
    """What the command says about a run in a state, by line."""

    def ask(state: str) -> dict[str, str]:
        main(["status", str(make_state(state, finished_run, tmp_path))])
        return {line[:12].strip(): line[12:] for line in capsys.readouterr().out.splitlines()}

    return ask


def test_a_finished_run(status, finished_run):
    said = status("finished")
    metrics = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert said["state"] == "finished" and said["step"] == "3 of 3" and said["ends in"] == "-"
    first, last = metrics[0]["reward/mean"], metrics[2]["reward/mean"]
    assert said["reward"] == f"mean reward {first:.6g} in the first step, {last:.6g} in the last"
    median = sorted(line["time/step"] for line in metrics)[1]
    assert said["speed"] == f"{median:.3g} s a step, {metrics[2]['images_per_second']:.3g} images/s"
    assert said["checkpoint"].startswith("step_000003, ") and " old, best: step_00000" in said["checkpoint"]
    assert said["evaluation"].startswith(f"{metrics[2]['evaluation/adapter']:.6g} after step 3, base ")


def test_a_running_one(status, finished_run):
    """Two steps are written down; the checkpoint after the third is being written."""
    said = status("running")
    assert (
        said["state"] == f"running: slurm job 7 (process {os.getpid()} on {socket.gethostname()})"
        and said["step"] == "2 of 3"
    )
    assert said["ends in"].count(":") == 2
    assert said["checkpoint"].startswith("step_00000") and "step_000003," not in said["checkpoint"]


def test_one_that_is_silent(finished_run, tmp_path, capsys, monkeypatch):
    """Locked from another machine: killed there, as it seems; `status` does not wait until that is
    certain.
    """
    with monkeypatch.context() as there:
        there.setattr(lock.socket, "gethostname", lambda: "node9")
        run = make_state("running", finished_run, tmp_path)
    monkeypatch.setattr(lock, "LOOK_SECONDS", 0.0)
    main(["status", str(run)])
    said = capsys.readouterr().out
    assert f"no sign of life for 10 s from slurm job 7 (process {os.getpid()} on node9)" in said
    assert "if that was killed, the same command goes on" in said and "ends in     -" in said


def test_one_that_has_only_started(status):
    said = status("started")
    assert said["state"] == "not running; it has not finished a step"
    assert (said["step"], said["reward"], said["speed"], said["checkpoint"]) == (
        "0 of 3",
        "no reward yet",
        "-",
        "none",
    )


def test_a_torn_one(status):
    said = status("torn")
    assert said["step"] == "2 of 3" and said["state"].startswith("not running, stopped or killed")
    assert "; step_000003 is not whole: it has " in said["checkpoint"]


@pytest.mark.parametrize(
    ("state", "said"),
    [("empty", "is not the folder of a run: it has no config.yaml"), ("missing", "does not exist")],
)
def test_what_is_no_run(finished_run, tmp_path, capsys, state, said):
    with pytest.raises(SystemExit) as ended:
        main(["status", str(make_state(state, finished_run, tmp_path))])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"omnirl-hpc status: {tmp_path / state} {said}\n"


def test_a_configuration_that_is_no_yaml_is_one_sentence(finished_run, tmp_path, capsys):
    run = make_state("finished", finished_run, tmp_path)
    (run / "config.yaml").write_text("seed: [")
    with pytest.raises(SystemExit):
        main(["status", str(run)])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run / 'config.yaml'} cannot be read" in line
