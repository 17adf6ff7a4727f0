"""Stable Diffusion 3.5 is computed as diffusers' stock pipeline computes it. Expected values: that
pipeline.
"""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.config.schema import ModelConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.spec import Guidance, Numerics
from omnirl_hpc.models.stable_diffusion_3.family import StableDiffusion3
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sampling.samples import stack_conditions
from omnirl_hpc.sampling.streams import LATENTS

STEPS, SCALE = 3, 4.5
PROMPTS = ('A neon sign that reads "Copper Rocket"', "A cat")
NEGATIVES = ("", "blurry, ugly")


@pytest.fixture(scope="module")
def family(tiny_sd3) -> StableDiffusion3:
    return StableDiffusion3(ModelConfig(family="stable_diffusion_3", path=str(tiny_sd3), height=32, width=48))


@pytest.fixture(scope="module")
def pipeline(family):
    return family.load_pipeline(torch.float32)


@pytest.fixture(scope="module")
def initial(family):
    shape = family.stream_shapes()[LATENTS]
    return torch.stack([standard_normal(shape, 0, "test", i) for i in range(len(PROMPTS))])


def conditions(family, pipeline, texts) -> dict[str, torch.Tensor]:
    encode = family.driver("diffusers").encode
    with torch.no_grad():
        rows = [family.pad(encode(pipeline, Prompt("0", text)), 333) for text in texts]
    return stack_conditions(rows)


def spy_on_steps(pipeline, monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(guided velocity, timestep, latents) of every denoising step that `pipeline` makes from now on."""
    steps, step = [], pipeline.scheduler.step

    def spy(model_output, timestep, sample, **kwargs):
        steps.append((model_output.clone(), timestep, sample.clone()))
        return step(model_output, timestep, sample, **kwargs)

    monkeypatch.setattr(pipeline.scheduler, "step", spy)
    return steps


def velocity(family, pipeline, latents, timesteps, text, negative, batched):
    with torch.no_grad():
        return family.velocity(
            pipeline.transformer,
            {LATENTS: latents},
            {LATENTS: timesteps},
            text,
            negative,
            Guidance({"text": SCALE}),
            Numerics(batched_cfg=batched),
        )[LATENTS]


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_velocity_and_schedule_are_the_pipelines(family, initial, monkeypatch, guided, dtype):
    """To the bit."""
    pipeline = family.load_pipeline(dtype)
    text = conditions(family, pipeline, PROMPTS)
    negative = conditions(family, pipeline, NEGATIVES) if guided else None
    steps = spy_on_steps(pipeline, monkeypatch)
    pipeline(
        prompt_embeds=text["embeds"],
        pooled_prompt_embeds=text["pooled"],
        negative_prompt_embeds=negative["embeds"] if guided else None,
        negative_pooled_prompt_embeds=negative["pooled"] if guided else None,
        guidance_scale=SCALE if guided else 1.0,
        height=32,
        width=48,
        latents=initial,
        num_inference_steps=STEPS,
        output_type="latent",
    )
    schedule = family.schedules(STEPS)[LATENTS]
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, torch.stack([timestep for _, timestep, _ in steps]))
    for expected, timestep, latents in steps:
        made = velocity(family, pipeline, latents, timestep.expand(2), text, negative, batched=True)
        assert torch.equal(made, expected)
        if guided and dtype == torch.float32:
            apart = velocity(family, pipeline, latents, timestep.expand(2), text, negative, batched=False)
            torch.testing.assert_close(apart, expected, rtol=1e-5, atol=1e-5)


def test_conditions_are_the_pipelines(family, pipeline):
    """Which encodes all prompts in one batch."""
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(PROMPTS), None, None, do_classifier_free_guidance=False
        )
    made = conditions(family, pipeline, PROMPTS)
    torch.testing.assert_close(made["embeds"], embeds, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made["pooled"], pooled, rtol=1e-5, atol=1e-5)


def test_decoded_image_is_the_pipelines(family, pipeline, initial):
    text = conditions(family, pipeline, PROMPTS)
    inputs = {"prompt_embeds": text["embeds"], "pooled_prompt_embeds": text["pooled"], "guidance_scale": 1.0}
    inputs |= {"height": 32, "width": 48, "latents": initial, "num_inference_steps": STEPS}
    latents = pipeline(**inputs, output_type="latent").images
    images = pipeline(**inputs, output_type="np").images
    expected = torch.from_numpy((images * 255).round().astype("uint8")).permute(0, 3, 1, 2)
    assert expected.shape == (2, 3, 32, 48) and expected.float().std() > 1
    assert torch.equal(family.decode(pipeline, {LATENTS: latents}).frames[:, 0], expected)


def test_a_condition_always_has_its_width(family, pipeline):
    text = conditions(family, pipeline, PROMPTS)
    assert text["embeds"].shape == (2, 333, 32) and text["pooled"].shape == (2, 32)
    assert family.condition_width(PROMPTS, [64]) == 333  # data.text_lengths has no say


def test_a_prompt_that_t5_would_cut_is_an_error(family):
    """The tiny tokenizer has one token for each character, one before the first word and one for the end."""
    assert family.count_text_tokens("ab cd") == 1 + 5 + 1
    longest = "x" * 254
    assert family.count_text_tokens(longest) == 256 == family.longest_text([64])
    with pytest.raises(DataError, match="257 tokens is longer than Stable Diffusion 3.5's 256: 'xxx"):
        family.condition_width([longest + "x"], [64])


def test_latent_shape(family):
    assert family.stream_shapes() == {LATENTS: (16, 4, 6)}


def test_an_empty_transformer_lacks_nothing_but_its_parameters(family):
    """The table of positions is a buffer in the file."""
    empty, full = family.empty_transformer(torch.float32), family.load_transformer(torch.float32)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert dict(empty.named_buffers()).keys() == dict(full.named_buffers()).keys() == {"pos_embed.pos_embed"}
    assert torch.equal(empty.pos_embed.pos_embed, full.pos_embed.pos_embed)
