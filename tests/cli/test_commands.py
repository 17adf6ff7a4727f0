"""The commands as a user starts them: exit codes, one sentence on stderr, no traceback, no torch before it is
needed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import omnirl_hpc
from omnirl_hpc.cli.main import COMMANDS, main
from omnirl_hpc.config.load import load_config
from omnirl_hpc.errors import EXIT_NO_READER
from tests.cli.run_states import lock_by_this_process
from tests.stand_ins import write_descriptions

ROOT = Path(omnirl_hpc.__file__).parent.parent
# A hook says at exit whether torch was imported.
PROGRAM = """
import atexit, sys
atexit.register(lambda: print("TORCH", "torch" in sys.modules))
from omnirl_hpc.cli.main import main
main()
"""
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_STEP_ID",
)


def omnirl(*arguments: object, **environ: str) -> subprocess.CompletedProcess:
    """Run the command; the timeout only keeps a command that hangs from hanging the suite."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ,
    )


def said(result: subprocess.CompletedProcess, torch: bool = False) -> str:
    """The one line of a command that ended with exit code 2, before it imported torch or after."""
    assert result.returncode == 2, result.stderr
    assert f"TORCH {torch}" in result.stdout
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def train(tiny_prompts, tmp_path):
    """`omnirl-hpc train` with a stand-in for a checkpoint, which is looked at but never loaded."""
    write_descriptions(tmp_path / "model")

    def run(*overrides: object, **environ: str) -> subprocess.CompletedProcess:
        needed = (
            f"run_dir={tmp_path / 'run'}",
            f"model.path={tmp_path / 'model'}",
            f"data.prompts={tiny_prompts}",
        )
        return omnirl("train", "recipe=flowgrpo_tiny", *needed, *overrides, **environ)

    return run


def test_help_names_every_command():
    result = omnirl("help")
    assert result.returncode == 0 and "TORCH False" in result.stdout
    assert all(f"omnirl-hpc {command}" in result.stdout for command in COMMANDS)
    assert omnirl("--version").stdout.startswith(f"omnirl_hpc {omnirl_hpc.__version__}\n")


def test_no_command_shows_the_usage():
    result = omnirl()
    assert result.returncode == 2 and "usage: omnirl-hpc COMMAND" in result.stdout


def test_an_unknown_command_names_the_known_ones():
    known = ", ".join(COMMANDS)
    assert (
        said(omnirl("trian")) == f"omnirl-hpc: unknown command 'trian'; known: {known} (see omnirl-hpc help)"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("prompts",),
            "say what to do: OUT --kind ocr --count N, OUT --kind glyph [--held-out], OUT --from FILE",
        ),
        (("prompts", "out.parquet", "--kind", "poems", "--count", "3"), "invalid choice: 'poems'"),
        (("prompts", "out.parquet", "--kind", "ocr", "--count", "many"), "invalid int value: 'many'"),
        (("tiny-model",), "the following arguments are required: out"),
        (("tiny-model", "out", "--sed", "1", "more"), "unrecognized arguments"),
    ],
)
def test_usage_errors(arguments, error):
    result = omnirl(*arguments)
    assert result.returncode == 2 and "TORCH False" in result.stdout
    *usage, last = result.stderr.splitlines()  # argparse puts its usage before the error
    assert usage[0].startswith(f"usage: omnirl-hpc {arguments[0]}")
    assert last.startswith(f"omnirl-hpc {arguments[0]}: error:") and error in last


