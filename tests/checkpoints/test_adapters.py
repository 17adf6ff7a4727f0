"""Adapter folders in both formats, and the one in a run's checkpoint."""

from __future__ import annotations

import errno
import io
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnirl_hpc.checkpoints.adapters import (
    adapter_file,
    find_run_adapter,
    load_adapter,
    load_adapter_scaled,
    read_adapter_config,
    save_adapter,
    save_diffusers_adapter,
)
from omnirl_hpc.config.schema import LoraConfig
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


@pytest.mark.parametrize("file", [False, True])
def test_what_is_saved_is_loaded(tmp_path, file):
    assert adapter_file(tmp_path) is None
    save_adapter(tmp_path, LORA, SETTINGS)
    adapter = adapter_file(tmp_path) if file else tmp_path
    loaded = load_adapter(adapter)
    assert loaded.keys() == LORA.keys() and all(torch.equal(loaded[name], LORA[name]) for name in LORA)
    assert read_adapter_config(adapter) == SETTINGS


def test_an_adapter_of_two_networks_is_exported_below_both(tmp_path):
    """As diffusers' pipelines with two load it (WanLoraLoaderMixin: transformer, transformer_2)."""
    both = LORA | {f"transformer_2.{name}": 2 * tensor for name, tensor in LORA.items()}
    save_diffusers_adapter(tmp_path, both, SETTINGS | {"lora_alpha": 2})
    stored = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert stored.keys() == {
        f"{network}.{name}" for network in ("transformer", "transformer_2") for name in LORA
    }
    loaded = load_adapter(tmp_path)
    assert loaded.keys() == both.keys() and all(torch.equal(loaded[name], both[name]) for name in both)


@pytest.mark.parametrize("file", [False, True])
def test_what_is_exported_has_its_strength_in_the_weights(tmp_path, file):
    """Readers of the tensors alone, of the header and of adapter_config.json get the same."""
    save_diffusers_adapter(tmp_path, LORA, SETTINGS)
    adapter = adapter_file(tmp_path) if file else tmp_path
    loaded, settings = load_adapter(adapter), read_adapter_config(adapter)
    a, b = LORA
    assert torch.equal(loaded[a], LORA[a]) and torch.equal(loaded[b], 2 * LORA[b])
    assert settings == SETTINGS | {"lora_alpha": 2}
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == settings
    (tmp_path / "adapter_config.json").unlink()
    assert read_adapter_config(adapter) == settings


@pytest.mark.parametrize(
    "file", ["adapter_model.safetensors", "pytorch_lora_weights.safetensors", "mine.safetensors"]
)
def test_a_run_starts_from_an_adapter_at_its_own_alpha(tmp_path, file):
    """One with settings is scaled to the run's alpha; one without has the run's."""
    config = LoraConfig(rank=2, alpha=8)
    if file == "adapter_model.safetensors":
        save_adapter(tmp_path, LORA, SETTINGS)
        factor = 0.5
    elif file == "pytorch_lora_weights.safetensors":
        save_diffusers_adapter(tmp_path, LORA, SETTINGS)
        factor = 0.5
    else:
        save_file(LORA, tmp_path / file)
        factor = 1
    loaded, (a, b) = load_adapter_scaled(tmp_path / file, config), LORA
    assert torch.equal(loaded[a], LORA[a]) and torch.equal(loaded[b], factor * LORA[b])


def test_an_adapter_without_settings_has_those_that_are_assumed(tmp_path):
    save_file(LORA, tmp_path / "mine.safetensors")
    assert read_adapter_config(tmp_path / "mine.safetensors", assumed=LoraConfig(rank=9, alpha=6)) == {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["block.to_q"],
    }
    save_file({**LORA, "block.to_k.lora_A.weight": torch.ones(3, 3)}, tmp_path / "mixed.safetensors")
    with pytest.raises(ConfigError, match="has rank_pattern"):
        read_adapter_config(tmp_path / "mixed.safetensors", assumed=LoraConfig())


def test_what_is_no_adapter_is_one_sentence(tmp_path):
    for read, kind in ((load_adapter, CheckpointError), (read_adapter_config, ConfigError)):
        with pytest.raises(
            kind, match="is not an adapter: it has neither adapter_model.safetensors nor pytorch_lora"
        ):
            read(tmp_path)
    save_file(LORA, tmp_path / "pytorch_lora_weights.safetensors")  # as other trainers write it
    with pytest.raises(ConfigError, match="does not say its rank and alpha"):
        read_adapter_config(tmp_path)
    save_file({"block.to_q.alpha": torch.ones(1)}, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(
        ConfigError, match=r"has block.to_q.alpha: an adapter's tensors are named \*.lora_A.weight and"
    ):
        read_adapter_config(tmp_path)
    (tmp_path / "pytorch_lora_weights.safetensors").write_text("torn")
    for read, kind in ((load_adapter, CheckpointError), (read_adapter_config, ConfigError)):
        with pytest.raises(kind, match="cannot be read"):
            read(tmp_path)
    save_file(LORA, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="adapter_model.safetensors cannot be read: .*adapter_config.json"):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_files_follow_the_umask(tmp_path, umask):
    """Colleagues read them where the user's other files can be read."""
    before = os.umask(umask)
    try:
        save_adapter(tmp_path / "peft", LORA, SETTINGS)
        save_diffusers_adapter(tmp_path / "diffusers", LORA, SETTINGS)
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in tmp_path.glob("*/*")}
    assert modes == {0o666 & ~umask} and len(list(tmp_path.glob("*/*"))) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_rslora": True}, "has use_rslora: only plain LoRA"),
        ({"rank_pattern": {"to_q": 8}}, "has rank_pattern"),
    ],
)
def test_an_adapter_that_is_scaled_in_another_way_is_refused(tmp_path, change, said):
    save_adapter(tmp_path, LORA, SETTINGS | {"use_dora": False, "alpha_pattern": {}} | change)
    with pytest.raises(ConfigError, match=said):
        read_adapter_config(tmp_path)


def test_settings_without_a_scale_are_refused(tmp_path):
    save_adapter(tmp_path, LORA, {name: value for name, value in SETTINGS.items() if name != "lora_alpha"})
    with pytest.raises(ConfigError, match="lack lora_alpha"):
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


def test_a_checkpoint_that_cannot_be_read_is_not_reported_as_missing(tmp_path, monkeypatch):
    """Another user's run whose newest checkpoint is closed to us."""
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 5)
    manifest = {"adapter/adapter_model.safetensors": [1, 1]}
    (tmp_path / "step_000005/manifest.json").write_text(json.dumps(manifest))
    opened = io.open

    def refuse(path, *arguments, **options):
        if str(path).endswith("step_000005/adapter/adapter_model.safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(
        ConfigError,
        match=r"step_000005 has adapter/\S+, which cannot be read \(Permission denied\).*--step N",
    ):
        find_run_adapter(tmp_path, None)
    assert find_run_adapter(tmp_path, 2)[0] == 2
