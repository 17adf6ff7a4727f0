"""diffusers' module names -> the engine's fused and renamed layers. Needs no vllm."""

from __future__ import annotations

import pytest

from omnirl_hpc.rollout.vllm_omni.names import Place, engine_names, find_places, fused_parts

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
        ("blocks.0.attn.to_out.0", ["blocks.0.attn.to_out"]),
        ("to_out.0", ["to_out"]),  # a target suffix
        ("blocks.0.ffn.net.0.proj", ["blocks.0.ffn.net_0.proj"]),
        ("ffn.net.2", ["ffn.net_2"]),
        ("blocks.0.attn.to_add_out", []),
        ("blocks.0.into_out.0", []),
        ("blocks.0.planet.2", []),
    ],
)
def test_engine_names(diffusers: str, engine: list[str]):
    """The name itself first: some of the engine's models keep diffusers' lists."""
    assert list(engine_names(diffusers)) == [diffusers, *engine]


def test_a_list_that_the_engine_keeps_stays():
    layers = {"blocks.0.attn.to_out", "blocks.0.attn.to_out.0"}
    assert find_places(["blocks.0.attn.to_out.0"], layers, {}) == {
        "blocks.0.attn.to_out.0": Place("blocks.0.attn.to_out.0")
    }


def test_the_longest_suffix_tells_fused_layers_from_single_ones():
    """As in Wan and LTX-2, where self-attention is fused and cross-attention is not."""
    parts = fused_parts([(".attn1.to_qkv", f".attn1.to_{x}", x) for x in "qkv"])
    layers = {"blocks.0.attn1.to_qkv", "blocks.0.attn2.to_q", "blocks.0.ffn.net_0.proj"}
    assert find_places(
        ["blocks.0.attn1.to_k", "blocks.0.attn2.to_q", "blocks.0.ffn.net.0.proj"], layers, parts
    ) == {
        "blocks.0.attn1.to_k": Place("blocks.0.attn1.to_qkv", 1),
        "blocks.0.attn2.to_q": Place("blocks.0.attn2.to_q"),
        "blocks.0.ffn.net.0.proj": Place("blocks.0.ffn.net_0.proj"),
    }


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