def test_a_file_of_another_user_is_one_sentence(monkeypatch, capsys):
    def run(arguments):
        raise PermissionError(13, "Permission denied", "/home/someone/run/config.yaml")

    monkeypatch.setattr("omnirl_hpc.cli.status.run", run)
    with pytest.raises(SystemExit) as end:
        main(["status", "/home/someone/run"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "omnirl-hpc status: /home/someone/run/config.yaml: Permission denied\n"


def test_prompts_writes_a_table_without_torch(tmp_path):
    file = tmp_path / "new folder" / "prompts.parquet"
    result = omnirl("prompts", file, "--kind", "ocr", "--count", 5, "--seed", 1)
    assert result.returncode == 0 and "TORCH False" in result.stdout
    assert pq.read_table(file).num_rows == 5
    assert "exists; delete it or choose another name" in said(
        omnirl("prompts", file, "--kind", "ocr", "--count", 5)
    )


def test_prompts_refuses_what_cannot_be(tmp_path):
    assert "--count 0: at least one prompt is needed" in said(
        omnirl("prompts", tmp_path / "p", "--kind", "ocr", "--count", 0)
    )
    (tmp_path / "file").touch()
    inside_a_file = tmp_path / "file" / "p.parquet"
    assert f"{inside_a_file} cannot be written" in said(
        omnirl("prompts", inside_a_file, "--kind", "ocr", "--count", 1)
    )


def test_tiny_model_refuses_what_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    assert "exists and is not an empty folder" in said(omnirl("tiny-model", tmp_path))
    assert "exists and is not an empty folder" in said(omnirl("tiny-model", tmp_path / "file"))
    assert "cannot be made" in said(omnirl("tiny-model", tmp_path / "file" / "model"))


def test_tiny_model_has_the_layout_of_a_diffusers_pipeline(tiny_model):
    index = json.loads((tiny_model / "model_index.json").read_text())
    assert index["_class_name"] == "QwenImagePipeline"
    for part in ("scheduler", "text_encoder", "tokenizer", "transformer", "vae"):
        assert part in index and any((tiny_model / part).iterdir())


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("actor.lora.rnk=3", ["actor.lora.rnk", "actor.lora.rank"]),
        ("steps=abc", ["steps=abc"]),
        ("recipe=nope", ["recipe=nope", "flowgrpo_tiny"]),
        ("model.height=100", ["model.height=100", "multiple of 16"]),
        ("reward=beauty", ["reward=beauty", "jpeg_compressibility, loudness, ocr"]),
        ("reward=nowhere:Beauty", ["reward=nowhere:Beauty", "no module nowhere"]),
        ("algorithm.name=ppo", ["algorithm.name=ppo", "flow_grpo"]),
        ("model.path=/nowhere", ["model.path=/nowhere", "model_index.json"]),
        ("model.path=Qwen/Qwen-Image", ["model.path=Qwen/Qwen-Image", "omnirl-hpc prefetch"]),
        (
            "sampling.window.size=6",
            ["sampling.window.size=6", "sampling.window.first=0", "sampling.window.last=5"],
        ),
        ("sampling.window.last=9", ["sampling.window.last=9", "sampling.num_inference_steps - 1 = 5"]),
        ("actor.optimizer.lr=-1", ["actor.optimizer.lr=-1", "positive"]),
        ("sampling.noise_level=0", ["sampling.noise_level=0"]),
        ("residency=shared", ["residency=shared", "swap, resident"]),
        ("determinism=very", ["determinism=very", "fast, strict"]),
        ("rollout.tensor_parallel_size=2", ["rollout.tensor_parallel_size", "1 rank(s)"]),
        ("actor.shard_size=2", ["actor.shard_size=2", "1 rank(s)"]),
        ("init_adapter=/nowhere", ["init_adapter=/nowhere", "adapter_model.safetensors does not exist"]),
        ("data.prompts=/", ["data.prompts=/ is a folder"]),
        ("run_dir='~/run'", ["run_dir=~/run", "write $HOME"]),
        ("data.prompts=/nowhere.parquet", ["data.prompts=/nowhere.parquet does not exist"]),
        ("checkpoint.every=0", ["checkpoint.every=0", "greater than 0"]),
        ("checkpoint.resume_step=7", ["checkpoint.resume_step=7", "it has: none"]),
        ("reward.max_failed_fraction=1", ["reward.max_failed_fraction=1", "[0, 1)"]),
        ("data.text_lengths=[64,2048]", ["data.text_lengths=[64, 2048]", "1024"]),
    ],
)
def test_a_wrong_setting_is_one_sentence(train, override, names):
    line = said(train(override))
    assert line.startswith("omnirl-hpc train: ") and all(name in line for name in names)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("actor.micro_batch_size=12", ["actor.micro_batch_size=12", "data.prompts_per_step"]),
        ("data.samples_per_prompt=1", ["data.samples_per_prompt=1", "at least 2"]),
        ("algorithm.clip_range=-0.1", ["algorithm.clip_range=-0.1", "greater than 0"]),
        ("algorithm.clip_rnge=1", ["algorithm.clip_rnge", "did you mean algorithm.clip_range"]),
    ],
)
def test_a_wrong_setting_of_an_algorithm_is_one_sentence(train, override, names):
    """Its file needs torch; no process group is formed."""
    line = said(train(override), torch=True)
    assert line.startswith("omnirl-hpc train: ") and all(name in line for name in names)


def test_help_of_train_says_where_settings_are(train):
    recipes = sorted(file.stem for file in (ROOT / "configs" / "recipe").glob("*.yaml"))
    assert {"flowgrpo_qwen_image", "none"} <= set(recipes)
    for result in (omnirl("train", "--help"), train("--help")):
        assert result.returncode == 0 and "TORCH False" in result.stdout
        assert f"  recipe={' | '.join(recipes)}\n" in result.stdout
        assert str(ROOT / "omnirl_hpc" / "config" / "schema.py") in result.stdout


