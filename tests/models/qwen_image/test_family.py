"""What Qwen-Image has and other families have not. Expected values: diffusers' stock pipeline."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.data.prompts import Prompt, PromptTable
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.qwen_image.family import PROMPT_TEMPLATE, TEMPLATE_START, QwenImage
from omnirl_hpc.models.spec import Guidance, Numerics
from omnirl_hpc.sampling.streams import LATENTS
from tests.models.families import NEGATIVES, FamilyCase

SCALE = 4.0


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> FamilyCase:
    return FamilyCase.make("qwen_image", tmp_path_factory.mktemp("qwen_image") / "tiny")


@pytest.fixture(scope="module")
def family(case) -> QwenImage:
    return case.family


@pytest.fixture(scope="module")
def pipeline(family):
    return family.load_pipeline(torch.float32)


@torch.no_grad()
def velocity(case, pipeline, text, negative):
    latents = case.initial()
    times = {LATENTS: torch.full((2,), 700.0)}
    return case.family.velocity(
        pipeline.transformer, latents, times, text, negative, Guidance({"text": SCALE}), Numerics()
    )[LATENTS]


def test_guided_velocity_has_the_norm_of_the_conditional_branch(case, pipeline):
    """Qwen's true CFG rescales the combination, token by token."""
    text, negative = case.conditions(pipeline), case.conditions(pipeline, NEGATIVES)
    guided, conditional = (velocity(case, pipeline, text, n) for n in (negative, None))
    assert not torch.allclose(guided, conditional, atol=1e-3)
    torch.testing.assert_close(guided.norm(dim=-1), conditional.norm(dim=-1))


def test_padding_holds_no_information(case, pipeline):
    text = case.conditions(pipeline)
    assert len(set(text["mask"].sum(dim=1).tolist())) == 2
    garbage = text | {"embeds": torch.where(text["mask"][..., None], text["embeds"], 7.0)}
    clean, dirty = (velocity(case, pipeline, t, None) for t in (text, garbage))
    torch.testing.assert_close(clean, dirty, rtol=1e-6, atol=1e-6)


def test_template_is_the_pipelines(pipeline):
    assert PROMPT_TEMPLATE == pipeline.prompt_template_encode
    assert TEMPLATE_START == pipeline.prompt_template_encode_start_idx
    assert QwenImage.spec.max_text_tokens == pipeline.tokenizer_max_length


@torch.no_grad()
def test_token_count_is_the_length_of_the_embeddings(family, pipeline, tiny_prompts):
    prompts = ["", "a cat", "café 漢字 {braces} <|im_end|>", PromptTable(tiny_prompts)[0].prompt]
    for prompt in prompts:
        made = family.driver("diffusers").encode(pipeline, Prompt("0", prompt))["embeds"]
        assert family.count_text_tokens(prompt) == len(made), prompt


@pytest.mark.parametrize("counts, expected", [([1], 64), ([63, 2], 64), ([64], 128), ([2, 127, 128], 256)])
def test_width_leaves_room_for_one_token_of_padding(family, monkeypatch, counts, expected):
    monkeypatch.setattr(family, "count_text_tokens", len)
    assert family.condition_width(["x" * count for count in counts], [64, 128, 256]) == expected
    assert family.longest_text([64, 128, 256]) == 255


def test_a_prompt_that_fits_no_width_is_an_error(family, monkeypatch):
    monkeypatch.setattr(family, "count_text_tokens", len)
    with pytest.raises(DataError, match=r"no width in data.text_lengths=\[64, 128\] holds 128 tokens"):
        family.condition_width(["x" * 3, "x" * 128], [64, 128])


def test_text_is_never_truncated(family):
    with pytest.raises(ValueError, match="9 tokens do not fit into 8"):
        family.pad({"embeds": torch.zeros(9, 4)}, 8)
