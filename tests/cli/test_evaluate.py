"""`omnirl-hpc evaluate`: the same numbers as in training and on any number of ranks; runs in every state."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from PIL import Image

from omnirl_hpc.cli import evaluate
from omnirl_hpc.cli.evaluate import as_rank_0_found, of_run, prepare
from omnirl_hpc.cli.main import main
from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.evaluation.evaluator import _definition
from omnirl_hpc.launch.identity import find_identity
from omnirl_hpc.layout import make_layout
from omnirl_hpc.policies import CURRENT
from tests.cli.run_states import make_state
from tests.helpers import run_ranks
from tests.runs.program import ROOT, lines


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def evaluated(finished_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "out"
    main(["evaluate", str(finished_run), str(out)])
    return out


def test_by_hand_and_in_training_are_the_same(finished_run, evaluated):
    last = lines(finished_run / "metrics.jsonl")[-1]
    for policy in ("base", "ema", "adapter"):
        place = "base" if policy == "base" else f"step_000003/{policy}"
        ours, theirs = result(evaluated / place), result(finished_run / "evaluation" / place)
        assert ours == theirs and ours["reward"] == last[f"evaluation/{policy}"]
        for sample in ours["samples"]:
            assert (evaluated / place / sample["file"]).read_bytes() == (
                finished_run / "evaluation" / place / sample["file"]
            ).read_bytes()
    assert (evaluated / "step_000003/comparison.jpg").exists()


def test_what_is_there_is_not_made_again(finished_run, evaluated, tmp_path, capsys):
    picture = evaluated / "base/0000_00.png"
    before = picture.stat().st_mtime_ns
    main(["evaluate", str(finished_run), str(evaluated)])
    assert picture.stat().st_mtime_ns == before
    table = (evaluated / "step_000003/comparison.md").read_text()
    assert capsys.readouterr().out == f"{table}side by side: {evaluated / 'step_000003/comparison.jpg'}\n"


def test_another_reward_scores_again(finished_run, evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "out")
    weight = "reward.parts.jpeg_compressibility.weight=4"
    main(
        [
            "evaluate",
            str(finished_run),
            str(tmp_path / "out"),
            weight,
            "reward.parts.jpeg_compressibility.workers=2",
        ]
    )
    for place in ("base", "step_000003/adapter"):
        assert result(tmp_path / "out" / place)["reward"] == 4 * result(evaluated / place)["reward"]


def test_only_what_decides_a_score_defines_a_reward():
    assert _definition(RewardPartConfig("mine", weight=0.5, workers=4, timeout_seconds=1.0)) == {
        "name": "mine",
        "weight": "0.5",
    }


def _choose() -> tuple[int, dict[str, Path]]:
    step = 10 + dist.get_rank()  # rank 1 looked later
    return as_rank_0_found(step, {"adapter": Path(f"step_{step:06d}/adapter")})


def test_all_ranks_evaluate_the_checkpoint_that_rank_0_found():
    assert run_ranks(2, _choose) == [(10, {"adapter": Path("step_000010/adapter")})] * 2


@pytest.fixture
def forgotten_group():
    """A command that fails leaves its process group to the end of its process, which a test's is not."""
    yield
    dist.destroy_process_group()


def test_a_checkpoint_that_is_gone_is_one_sentence(
    finished_run, tmp_path, capsys, monkeypatch, forgotten_group
):
    """The run that goes on deletes its oldest ones, and loading torch takes a while."""
    run = make_state("finished", finished_run, tmp_path)
    found = as_rank_0_found
    monkeypatch.setattr(
        evaluate, "as_rank_0_found", lambda *given: shutil.rmtree(run / "checkpoints") or found(*given)
    )
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(run), str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert (
        f"{run}/checkpoints/step_000003/ema was deleted meanwhile, as a run does with its oldest checkpoints"
        in line
    )


def test_a_disk_that_refuses_is_one_sentence(finished_run, tmp_path, capsys, monkeypatch, forgotten_group):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(finished_run), str(tmp_path / "out"), "evaluation.num_prompts=1"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert f": rank 0: {tmp_path}/out cannot be written: No space left on device: make room or " in line


def test_layout_and_compiler_of_the_actor_do_not_matter(finished_run):
    config, _, adapters = of_run(finished_run, None, [])
    config.actor.shard_size, config.actor.compile = 4, True
    prepare(config, adapters[CURRENT], find_identity({}))
    assert make_layout(config, 0, 1).shard_size == 1 and not config.actor.compile


@pytest.mark.parametrize("out", ["file", "/proc/nowhere"])
def test_a_place_that_cannot_be_a_folder_is_one_sentence(finished_run, tmp_path, capsys, out):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(finished_run), str(tmp_path / out)])
    assert ended.value.code == 2 and "cannot be made: " in capsys.readouterr().err


def test_another_seed_is_another_evaluation(finished_run, evaluated, tmp_path):
    main(
        [
            "evaluate",
            str(finished_run),
            str(tmp_path / "out"),
            "evaluation.seed=1",
            "evaluation.samples_per_prompt=2",
        ]
    )
    made, before = result(tmp_path / "out/base"), result(evaluated / "base")
    assert [sample["file"] for sample in made["samples"]] == [
        "0000_00.png",
        "0000_01.png",
        "0001_00.png",
        "0001_01.png",
    ]
    assert (tmp_path / "out/base/0000_00.png").read_bytes() != (evaluated / "base/0000_00.png").read_bytes()
    assert made["settings"] != before["settings"]


@pytest.mark.slow
def test_two_ranks_make_the_images_of_one(finished_run, evaluated, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "omnirl_hpc", "evaluate", str(finished_run), str(tmp_path / "out")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    for place in ("base", "step_000003/ema", "step_000003/adapter"):
        assert result(tmp_path / "out" / place) == result(evaluated / place)
        for picture in (evaluated / place).glob("*.png"):
            assert (tmp_path / "out" / place / picture.name).read_bytes() == picture.read_bytes()


@pytest.mark.parametrize("state", ["running", "torn"])
def test_states_of_a_run(finished_run, tmp_path, state):
    """Checkpoint 3 is not whole: the one before is taken."""
    before = max(
        path.name for path in (finished_run / "checkpoints").glob("step_*") if path.name != "step_000003"
    )
    main(
        [
            "evaluate",
            str(make_state(state, finished_run, tmp_path)),
            str(tmp_path / "out"),
            "evaluation.num_prompts=1",
        ]
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["base", before]


@pytest.mark.parametrize(
    ("state", "options", "said"),
    [
        ("empty", (), "is not the folder of a run: it has no config.yaml"),
        ("missing", (), "does not exist"),
        ("started", (), "checkpoints has no whole checkpoint"),
        ("finished", ("evaluation.num_prompts=17",), "has 16 rows, of which 17 were asked"),
        ("finished", ("evaluation.num_promts=1",), "did you mean evaluation.num_prompts?"),
        ("finished", ("evaluation.prompts=/nowhere",), "evaluation.prompts=/nowhere does not exist"),
        ("finished", ("model.path=/nowhere",), "model.path=/nowhere is not a diffusers checkpoint"),
        ("finished", ("--step", "9"), "step_000009 does not exist"),
    ],
)
def test_what_cannot_be_is_one_sentence(finished_run, tmp_path, capsys, state, options, said):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(make_state(state, finished_run, tmp_path)), str(tmp_path / "out"), *options])
    assert ended.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("omnirl-hpc evaluate: ") and said in line
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(finished_run, tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        main(["evaluate", str(finished_run), str(tmp_path)])
    assert "holds something else than evaluations" in capsys.readouterr().err