def test_torchrun_shows_the_sentence_below_its_traceback(train, tmp_path):
    """It reads this file; tests/runs starts it."""
    line = said(train("steps=abc", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")))
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == line and int(
        message["extraInfo"]["timestamp"]
    )


def test_a_missing_setting_is_one_sentence():
    assert (
        said(omnirl("train"))
        == "omnirl-hpc train: run_dir has no value: add run_dir=… to the command line or to the recipe"
    )


def test_a_folder_of_another_recipe_is_not_overwritten(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\n")
    (tmp_path / "run" / "checkpoints" / "step_000000").mkdir(parents=True)
    assert "holds a run with other settings" in said(train())


def test_a_run_of_another_algorithm_is_not_overwritten(train, tiny_prompts, tmp_path):
    """Its name is compared at once, its settings when its file has been read."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step_000000").mkdir(parents=True)
    paths = (f"run_dir={folder}", f"model.path={tmp_path / 'model'}", f"data.prompts={tiny_prompts}")
    for key, value, torch in (("name", "other", False), ("clip_range", 7.0, True)):
        saved = OmegaConf.create(load_config(["recipe=flowgrpo_tiny", *paths]).to_yaml())
        saved.algorithm[key] = value
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(saved))
        line = said(train(), torch=torch)
        assert "holds a run with other settings" in line and f"algorithm.{key}=" in line


def test_a_requeued_job_does_not_ask_for_the_step_that_it_first_went_back_to(train, tmp_path):
    """Its checkpoint may be gone since. What is found instead is the next fault, of the folder."""
    (tmp_path / "run" / "checkpoints" / "step_000000").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\n")
    back = ("checkpoint.resume_step=7",)
    job = {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}
    # killed before it went back: it does so now
    assert "there is no such checkpoint" in said(train(*back, **job))
    (tmp_path / "run" / "returned.json").write_text('{"job": "9", "step": 7}')
    assert "holds a run with other settings" in said(train(*back, **job))
    assert "there is no such checkpoint" in said(train(*back, SLURM_JOB_ID="10"))


def test_a_prompt_table_without_prompts_is_found_before_torch(train, tmp_path):
    pq.write_table(pa.table({"caption": ["a"]}), tmp_path / "captions.parquet")
    assert "no column 'prompt'" in said(train(f"data.prompts={tmp_path / 'captions.parquet'}"))
    (tmp_path / "text.parquet").write_text("a")
    assert "cannot be read as parquet" in said(train(f"data.prompts={tmp_path / 'text.parquet'}"))


def test_every_rank_checks_and_rank_0_reports_first(train):
    world = {"LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert "data.prompts_per_step=4 cannot be dealt evenly to 3 rollout replicas" in said(
        train(RANK="0", **world)
    )
    later = said(
        train(RANK="1", **world)
    )  # where no launcher has ended it meanwhile: it may be the only one to know
    assert later.startswith("omnirl-hpc train: rank 1 of 3 on ") and "data.prompts_per_step=4" in later


def test_a_folder_in_use_or_of_another_recipe_on_rank_1(train, tmp_path):
    world = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    (tmp_path / "run").mkdir()
    lock_by_this_process(tmp_path / "run", "5")
    micro = "actor.micro_batch_size=4"
    process = f"process {os.getpid()} on {socket.gethostname()}"
    in_use = f"run_dir={tmp_path / 'run'} is in use by slurm job 5 ({process})"
    assert in_use in said(train(micro, RANK="0", **world))
    assert f": rank 1 of 2 on {socket.gethostname()} (torchrun): {in_use}" in said(
        train(micro, RANK="1", **world)
    )
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\n")
    (tmp_path / "run" / "checkpoints" / "step_000000").mkdir(parents=True)
    assert "seed=0 (the run has 7)" in said(train(micro, RANK="0", **world))
    assert "seed=0 (the run has 7)" in said(train(micro, RANK="1", **world))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "lock",
    ]  # nothing was touched


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["sweep", "seed=0,1"]])
def test_output_that_nobody_reads_ends_the_command_in_silence(command):
    """As `omnirl-hpc status RUN | head -n 1`, here with a reader that has gone before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "omnirl_hpc", *command]
    ended = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (EXIT_NO_READER, "")


def test_another_broken_pipe_is_an_error_like_any_other(monkeypatch, capfd):
    def score(arguments: list[str]) -> None:
        raise BrokenPipeError("the pipe to a worker")

    monkeypatch.setattr("omnirl_hpc.cli.status.run", score)
    with capfd.disabled(), pytest.raises(BrokenPipeError, match="to a worker"):
        main(["status", "run"])


def test_a_launcher_that_contradicts_itself(train):
    assert "WORLD_SIZE is not set" in said(train(RANK="0", LOCAL_RANK="0"))
