"""Job scripts made from settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omnirl_hpc.cli.main import main
from omnirl_hpc.cli.submit import script_folder, seconds_of


@pytest.fixture
def needed(tiny_model, tiny_prompts, tmp_path):
    paths = [f"run_dir={tmp_path}/my run", f"model.path={tiny_model}", f"data.prompts={tiny_prompts}"]
    return ["recipe=flowgrpo_tiny", *paths, "data.prompts_per_step=8"]


@pytest.fixture
def printed(needed, capsys):
    def dry_run(*arguments: str) -> str:
        main(["submit", "--dry-run", *needed, *arguments])
        return capsys.readouterr().out

    return dry_run


def refused(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["submit", *arguments])
    assert end.value.code == 2


def test_the_script(printed, tmp_path):
    script = printed(
        "nodes=2", "ranks_per_node=2", "time=01:00:00", "account=me", "seed=1", "data.text_lengths=[64,128]"
    )
    header, rest = script.split("\n\n", 1)
    assert header.splitlines() == [
        "#!/usr/bin/env bash",
        "#SBATCH --job-name=flowgrpo_tiny",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=01:00:00",
        "#SBATCH --account=me",
        "#SBATCH --output=logs/%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --requeue",
    ]
    assert f"RECIPE=flowgrpo_tiny\nRUN_DIR='{tmp_path}/my run'\n" in rest
    assert f"\nPYTHON={sys.executable}\nOMNIRL_ROOT={script_folder().parent}\n" in rest
    assert (script_folder() / "common.sh").read_text() in rest
    assert rest.endswith("\ntrain data.prompts_per_step=8 seed=1 'data.text_lengths=[64,128]'\n")
    assert "MAX_REQUEUES=0" not in rest.split("# shellcheck")[0]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(  # the forms of sbatch's manual
    ("time", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:05", 3605), ("2-3", 183600), ("1-0:10", 87000), ("1-1:1:1", 90061)],
)
def test_time_limits(time, seconds):
    assert seconds_of(time) == seconds


def test_a_chain_does_not_requeue(printed):
    header, rest = printed("chain=3").split("\n\n", 1)
    assert "--requeue" not in header
    assert "\nMAX_REQUEUES=0\n" in rest


def test_names_with_punctuation(printed):
    """tests/slurm shows that Slurm reads them so."""
    header = printed('job_name=it\'s "a" #\\b').split("\n\n")[0]
    assert r'''#SBATCH --job-name="it's \"a\" #\\b"''' in header.splitlines()


def test_a_container_has_its_own_python(printed, tmp_path):
    (tmp_path / "image.sif").touch()
    assert "\nPYTHON=" not in printed(f"container={tmp_path}/image.sif").split("# shellcheck")[0]
    assert "\nPYTHON=python3\n" in printed("python=python3")


def test_no_folder_for_the_log(needed, capsys, monkeypatch, tmp_path):
    (tmp_path / "logs").touch()
    monkeypatch.chdir(tmp_path)
    refused(*needed)
    assert (
        f"{tmp_path}/logs, where the job's log goes, cannot be made: File exists" in capsys.readouterr().err
    )


def test_cpu_nodes(printed):
    assert "gpus" not in printed("gpus_per_node=0", "ranks_per_node=2").split("\n\n")[0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("nodes=two", "nodes=two must be a whole number greater than 0"),
        ("node=2", "node"),  # goes to Hydra, which knows no such key
        ("ranks_per_node=3", "cannot be dealt evenly to 3 rollout replicas"),  # what the job would refuse
        ("launcher=ssh", "launcher=ssh is not known; it must be one of: srun, torchrun, pmix, mpirun"),
        ("container=/not/there.sif", "container=/not/there.sif does not exist"),
        ("python=/not/there", "python=/not/there does not exist"),
        ("job_name=x/y", "job_name=x/y has a slash: Slurm names the log after the job"),
        (
            "partition=a\n#SBATCH --wrap=b",
            "partition='a\\n#SBATCH --wrap=b' has characters that cannot be printed",
        ),
        ("stop_before=86400", "stop_before=86400 (seconds) must be less than time=24:00:00"),
        ("time=soon", "time=soon is no time limit"),
        ("time=4", "warning=300 (seconds) must be less than time=4"),
        ("partiton=gpu", "unknown setting partiton; did you mean partition?"),
        ("model.path=/not/there", "model.path=/not/there is not a diffusers checkpoint"),
        ("data.prompts=/not/there", "/not/there"),
    ],
)
def test_what_the_job_would_refuse_is_refused_here(needed, capsys, wrong, sentence):
    refused("--dry-run", *needed, wrong)
    said = capsys.readouterr()
    assert said.out == "" and sentence in said.err and said.err.count("\n") == 1


def test_a_chain_would_go_back_again_and_again(needed, capsys):
    refused("--dry-run", *needed, "chain=2", "checkpoint.resume_step=3")
    assert (
        "checkpoint.resume_step=3 and chain=2: every job of the chain would go back"
        in capsys.readouterr().err
    )


def test_without_slurm_the_cure_is_named(needed, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    refused(*needed)
    assert "sbatch is not here: run this on a login node" in capsys.readouterr().err
