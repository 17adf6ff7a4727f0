"""The tiny checkpoint: reproducible, complete, small."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import QwenImagePipeline

from omnirl_hpc.models.qwen_image.tiny import write_tiny


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_seed_writes_the_same_bytes(tiny_model, tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    write_tiny(tmp_path / "again", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    first, again = contents(tiny_model), contents(tmp_path / "again")
    assert first.keys() == again.keys()
    assert {name for name in first if first[name] != again[name]} == set()
    assert sum(map(len, first.values())) < 4e6


def test_other_seed_writes_other_weights(tiny_model, tmp_path):
    write_tiny(tmp_path / "other", seed=1)
    first, other = contents(tiny_model), contents(tmp_path / "other")
    weights = {name for name in first if name.endswith(".safetensors")}
    assert {name.split("/")[0] for name in weights} == {"text_encoder", "transformer", "vae"}
    assert {name for name in first if first[name] != other[name]} == weights


def test_stock_pipeline_makes_an_image_of_a_text(tiny_model):
    pipeline = QwenImagePipeline.from_pretrained(tiny_model)
    pipeline.set_progress_bar_config(disable=True)
    seeded = torch.Generator().manual_seed(0)
    image = pipeline("a cat", num_inference_steps=2, height=32, width=48, generator=seeded).images[0]
    assert image.size == (48, 32)
    assert len(set(image.convert("L").tobytes())) > 8


def test_tokenizer_has_one_token_for_each_byte(tiny_model):
    tokenizer = QwenImagePipeline.from_pretrained(tiny_model).tokenizer
    text = "café 漢字\n"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer("<|im_start|>a").input_ids) == "<|im_start|>a"
