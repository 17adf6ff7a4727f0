"""diffusers' module names -> the engine's fused and renamed layers. Needs no vllm."""

from __future__ import annotations

import pytest

from omnirl_hpc.rollout.vllm_omni.names import Place, engine_name, find_places, fused_parts

# As in vllm-omni's QwenImageTransformer2DModel.load_weights
STACKED = [
    (".to_qkv", ".to_q", "q"),
    (".to_qkv", ".to_k", "k"),
    (".to_qkv", ".to_v", "v"),
    (".add_kv_proj", ".add_q_proj", "q"),
    (".add_kv_proj", ".add_k_proj", "k"),
    (".add_kv_proj", ".add_v_proj", "v"),
]
LAYERS = {
    "blocks.0.attn.to_qkv",
    "blocks.0.attn.add_kv_proj",
    "blocks.0.attn.to_out",
    "blocks.0.img_mlp.net.2",
    "to_out",
}


@pytest.mark.parametrize(
    ("diffusers", "engine"),
    [
        ("blocks.0.attn.to_out.0", "blocks.0.attn.to_out"),
        ("to_out.0", "to_out"),  # a target suffix
        ("blocks.0.img_mlp.net.0.proj", "blocks.0.img_mlp.net.0.proj"),
        ("blocks.0.attn.to_add_out", "blocks.0.attn.to_add_out"),
        ("blocks.0.into_out.0", "blocks.0.into_out.0"),
    ],
)
def test_engine_name(diffusers: str, engine: str):
    assert engine_name(diffusers) == engine


def test_places_in_fused_and_plain_layers():
    parts = fused_parts(STACKED)
    places = find_places(
        [
            "blocks.0.attn.to_q",
            "blocks.0.attn.to_v",
            "blocks.0.attn.add_k_proj",
            "blocks.0.attn.to_out.0",
            "blocks.0.img_mlp.net.2",
        ],
        LAYERS,
        parts,
    )
    assert places == {
        "blocks.0.attn.to_q": Place("blocks.0.attn.to_qkv", 0),
        "blocks.0.attn.to_v": Place("blocks.0.attn.to_qkv", 2),
        "blocks.0.attn.add_k_proj": Place("blocks.0.attn.add_kv_proj", 1),
        "blocks.0.attn.to_out.0": Place("blocks.0.attn.to_out"),
        "blocks.0.img_mlp.net.2": Place("blocks.0.img_mlp.net.2"),
    }


def test_a_module_that_the_engine_lacks_has_no_place():
    assert find_places(["blocks.1.attn.to_q", "blocks.0.attn.to_x"], LAYERS, fused_parts(STACKED)) == {}
