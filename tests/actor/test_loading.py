"""What each rank reads of a model's files is what diffusers' own loader gives, to the bit; on two ranks:
test_fsdp, test_full.
"""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.loading import fill_from_files
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.lora import add_lora, base_tensors, lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from tests.helpers import ALONE, CPU, make_config, one_rank_group

FILE = "diffusion_pytorch_model.safetensors"


class WithBuffers(QwenImage):
    """A family whose transformer has buffers, in its files and not."""

    def empty_transformer(self, dtype, expert):
        transformer = super().empty_transformer(dtype, expert)
        transformer.register_buffer("table", torch.arange(3.0), persistent=False)
        return transformer

    def load_transformer(self, dtype, expert):
        raise AssertionError("the actor must not load a whole transformer")


def test_all_tensors_are_those_of_from_pretrained(tiny_model, tiny_prompts, tmp_path):
    config = make_config(tiny_model, tiny_prompts, tmp_path, "actor.dtype=bfloat16", "rollout.dtype=bfloat16")
    plain = QwenImage(config.model).load_transformer(torch.bfloat16)
    expected = plain.state_dict()
    with one_rank_group():
        actor = FSDPActor(config, WithBuffers(config.model), ALONE, CPU)
        made = {
            name: tensor.full_tensor()
            for name, tensor in base_tensors(actor.transformer.state_dict()).items()
        }
        adapter = dict(actor.weights())
    assert made.keys() == expected.keys()
    assert all(
        torch.equal(made[name], tensor) and made[name].dtype == torch.bfloat16
        for name, tensor in expected.items()
    )
    assert torch.equal(actor.transformer.table, torch.arange(3.0))
    add_lora(plain, config.actor.lora, QwenImage.spec.lora_targets, torch.float32, config.seed)
    slots = lora_parameters(plain)
    assert adapter.keys() == slots.keys() and all(
        torch.equal(adapter[name], slot) for name, slot in slots.items()
    )


@pytest.fixture
def files(tiny_model, tmp_path):
    """A copy of the transformer's folder, and its tensors."""
    shutil.copytree(tiny_model / "transformer", tmp_path / "transformer")
    return tmp_path / "transformer", load_file(tmp_path / "transformer" / FILE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("proj_out.bias"), "proj_out.bias is missing"),
        (lambda tensors: tensors.update(other=torch.ones(2)), "other is in the files and not in the model"),
        (
            lambda tensors: tensors.update({"proj_out.bias": torch.ones(3)}),
            r"proj_out.bias is \(3,\), the model has \(16,\)",
        ),
    ],
)
def test_files_of_another_model_are_refused(tiny_model, tiny_prompts, files, tmp_path, change, said):
    folder, tensors = files
    change(tensors)
    save_file(tensors, folder / FILE)
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    with pytest.raises(DataError, match=f"the weights in {folder} are not those of its config.json: {said}$"):
        fill_from_files(QwenImage(config.model).empty_transformer(torch.float32), folder, CPU)


@pytest.mark.parametrize("when", ["header", "tensors"])
def test_files_that_cannot_be_read_are_one_sentence(
    tiny_model, tiny_prompts, files, tmp_path, monkeypatch, when
):
    """A file system that fails on one node; torch's own error there is no Exception."""
    folder, _ = files
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    if when == "header":
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-8])
    else:

        def fail(self, plan, planner):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(HuggingFaceStorageReader, "read_data", fail)
    with pytest.raises(DataError, match=f"the weights in {folder} cannot be read: "):
        fill_from_files(QwenImage(config.model).empty_transformer(torch.float32), folder, CPU)


def test_a_tensor_that_is_there_twice_is_refused(tiny_model, tiny_prompts, files, tmp_path):
    folder, tensors = files
    save_file(
        {"proj_out.bias": tensors["proj_out.bias"]}, folder / "diffusion_pytorch_model.fp16.safetensors"
    )
    config = make_config(tiny_model, tiny_prompts, tmp_path)
    with pytest.raises(DataError, match="proj_out.bias is there twice"):
        fill_from_files(QwenImage(config.model).empty_transformer(torch.float32), folder, CPU)
