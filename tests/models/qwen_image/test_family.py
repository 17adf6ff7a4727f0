"""Qwen-Image is computed as diffusers' stock pipeline computes it. Expected values: that pipeline, run
here.
"""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.data.prompts import Prompt, PromptTable
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.qwen_image.family import PROMPT_TEMPLATE, TEMPLATE_START, QwenImage
from omnirl_hpc.models.spec import Guidance, Numerics
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sampling.samples import stack_conditions
from omnirl_hpc.sampling.streams import LATENTS
from tests.helpers import make_config

STEPS = 3
SCALE = 4.0
PROMPTS = ('A neon sign that reads "Copper Rocket"', "A cat")  # of different lengths
NEGATIVES = (" ", "blurry, ugly")


@pytest.fixture(scope="module")
def family(tiny_model, tiny_prompts, tmp_path_factory) -> QwenImage:
    return QwenImage(make_config(tiny_model, tiny_prompts, tmp_path_factory.mktemp("run")).model)


@pytest.fixture(scope="module")
def pipeline(family):
    return family.load_pipeline(torch.float32)


@pytest.fixture(scope="module")
def initial(family):
    shape = family.stream_shapes()[LATENTS]
    return torch.stack([standard_normal(shape, 0, "test", i) for i in range(len(PROMPTS))])


def embeds(family, pipeline, text: str) -> torch.Tensor:
    with torch.no_grad():
        return family.driver("diffusers").encode(pipeline, Prompt("0", text))["embeds"]


def texts(family, pipeline, prompts) -> dict[str, torch.Tensor]:
    padded = [family.pad({"embeds": embeds(family, pipeline, prompt)}, 256) for prompt in prompts]
    return stack_conditions(padded)


def rows(conditions: dict[str, torch.Tensor], which: slice) -> dict[str, torch.Tensor]:
    return {name: tensor[which] for name, tensor in conditions.items()}


def spy_on_steps(pipeline, monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(guided velocity, timestep, latents) of every denoising step that `pipeline` makes from now on."""
    steps, step = [], pipeline.scheduler.step

    def spy(model_output, timestep, sample, **kwargs):
        steps.append((model_output.clone(), timestep, sample.clone()))
        return step(model_output, timestep, sample, **kwargs)

    monkeypatch.setattr(pipeline.scheduler, "step", spy)
    return steps


def run_stock(family, pipeline, text, negative, initial, scale=SCALE, output_type="latent"):
    driver = family.driver("diffusers")
    inputs = driver.embeddings(text, negative) | driver.settings(Guidance({"text": scale}), STEPS)
    return pipeline(**inputs | {"output_type": output_type}, latents=initial).images


def velocity(family, pipeline, latents, timesteps, text, negative, scale=SCALE, batched=False):
    with torch.no_grad():
        return family.velocity(
            pipeline.transformer,
            {LATENTS: latents},
            {LATENTS: timesteps},
            text,
            negative,
            Guidance({"text": scale}),
            Numerics(batched_cfg=batched),
        )[LATENTS]


def test_guided_velocity_is_the_pipelines(family, pipeline, initial, monkeypatch):
    text, negative = texts(family, pipeline, PROMPTS), texts(family, pipeline, NEGATIVES)
    steps = spy_on_steps(pipeline, monkeypatch)
    run_stock(family, pipeline, text, negative, initial)
    assert len(steps) == STEPS
    for expected, timestep, latents in steps:
        timesteps = timestep.expand(len(latents))
        assert torch.equal(velocity(family, pipeline, latents, timesteps, text, negative), expected)
        both = velocity(family, pipeline, latents, timesteps, text, negative, batched=True)
        torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-5)


def test_velocity_without_guidance_is_the_pipelines(family, pipeline, initial, monkeypatch):
    text = texts(family, pipeline, PROMPTS)
    steps = spy_on_steps(pipeline, monkeypatch)
    run_stock(family, pipeline, text, None, initial, scale=1.0)
    for expected, timestep, latents in steps:
        assert torch.equal(
            velocity(family, pipeline, latents, timestep.expand(len(latents)), text, None), expected
        )


def test_bf16_velocity_is_the_pipelines(family, initial, monkeypatch):
    pipeline = family.load_pipeline(torch.bfloat16)
    text, negative = texts(family, pipeline, PROMPTS), texts(family, pipeline, NEGATIVES)
    assert text["embeds"].dtype == torch.bfloat16
    steps = spy_on_steps(pipeline, monkeypatch)
    run_stock(family, pipeline, text, negative, initial)
    timesteps = family.schedules(STEPS)[LATENTS].timesteps  # fp32; the pipeline rounds them to bf16
    for (expected, _, latents), timestep in zip(steps, timesteps, strict=True):
        assert torch.equal(
            velocity(family, pipeline, latents, timestep.expand(len(latents)), text, negative), expected
        )


def test_guided_velocity_has_the_norm_of_the_conditional_branch(family, pipeline, initial):
    """Qwen's true CFG rescales the combination, token by token."""
    text, negative = texts(family, pipeline, PROMPTS), texts(family, pipeline, NEGATIVES)
    timesteps = torch.full((2,), 700.0)
    guided = velocity(family, pipeline, initial, timesteps, text, negative)
    conditional = velocity(family, pipeline, initial, timesteps, text, None)
    assert not torch.allclose(guided, conditional, atol=1e-3)
    torch.testing.assert_close(guided.norm(dim=-1), conditional.norm(dim=-1))


def test_unequal_prompts_in_one_batch_are_as_alone(family, pipeline, initial, monkeypatch):
    """A row of a batch equals the same prompt alone, and the stock pipeline that is given the bare text: no
    padding, no mask.
    """
    text, negative = texts(family, pipeline, PROMPTS), texts(family, pipeline, NEGATIVES)
    assert len(set(text["mask"].sum(dim=1).tolist())) == 2
    timestep = family.schedules(STEPS)[LATENTS].timesteps[:1]
    for batched in (False, True):
        together = velocity(family, pipeline, initial, timestep.expand(2), text, negative, batched=batched)
        for i, (prompt, negative_prompt) in enumerate(zip(PROMPTS, NEGATIVES)):
            row = slice(i, i + 1)
            alone = velocity(
                family,
                pipeline,
                initial[row],
                timestep,
                rows(text, row),
                rows(negative, row),
                batched=batched,
            )
            torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=5e-6)
            with monkeypatch.context() as patch:
                steps = spy_on_steps(pipeline, patch)
                pipeline(
                    prompt=prompt,
                    negative_prompt=negative_prompt,
                    true_cfg_scale=SCALE,
                    height=family.config.height,
                    width=family.config.width,
                    latents=initial[row],
                    num_inference_steps=STEPS,
                    output_type="latent",
                )
            torch.testing.assert_close(together[row], steps[0][0], rtol=1e-5, atol=1e-5)


