"""What Stable Diffusion 3.5 has and other families have not. Expected values: diffusers' stock pipeline."""

from __future__ import annotations

import torch

from tests.models.families import PROMPTS, FamilyCase


def test_conditions_are_the_pipelines_of_all_prompts_in_one_batch(tmp_path):
    case = FamilyCase.make("stable_diffusion_3", tmp_path / "tiny")
    pipeline = case.family.load_encoders(torch.float32)
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(PROMPTS), None, None, do_classifier_free_guidance=False
        )
    made = case.conditions(pipeline)
    assert made["embeds"].shape == (2, 333, 32) and made["pooled"].shape == (2, 32)
    torch.testing.assert_close(made["embeds"], embeds, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made["pooled"], pooled, rtol=1e-5, atol=1e-5)
    # one token for each character, one before the first word and one for the end
    assert case.family.count_text_tokens("ab cd") == 1 + 5 + 1
