"""Glyph: what its prompts are to it, and that the task is what the documents say."""

from __future__ import annotations

import random
import string

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image, ImageDraw, ImageFont

from benchmarks.pretrain_glyph import probe
from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.data.glyph_words import HELD_OUT, PROMPT, TRAINING
from omnirl_hpc.models.family import DTYPE
from omnirl_hpc.models.qwen_image.family import PROMPT_TEMPLATE, TEMPLATE_START, QwenImage
from omnirl_hpc.models.qwen_image.glyph import (
    WEIGHTS,
    WORDS,
    GlyphSize,
    frame_convolutions,
    load_glyph,
    make_text_encoder,
    make_transformer,
    make_vae,
    pack,
    write_glyph,
)
from omnirl_hpc.models.qwen_image.tiny import byte_tokenizer
from omnirl_hpc.rewards.ocr import Ocr, OcrConfig, similarity

SMALL = GlyphSize(heads=1, layers=1, vae_width=4, vae_multipliers=(1, 1, 1, 1), latent_channels=4)


@pytest.fixture(scope="module")
def glyph(tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("glyph")
    write_glyph(out)
    return str(out)


@pytest.fixture(scope="module")
def ocr() -> Ocr:
    return Ocr(OcrConfig(detect=False))


def test_the_template_has_as_many_tokens_as_the_real_one():
    """So that the pipeline, which drops them, leaves the prompt's own and the five behind it."""
    tokenizer = byte_tokenizer(WORDS)
    ids = tokenizer(PROMPT_TEMPLATE.format(PROMPT.format(word="KING")))["input_ids"]
    kept = [tokenizer.decode([token]) for token in ids[TEMPLATE_START:]]
    assert kept[:8] == ["the", " word", ' "', "K", "I", "N", "G", '"']
    assert kept[8:] == ["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]


def test_words_as_tokens_leave_other_text_as_it_was():
    text = "théory of weather, THE users\n"
    assert byte_tokenizer(WORDS).decode(byte_tokenizer(WORDS)(text).input_ids) == text


def test_a_linear_map_reads_letters_at_their_places_from_embeddings():
    assert probe(make_text_encoder(GlyphSize(), seed=0), torch.device("cpu"), count=1500) > 0.99


def test_lists_of_words_share_none():
    assert not set(HELD_OUT) & set(TRAINING)
    for words in (HELD_OUT, TRAINING):
        assert len(set(words)) == len(words)
        assert all(3 <= len(word) <= 4 and set(word) <= set(string.ascii_uppercase) for word in words)


def test_what_is_packed_comes_back(tmp_path):
    torch.manual_seed(0)
    parts = (make_text_encoder(SMALL, 1), make_vae(SMALL, [0.5] * 4, [2.0] * 4), make_transformer(SMALL))
    pack(tmp_path / "packed", SMALL, *parts, facts={})
    pipeline = load_glyph(tmp_path / "packed")
    for ours, theirs in zip(parts, (pipeline.text_encoder, pipeline.vae, pipeline.transformer)):
        for name, tensor in ours.state_dict().items():
            assert torch.equal(theirs.state_dict()[name], tensor.bfloat16().float()), name
    assert pipeline.vae.config.latents_mean == [0.5] * 4 and pipeline.vae.config.latents_std == [2.0] * 4
    assert all((conv.weight[:, :, :-1] == 0).all() for conv in frame_convolutions(pipeline.vae).values())


def test_the_shipped_file_is_small():
    assert WEIGHTS.stat().st_size < 6e6


def test_prompts_fit_the_recipes_width(glyph):
    family = QwenImage(ModelConfig(path=glyph))
    assert max(family.count_text_tokens(PROMPT.format(word=word)) for word in HELD_OUT + TRAINING) < 16


def test_rendered_words_are_read(ocr):
    """In a font that pretraining never saw, the one inside Pillow."""
    scores = [similarity(ocr.recognise(rendered(word)), word) for word in HELD_OUT]
    assert sum(scores) / len(scores) >= 0.95


def rendered(word: str) -> np.ndarray:
    image = Image.new("RGB", (64, 32), (225, 214, 190))
    ImageDraw.Draw(image).text((32, 16), word, (40, 40, 110), ImageFont.load_default(20), anchor="mm")
    return np.asarray(image)


@pytest.mark.slow
def test_the_base_is_imperfect_and_draws_what_it_is_asked_for(glyph, ocr):
    """Through diffusers' stock pipeline: about half of the letters, and nothing of another prompt's word."""
    pipeline = QwenImagePipeline.from_pretrained(glyph, **{DTYPE: torch.float32})
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        [PROMPT.format(word=word) for word in HELD_OUT if len(word) == 4],
        num_inference_steps=10,
        true_cfg_scale=1.0,
        height=32,
        width=64,
        generator=torch.Generator().manual_seed(0),
    ).images
    words = [word for word in HELD_OUT if len(word) == 4]
    texts = [ocr.recognise(np.asarray(image)) for image in images]
    others = random.Random(0).sample(words, len(words))
    scores, of_others = (
        [similarity(text, word) for text, word in zip(texts, asked)] for asked in (words, others)
    )
    assert 0.25 < sum(scores) / len(scores) < 0.65
    assert sum(of_others) / len(of_others) < 0.2
