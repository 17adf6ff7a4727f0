"""A checkpoint that is damaged in the ways that copies and downloads damage it."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnirl_hpc.checks.preflight.model_files import (
    find_problems,
    parameter_shapes,
    read_header,
)
from omnirl_hpc.errors import DataError
from omnirl_hpc.planning.trained import parameter_count

ONE_FILE = "diffusion_pytorch_model.safetensors"
SHARDS = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.fixture
def model(tiny_model, tmp_path):
    """The tiny model with its transformer in two shards, as real ones are stored."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    transformer = folder / "transformer"
    tensors = load_file(transformer / ONE_FILE)
    (transformer / ONE_FILE).unlink()
    names = sorted(tensors)
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, part in zip(SHARDS, parts):
        save_file({name: tensors[name] for name in part}, transformer / file)
    weight_map = {name: file for file, part in zip(SHARDS, parts) for name in part}
    (transformer / f"{ONE_FILE}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_complete_checkpoints(tiny_model, model):
    assert find_problems(tiny_model) == []
    assert find_problems(model) == []


def test_a_missing_shard(model):
    (model / "transformer" / SHARDS[1]).unlink()
    assert find_problems(model) == [f"transformer/{SHARDS[1]} is missing"]


def test_a_file_cut_short(model):
    file = model / "transformer" / SHARDS[0]
    whole = file.stat().st_size
    os.truncate(file, whole - 1)
    assert find_problems(model) == [f"transformer/{SHARDS[0]} has {whole - 1} bytes, its header says {whole}"]
    for size in (4, 100):  # within the length, within the header
        os.truncate(file, size)
        assert find_problems(model) == [
            f"transformer/{SHARDS[0]} is cut short or damaged: {size} bytes, no header"
        ]


def test_a_file_with_something_behind(model):
    with (model / "vae" / ONE_FILE).open("ab") as file:
        file.write(b"more")
    (problem,) = find_problems(model)
    assert problem.startswith(f"vae/{ONE_FILE} has ")


def test_a_header_of_noise(model):
    file = model / "vae" / ONE_FILE
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    assert find_problems(model) == [f"vae/{ONE_FILE} is damaged: its header is not JSON"]


def test_git_without_lfs(model):
    (model / "transformer" / SHARDS[0]).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9973578592\n"
    )
    (problem,) = find_problems(model)
    assert "is a git-lfs pointer" in problem


def test_a_shard_of_another_checkpoint(model):
    save_file({"other": torch.zeros(1)}, model / "transformer" / SHARDS[0])
    (problem,) = find_problems(model)
    assert (
        problem.startswith(f"transformer/{SHARDS[0]} lacks ")
        and "tensors that the index says it has" in problem
    )


def test_an_index_that_is_missing_or_torn(model):
    index = model / "transformer" / f"{ONE_FILE}.index.json"
    index.write_text("{")
    assert find_problems(model)[0].startswith(f"{index.name} cannot be read")
    index.unlink()
    assert find_problems(model) == ["transformer/ has shards but no *.safetensors.index.json"]


def test_components_that_are_missing(model):
    shutil.rmtree(model / "scheduler")
    for file in (model / "text_encoder").glob("*.safetensors"):
        file.unlink()
    assert sorted(find_problems(model)) == [
        "scheduler/ is missing or empty",
        "text_encoder/ has no *.safetensors",
    ]


def test_a_torn_model_index(model):
    (model / "model_index.json").write_text("")
    assert find_problems(model)[0].startswith("model_index.json cannot be read")


def test_shapes_are_those_of_the_model(model):
    from diffusers import QwenImageTransformer2DModel

    transformer = QwenImageTransformer2DModel.from_pretrained(
        model, subfolder="transformer", local_files_only=True
    )
    shapes = parameter_shapes(model / "transformer")
    assert shapes == {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    assert parameter_count(shapes) == sum(p.numel() for p in transformer.parameters())


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_header(tmp_path / "none.safetensors")
