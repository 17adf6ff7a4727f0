"""Checkpoints that look like Qwen-Image's and are something else, and paths that are not a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from omnirl_hpc.checks.supported import find_unsupported, where_it_may_be
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.qwen_image.spec import SPEC
from omnirl_hpc.models.spec import find_spec
from tests.stand_ins import write_descriptions

# Qwen/Qwen-Image's own files, setting by setting
PUBLISHED_SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.34.0.dev0",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
PUBLISHED_TRANSFORMER = {
    "_class_name": "QwenImageTransformer2DModel",
    "_diffusers_version": "0.34.0.dev0",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 768,
}


@pytest.fixture
def model(tmp_path):
    folder = write_descriptions(tmp_path / "model")
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(PUBLISHED_SCHEDULER))
    (folder / "transformer/config.json").write_text(json.dumps(PUBLISHED_TRANSFORMER))
    return folder


def change(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_what_is_published_and_what_we_make_is_supported(model, tiny_model):
    assert find_unsupported(model, SPEC) == []
    assert find_unsupported(tiny_model, find_spec("qwen_image")) == []


def test_settings_of_a_later_version_that_are_off_change_nothing(model):
    change(model / "transformer/config.json", zero_cond_t=False, use_new_rope=None, fast=False)
    assert find_unsupported(model, SPEC) == []


def test_another_pipeline_of_the_same_transformer(model):
    change(
        model / "model_index.json", _class_name="QwenImageEditPlusPipeline", processor=["transformers", "P"]
    )
    assert find_unsupported(model, SPEC) == [
        "model_index.json names the pipeline QwenImageEditPlusPipeline, not QwenImagePipeline"
    ]


def test_another_scheduler_is_not_replaced(model):
    change(model / "model_index.json", scheduler=["diffusers", "UniPCMultistepScheduler"])
    file = model / "scheduler/scheduler_config.json"
    change(file, _class_name="UniPCMultistepScheduler", flow_shift=3.0)
    assert find_unsupported(model, SPEC) == [
        "model_index.json names UniPCMultistepScheduler as scheduler, not FlowMatchEulerDiscreteScheduler"
    ]


def test_a_scheduler_file_of_another_class_than_the_index_says(model):
    change(model / "scheduler/scheduler_config.json", _class_name="UniPCMultistepScheduler", flow_shift=3.0)
    assert find_unsupported(model, SPEC) == [
        "scheduler/scheduler_config.json is of UniPCMultistepScheduler, model_index.json names "
        "FlowMatchEulerDiscreteScheduler"
    ]


@pytest.mark.parametrize(
    ("file", "settings", "said"),
    [
        ("scheduler/scheduler_config.json", {"flow_shift": 3.0}, "sets flow_shift=3.0, which is not known"),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "use_karras_sigmas=true, not false"),
        ("scheduler/scheduler_config.json", {"stochastic_sampling": True}, "sampling=true, not false"),
        ("scheduler/scheduler_config.json", {"invert_sigmas": True}, "sets invert_sigmas=true, not false"),
        (
            "scheduler/scheduler_config.json",
            {"time_shift_type": "cosine"},
            'sets time_shift_type="cosine", not "exponential" or "linear"',
        ),
        ("transformer/config.json", {"guidance_embeds": True}, "sets guidance_embeds=true, not false"),
        ("transformer/config.json", {"zero_cond_t": True}, "sets zero_cond_t=true, not false"),
        ("transformer/config.json", {"patch_size": 1}, "sets patch_size=1, not 2"),
        (
            "transformer/config.json",
            {"quantization_config": {"load_in_4bit": True}},
            "holds quantized weights",
        ),
        ("text_encoder/config.json", {"quantization_config": {"bits": 8}}, "holds quantized weights"),
    ],
)
def test_a_setting_that_cannot_be_trained_is_named_with_its_file(model, file, settings, said):
    (model / file).parent.mkdir(exist_ok=True)
    old = json.loads((model / file).read_text()) if (model / file).is_file() else {}
    (model / file).write_text(json.dumps(old | settings))
    (problem,) = find_unsupported(model, SPEC)
    assert problem.startswith(file) and said in problem


def test_a_component_of_another_class_or_none(model):
    change(model / "model_index.json", vae=["diffusers", "AutoencoderKL"], text_encoder=[None, None])
    assert find_unsupported(model, SPEC) == [
        "model_index.json names nothing as text_encoder, not Qwen2_5_VLForConditionalGeneration",
        "model_index.json names AutoencoderKL as vae, not AutoencoderKLQwenImage",
    ]


def test_a_family_of_ones_own_states_its_own(model):
    change(model / "model_index.json", _class_name="MyPipeline")
    assert find_unsupported(model, replace(SPEC, pipeline_classes=("MyPipeline",))) == []


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_files_that_hold_no_settings(model, content):
    (model / "transformer/config.json").write_text(content)
    with pytest.raises(DataError, match="transformer/config.json (cannot be read|holds list)"):
        find_unsupported(model, SPEC)


def test_a_name_on_the_hub():
    assert "omnirl-hpc prefetch recipe=flowgrpo_qwen_image model.repo=Qwen/Qwen-Image model.path=DIR" in (
        where_it_may_be("Qwen/Qwen-Image")
    )
    assert where_it_may_be("/nowhere/at/all") == ""


@pytest.mark.parametrize("inside", ["models--Qwen--Qwen-Image", ".", "home"])
def test_the_cache_of_the_hub_client(tmp_path, inside):
    place = {"home": "hub/models--Qwen--Qwen-Image"}.get(inside, "models--Qwen--Qwen-Image")
    snapshot = write_descriptions(tmp_path / place / "snapshots" / "c0ffee")
    given = tmp_path if inside == "home" else tmp_path / inside
    assert where_it_may_be(str(given)).endswith(f"set model.path to the snapshot {snapshot}")


def test_a_folder_within_the_checkpoint(model):
    assert where_it_may_be(str(model / "transformer")).endswith(f"set model.path={model}")
