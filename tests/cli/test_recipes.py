"""`omnirl-hpc recipes`, and the numbers of the main recipe."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from omnirl_hpc.cli import recipes
from omnirl_hpc.cli.main import main
from omnirl_hpc.cli.recipes import COLUMNS, header, recipe_files, row
from omnirl_hpc.config.load import NO_PATHS, load_config
from omnirl_hpc.config.resume import flatten
from omnirl_hpc.models.qwen_image.shape import LORA_TARGETS
from tests.cli.test_commands import omnirl

# Row "Qwen-Image FlowGRPO OCR LoRA" of shared/reference/verl_omni.md 1.9, read from verl-omni's
# run_qwen_image_ocr_lora.sh, and the optimizer's defaults in the paragraph below it. Not taken over: its
# judge, and 32 samples at once for log-probabilities.
REFERENCE = {
    "model.height": 512,
    "model.width": 512,
    "data.prompts_per_step": 32,
    "data.samples_per_prompt": 16,
    "sampling.num_inference_steps": 10,
    "sampling.true_cfg_scale": 4.0,
    "sampling.transition": "sde",
    "sampling.noise_level": 1.2,
    "sampling.window.size": 2,
    "sampling.window.first": 0,
    "sampling.window.last": 5,
    "rollout.engine": "vllm_omni",
    "rollout.dtype": "bfloat16",
    "actor.dtype": "bfloat16",
    "actor.updates_per_step": 2,
    "actor.micro_batch_size": 16,
    "actor.lora.rank": 64,
    "actor.lora.alpha": 128,
    "actor.lora.target_modules": None,
    "actor.optimizer.lr": 3e-4,
    "actor.optimizer.weight_decay": 1e-4,
    "actor.optimizer.betas": [0.9, 0.999],
    "actor.optimizer.max_grad_norm": 1.0,
    "actor.optimizer.warmup_updates": 0,
    "algorithm.name": "flow_grpo",
    "algorithm.clip_range": 1e-5,
    "algorithm.kl_coef": 0.0,
    "steps": 300,
}


def test_the_main_recipe_has_the_reference_numbers():
    config = load_config([*NO_PATHS, "recipe=flowgrpo_qwen_image"]).config
    values = flatten(OmegaConf.to_container(OmegaConf.structured(config)))
    assert {key: values[key] for key in REFERENCE} == REFERENCE
    assert len(LORA_TARGETS) == 12


@pytest.mark.parametrize("file", recipe_files(), ids=lambda file: file.stem)
def test_every_recipe_says_where_its_numbers_come_from(file):
    assert all(header(file).values()), f"{file} needs lines '# GPUs: …' and '# Source: …'"
    assert len(row(file)) == len(COLUMNS) and all(row(file))


def test_the_table(capsys):
    main(["recipes"])
    printed = capsys.readouterr().out
    assert all(file.stem in printed for file in recipe_files()) and "none" not in [
        file.stem for file in recipe_files()
    ]
    assert "run_qwen_image_ocr_lora.sh" in printed and "FSDP2, LoRA r64" in printed


def test_a_recipe_that_cannot_be_loaded_hides_no_other(capsys, monkeypatch, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("")  # configs/recipe has none of this name
    monkeypatch.setattr(recipes, "recipe_files", lambda: [broken, *recipe_files()])
    main(["recipes"])
    printed = capsys.readouterr().out
    assert "recipe=broken is not known" in printed and "FSDP2, LoRA r64" in printed


def test_without_torch():
    assert "TORCH False" in omnirl("recipes").stdout
