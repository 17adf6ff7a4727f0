"""`omnirl-hpc plan`: what it prints, what it refuses, its exit codes."""

from __future__ import annotations

import re

import pytest

from omnirl_hpc.cli.main import main
from tests.cli.test_commands import omnirl, said


@pytest.fixture
def plan(capsys):
    """(exit code, what was printed); the recipe is the main one."""

    def run(*arguments: str) -> tuple[int, str]:
        code = 0
        try:
            main(["plan", "recipe=flowgrpo_qwen_image", *arguments])
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def row(text: str, name: str) -> list[str]:
    """The cells of a table's row behind its name."""
    (line,) = (line for line in text.splitlines() if re.match(rf"│ {re.escape(name)} +│", line))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_it_needs_no_files():
    result = omnirl("plan", "recipe=flowgrpo_qwen_image", "nodes=1", "gpus_per_node=4")
    assert result.returncode == 0, result.stderr
    assert "Qwen/Qwen-Image as published" in result.stdout and "It fits." in result.stdout


@pytest.mark.parametrize("ranks, images", [(1, 512), (4, 128)])
def test_one_node(plan, ranks, images):
    code, text = plan(f"gpus_per_node={ranks}", "gpu=h200", "text_tokens=64")
    assert code == 0
    assert f"A step: {images} images of each GPU, 64 text tokens" in text
    assert row(text, "one forward pass of one image")[0] == "15.7"  # field.md E.2
    assert row(text, "engine: transformer") == ["38.1", ""]  # 20.43 B in bf16
    assert row(text, "the GPU has") == ["140.4", "140.4"]
    for rank in range(ranks):
        assert f"│ 0    │ {rank}     │ {rank}                │ 0                             │ {rank}" in text


def test_the_gpu_may_be_written_in_capitals(plan):
    assert (
        plan("gpu=H200")[1].split("\n", 1)[1] == plan("gpu=h200")[1].split("\n", 1)[1]
    )  # the first line repeats what was asked


def test_a_model_that_is_not_here_is_said(plan):
    assert (
        "model.path=/not/there is not here: sizes are those of the published model."
        in plan("model.path=/not/there")[1]
    )


def test_sixty_four_gpus(plan):
    replicas = (
        "rollout.cfg_parallel_size=2",
        "rollout.ulysses_degree=2",
        "actor.micro_batch_size=4",
        "actor.shard_size=8",
    )
    code, text = plan("nodes=8", "gpus_per_node=8", *replicas, "host_memory=2000")
    assert code == 0
    assert "64 rank(s): 16 rollout replica(s) of 4, actor mesh 8 (replicate) x 8 (shard)" in text
    assert row(text, "7") == ["56-63", "14-15", "7", "0-7"]
    assert row(text, "the node has") == ["", "2000.0"]
    assert (
        "actor.shard_size=8 keeps it inside a node" in plan("nodes=8", "gpus_per_node=8", *replicas[:-1])[1]
    )


def test_many_nodes_are_shown_in_part(plan):
    code, text = plan("nodes=64", "gpus_per_node=8", "data.prompts_per_step=1024", "actor.shard_size=8")
    assert code == 0 and "│ …" in text
    assert row(text, "63") == ["504-511", "504-511", "63", "0-7"]
    assert len(text.splitlines()) < 90


def test_a_layout_that_cannot_be_is_refused_with_ways_out():
    line = said(omnirl("plan", "recipe=flowgrpo_qwen_image", "nodes=8", "gpus_per_node=8"), torch=True)
    assert "data.prompts_per_step=32 cannot be dealt evenly to 64 rollout replicas" in line
    assert "On 64 ranks these would do: data.prompts_per_step=128 | rollout.cfg_parallel_size=2" in line


def test_a_gpu_that_is_too_small_names_the_lever(plan):
    code, text = plan("gpu=mi250x")
    assert code == 1
    assert re.search(
        r"It does not fit: a GPU needs 73\.\d of 64\.0 GiB\. Change: rollout\.micro_batch_size=\d+ \(then",
        text,
    )
    lever = re.search(r"Change: (\S+) ", text).group(1)
    assert plan("gpu=mi250x", lever)[0] == 0


def test_where_no_lever_helps_it_says_so(plan):
    code, text = plan("gpu=l40s", "gpus_per_node=1")
    assert code == 1 and "use more GPUs, a GPU with more memory, or smaller images" in text


def test_a_node_with_too_little_host_memory(plan):
    adapter = (
        "gpus_per_node=8",
        "host_memory=512",
        "rollout.lora=adapter",
    )  # merged keeps a clean copy in any case
    code, text = plan(*adapter)
    assert code == 1
    assert "of 512 GiB of host memory. Change: residency=resident (then" in text
    assert plan(*adapter, "residency=resident")[0] == 0


def test_auto_says_why(plan):
    assert "residency resident (auto: both together need" in plan("gpus_per_node=8", "residency=auto")[1]
    assert (
        "residency swap (auto: both together would need"
        in plan("gpus_per_node=1", "residency=auto", "gpu=h100")[1]
    )


def test_sizes_of_a_checkpoint(plan, tiny_model):
    code, text = plan(f"model.path={tiny_model}", "gpus_per_node=1")
    assert code == 0 and f"the files in {tiny_model}" in text
    assert float(row(text, "engine: transformer")[0]) < 0.01


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("gpu=tpu", "gpu=tpu is not known; it must be one of: a100-40"),
        ("nodes=0", "nodes=0 must be a whole number greater than 0"),
        ("nodes=two", "nodes=two must be a whole number greater than 0"),
        ("text_tokens=100", "text_tokens=100 is none of data.text_lengths=[64, 128, 256, 512, 1024]"),
        ("recipe=none_such", "recipe=none_such is not known"),
        ("actor.microbatch=3", "did you mean actor.micro_batch_size?"),
        ("sampling.noise_level=0", "sampling.noise_level=0.0 must be greater than 0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(argument, error):
    result = omnirl("plan", "recipe=flowgrpo_qwen_image", argument)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert error in line


def test_help_lists_the_keys(capsys):
    main(["plan", "--help"])
    printed = capsys.readouterr().out
    assert "host_memory=0" in printed and "GPUs: a100-40" in printed