def test_padding_holds_no_information(family, pipeline, initial):
    text = texts(family, pipeline, PROMPTS)
    garbage = text | {"embeds": torch.where(text["mask"][..., None], text["embeds"], 7.0)}
    timesteps = torch.full((2,), 700.0)
    clean, dirty = (velocity(family, pipeline, initial, timesteps, t, None) for t in (text, garbage))
    torch.testing.assert_close(clean, dirty, rtol=1e-6, atol=1e-6)


def test_decoded_image_is_the_pipelines(family, pipeline, initial):
    text, negative = texts(family, pipeline, PROMPTS), texts(family, pipeline, NEGATIVES)
    latents = run_stock(family, pipeline, text, negative, initial)
    images = run_stock(family, pipeline, text, negative, initial, output_type="np")
    expected = torch.from_numpy((images * 255).round().astype("uint8")).permute(0, 3, 1, 2)
    assert expected.shape == (2, 3, 32, 48)
    assert expected.float().std() > 1  # not a blank image
    assert torch.equal(family.decode(pipeline, {LATENTS: latents}).frames[:, 0], expected)


def test_template_is_the_pipelines(pipeline):
    assert PROMPT_TEMPLATE == pipeline.prompt_template_encode
    assert TEMPLATE_START == pipeline.prompt_template_encode_start_idx
    assert QwenImage.spec.max_text_tokens == pipeline.tokenizer_max_length


def test_token_count_is_the_length_of_the_embeddings(family, pipeline, tiny_prompts):
    prompts = ["", "a cat", "café 漢字 {braces} <|im_end|>", PromptTable(tiny_prompts)[0].prompt]
    for prompt in prompts:
        assert family.count_text_tokens(prompt) == len(embeds(family, pipeline, prompt)), prompt


def test_longest_prompt_is_encoded_whole_and_a_longer_one_refused(family, pipeline):
    room = family.spec.max_text_tokens - family.count_text_tokens("")
    longest = "x" * room  # the tiny tokenizer has one token for each byte
    assert family.count_text_tokens(longest) == len(embeds(family, pipeline, longest)) == 1024
    with pytest.raises(DataError, match="1025 tokens is longer than Qwen-Image's 1024: 'xxx"):
        family.count_text_tokens(longest + "x")


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


def test_latent_shape(family, pipeline):
    # 32 x 48 pixels are 2 x 3 tokens of 16 x 16 pixels; 4 latent channels x (2 x 2) cells
    assert family.stream_shapes() == {LATENTS: (6, 16)}
    assert pipeline.transformer.config.in_channels == 16


def test_schedule_is_the_pipelines(family, pipeline, initial):
    run_stock(family, pipeline, texts(family, pipeline, PROMPTS), None, initial, scale=1.0)
    schedule = family.schedules(STEPS)[LATENTS]
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_transformer_lacks_nothing_but_its_parameters(family, dtype):
    """Rotary tables are neither parameters nor buffers: nothing would fill them later."""
    empty, full = family.empty_transformer(dtype), family.load_transformer(dtype)
    assert torch.get_default_dtype() == torch.float32 and not empty.training
    made, expected = dict(empty.named_parameters()), dict(full.named_parameters())
    assert {name: (p.shape, p.dtype) for name, p in made.items()} == {
        n: (p.shape, p.dtype) for n, p in expected.items()
    }
    assert all(parameter.is_meta for parameter in made.values())
    others, wanted = other_tensors(empty), other_tensors(full)
    assert {"pos_embed.pos_freqs", "pos_embed.neg_freqs"} <= others.keys() == wanted.keys()
    assert all(
        others[name].dtype == tensor.dtype and torch.equal(others[name], tensor)
        for name, tensor in wanted.items()
    )


def other_tensors(model) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) | {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
