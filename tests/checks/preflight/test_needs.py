"""The least memory and disk, against sizes computed by hand and against a real checkpoint's files."""

from __future__ import annotations

import pytest

from omnirl_hpc.checks.preflight.needs import Needs, least_needs
from omnirl_hpc.config.load import load_config
from omnirl_hpc.models.qwen_image.family import QwenImage

# 6000 + 600 parameters; LoRA on to_q alone: A [r, 60] and B [100, r].
SHAPES = {"blocks.0.to_q.weight": (100, 60), "blocks.0.into_q.weight": (20, 30)}
FIXED = ("run_dir=-", "model.path=-", "data.prompts=-", "actor.lora.rank=4", "checkpoint.keep=3")
DISK = 2 * 3 * (4 * 160 * 4) * 3  # twice, kept, (rank x (in + out) x fp32), adapter and two moments


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], Needs(gpu=13200, host=13200 + 6600, disk=DISK)),  # bf16; the actor's is shared by 2 ranks
        (["residency=resident"], Needs(gpu=13200 + 6600, host=0, disk=DISK)),
        (["residency=auto"], Needs(gpu=13200, host=0, disk=DISK)),
        (["actor.shard_size=1", "actor.dtype=float32"], Needs(gpu=26400, host=13200 + 26400, disk=DISK)),
        (["rollout.tensor_parallel_size=2"], Needs(gpu=6600, host=6600 + 6600, disk=DISK)),
        # 6600 parameters x (weight + 2 moments) x fp32, by 2 ranks; resident keeps a copy for a stop in
        # mid-step
        (["actor.train=full"], Needs(gpu=39600, host=13200 + 39600, disk=2 * 3 * 79200)),
        (
            ["actor.train=full", "residency=resident"],
            Needs(gpu=13200 + 39600, host=39600, disk=2 * 3 * 79200),
        ),
        # no engine: the actor's 6600 bf16 parameters on each of 2 ranks
        (["algorithm=dpo"], Needs(gpu=6600, host=6600, disk=DISK)),
        (["algorithm=dpo", "evaluation.every=1"], Needs(gpu=13200, host=13200 + 6600, disk=DISK)),
        (["actor.lora.dtype=bfloat16"], Needs(gpu=13200, host=13200 + 6600, disk=DISK // 2)),
    ],
)
def test_needs(overrides, expected):
    assert least_needs(load_config([*FIXED, *overrides]).config, SHAPES, ["to_q"], world_size=2) == expected


def test_qwen_images_own_targets_are_found():
    """60 blocks of width 3072 with 12 targets at rank 64: 425 M parameters.

    By hand: attention 8 x 64 x (3072 + 3072), MLPs 2 x 2 x 64 x (3072 + 12288), in each of the 60 blocks.
    """
    width, block = 3072, "transformer_blocks.{}"
    mlp = {"net.0.proj": (4 * width, width), "net.2": (width, 4 * width)}
    shapes = {}
    for i in range(60):
        for name in (
            "to_q",
            "to_k",
            "to_v",
            "to_out.0",
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "to_add_out",
        ):
            shapes[f"{block.format(i)}.attn.{name}.weight"] = (width, width)
        for stream in ("img_mlp", "txt_mlp"):
            shapes |= {f"{block.format(i)}.{stream}.{name}.weight": shape for name, shape in mlp.items()}
        shapes[f"{block.format(i)}.img_mod.1.weight"] = (6 * width, width)  # no target
    config = load_config(["run_dir=-", "model.path=-", "data.prompts=-", "checkpoint.keep=1"]).config
    needs = least_needs(config, shapes, QwenImage.spec.lora_targets, world_size=1)
    assert needs.disk == 2 * 3 * 4 * 60 * 64 * (8 * 2 * width + 2 * 2 * 5 * width)
