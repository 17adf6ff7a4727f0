"""Adapter folders in both formats, and the one in a run's checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from omnirl_hpc.checkpoints.adapters import (
    adapter_file,
    find_run_adapter,
    load_adapter,
    read_adapter_config,
    save_adapter,
    save_diffusers_adapter,
)
from omnirl_hpc.errors import CheckpointError, ConfigError
from omnirl_hpc.policies import EMA

LORA = {"block.to_q.lora_A.weight": torch.randn(2, 3), "block.to_q.lora_B.weight": torch.randn(5, 2)}
SETTINGS = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["to_q"],
    "lora_dropout": 0.0,
    "bias": "none",
}


@pytest.mark.parametrize("save", [save_adapter, save_diffusers_adapter])
def test_what_is_saved_is_loaded(tmp_path, save):
    assert adapter_file(tmp_path) is None
    save(tmp_path, LORA, SETTINGS)
    assert adapter_file(tmp_path).is_file()
    loaded = load_adapter(tmp_path)
    assert loaded.keys() == LORA.keys() and all(torch.equal(loaded[name], LORA[name]) for name in LORA)
    assert read_adapter_config(tmp_path) == SETTINGS


def test_what_is_no_adapter_is_one_sentence(tmp_path):
    with pytest.raises(
        CheckpointError, match="is not an adapter: it has neither adapter_model.safetensors nor pytorch_lora"
    ):
        load_adapter(tmp_path)
    save_file(LORA, tmp_path / "pytorch_lora_weights.safetensors")  # as other trainers write it
    with pytest.raises(CheckpointError, match="does not say its rank and alpha"):
        read_adapter_config(tmp_path)
    (tmp_path / "pytorch_lora_weights.safetensors").write_text("torn")
    for read in (load_adapter, read_adapter_config):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(
        CheckpointError, match="settings of the adapter in .* cannot be read: .*adapter_config.json"
    ):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_rslora": True}, "has use_rslora: only plain LoRA"),
        ({"rank_pattern": {"to_q": 8}}, "has rank_pattern"),
    ],
)
def test_an_adapter_that_is_scaled_in_another_way_is_refused(tmp_path, change, said):
    save_adapter(tmp_path, LORA, SETTINGS | {"use_dora": False, "alpha_pattern": {}} | change)
    with pytest.raises(CheckpointError, match=said):
        read_adapter_config(tmp_path)


def test_settings_without_a_scale_are_refused(tmp_path):
    save_adapter(tmp_path, LORA, {name: value for name, value in SETTINGS.items() if name != "lora_alpha"})
    with pytest.raises(CheckpointError, match="lack lora_alpha"):
        read_adapter_config(tmp_path)


def write_checkpoint(folder, step: int, ema: bool = False) -> None:
    path = folder / f"step_{step:06d}"
    for name in ("adapter", "ema") if ema else ("adapter",):
        save_adapter(path / name, LORA, SETTINGS)
    (path / "state.json").write_text(json.dumps({"step": step}))
    (path / "manifest.json").write_text("{}")


def test_the_adapter_of_a_run_is_that_of_the_newest_whole_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        find_run_adapter(tmp_path, None)
    write_checkpoint(tmp_path, 2, EMA)
    write_checkpoint(tmp_path, 5)
    (tmp_path / "step_000005.tmp").mkdir()  # being written
    assert find_run_adapter(tmp_path, None) == (5, tmp_path / "step_000005/adapter")
    assert find_run_adapter(tmp_path, 2, EMA) == (2, tmp_path / "step_000002/ema")
    with pytest.raises(
        ConfigError,
        match="step_000005 has no adapter of the policy ema: .* without actor.ema_decay; it has: current",
    ):
        find_run_adapter(tmp_path, None, EMA)
    with pytest.raises(ConfigError, match=r"--step 3: .*step_000003 does not exist; whole steps: \[2, 5\]"):
        find_run_adapter(tmp_path, 3)
    (tmp_path / "step_000005/manifest.json").write_text("torn")
    assert find_run_adapter(tmp_path, None)[0] == 2
