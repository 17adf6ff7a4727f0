"""What every family promises. Expected values: diffusers' stock pipelines, run here on bare text."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from omnirl_hpc.checks.supported import find_unsupported
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError, DataError
from omnirl_hpc.models.spec import Guidance, Numerics, find_spec
from omnirl_hpc.sampling.samples import Media
from tests.models.families import NEGATIVES, PROMPTS, STEPS, FamilyCase, StockCall, sample

SCALE = 4.0
guided_or_not = pytest.mark.parametrize("scale", [SCALE, 1.0], ids=["guided", "unguided"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@guided_or_not
def test_media_are_the_stock_pipelines(case: FamilyCase, scale):
    """From bare text to pixels and sound: conditions, schedule, guidance, decoding. A row of a batch is what
    the pipeline makes of its prompt alone.
    """
    pipeline = case.family.load_pipeline(torch.float32)
    with torch.no_grad():
        stock = [
            case.facts.stock(
                pipeline,
                StockCall(
                    prompt,
                    negative if scale > 1 else None,
                    scale,
                    {name: x[i : i + 1] for name, x in case.initial().items()},
                    case.config,
                ),
            )
            for i, (prompt, negative) in enumerate(zip(PROMPTS, NEGATIVES))
        ]
    expected, scheduler = Media.cat(stock), pipeline.scheduler
    for schedule in case.family.schedules(STEPS).values():
        assert torch.equal(schedule.sigmas, scheduler.sigmas)
        assert torch.equal(schedule.timesteps, scheduler.timesteps)
    latents, _ = sample(case, pipeline, case.inputs(pipeline, scale))
    made = case.family.decode(pipeline, latents)
    size = case.config.frames, 3, case.config.height, case.config.width
    assert made.frames.shape == expected.frames.shape == (2, *size)
    assert expected.frames.float().std() > 1  # not a blank image
    levels = (made.frames.int() - expected.frames.int()).abs()
    assert levels.max() <= 1 and (levels > 0).float().mean() < 0.01  # rounded at another place
    assert (made.fps, made.sample_rate) == (expected.fps, expected.sample_rate)
    if "audio" in case.family.spec.makes:
        assert made.audio.dim() == 3 and made.audio.abs().max() <= 1
        torch.testing.assert_close(made.audio, expected.audio, rtol=1e-3, atol=1e-4)
    else:
        assert made.audio is None


@guided_or_not
@both_dtypes
def test_velocity_is_that_of_the_engine_to_the_bit(case: FamilyCase, scale, dtype):
    """At every step of the pipeline, with timesteps of our schedule: fp32, which pipelines may round."""
    pipeline = case.family.load_pipeline(dtype)
    inputs = case.inputs(pipeline, scale)
    _, recorder = sample(case, pipeline, inputs)
    streams, schedules = len(inputs.initial), case.family.schedules(STEPS)
    assert len(recorder.steps) == STEPS * streams
    numerics = case.family.spec.numerics["diffusers"]
    for step in range(STEPS):
        made = recorder.steps[step * streams : (step + 1) * streams]
        latents = {name: x for name, x, _ in made}
        times = {name: schedules[name].timesteps[step].expand(2) for name in latents}
        for how in (numerics, Numerics(not numerics.batched_cfg, numerics.round_timestep)):
            with torch.no_grad():
                velocity = case.family.velocity(
                    pipeline.transformer,
                    latents,
                    times,
                    inputs.conditions,
                    inputs.negative,
                    inputs.guidance,
                    how,
                )
            for name, _, expected in made:
                if how == numerics:
                    assert torch.equal(velocity[name], expected)
                elif dtype == torch.float32:
                    torch.testing.assert_close(velocity[name], expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_a_batch_is_as_alone(case: FamilyCase):
    pipeline = case.family.load_pipeline(torch.float32)
    inputs, numerics = case.inputs(pipeline, SCALE), case.family.spec.numerics["diffusers"]
    times = {name: torch.full((2,), 700.0) for name in inputs.initial}

    def velocity(rows: slice):
        tensors = (inputs.initial, times, inputs.conditions, inputs.negative)
        cut = [{name: x[rows] for name, x in group.items()} for group in tensors]
        with torch.no_grad():
            return case.family.velocity(pipeline.transformer, *cut, Guidance({"text": SCALE}), numerics)

    together = velocity(slice(2))
    for row in (slice(0, 1), slice(1, 2)):
        for name, alone in velocity(row).items():
            torch.testing.assert_close(together[name][row], alone, rtol=1e-5, atol=5e-6)


def test_latents_have_the_shapes_of_the_streams(case: FamilyCase):
    assert case.family.stream_shapes() == case.facts.streams
    schedules = case.family.schedules(STEPS)
    assert schedules.keys() == case.facts.streams.keys()
    assert {schedule.num_steps for schedule in schedules.values()} == {STEPS}


def test_media_are_encoded_as_latents_or_refused(case: FamilyCase):
    pipeline = case.family.load_encoders(torch.float32)
    assert pipeline.transformer is None
    frames = torch.arange(case.config.width, dtype=torch.uint8).expand(
        2, case.config.frames, 3, case.config.height, -1
    )
    if case.family.spec.makes != ("image",):
        with pytest.raises(ConfigError, match="cannot encode"):
            case.family.encode_media(pipeline, Media(frames))
        return
    latents = case.family.encode_media(pipeline, Media(frames))
    again = case.family.encode_media(pipeline, Media(frames))
    assert {name: x.shape[1:] for name, x in latents.items()} == case.facts.streams
    for name, x in latents.items():
        assert x.dtype == torch.float32 and x.std() > 0 and torch.equal(x, again[name])  # nothing is drawn


def test_the_longest_prompt_is_encoded_whole_and_a_longer_one_refused(case: FamilyCase):
    """Tiny tokenizers have one token for each character of a word."""
    family, most = case.family, case.family.spec.max_text_tokens
    longest = "x" * (most + 1 - family.count_text_tokens("x"))
    assert family.count_text_tokens(longest) == most
    assert family.count_text_tokens("a cat") > family.count_text_tokens("a") >= family.count_text_tokens("")
    with torch.no_grad():
        encode = family.driver("diffusers").encode
        pipeline = family.load_encoders(torch.float32)
        whole, other = (encode(pipeline, Prompt("0", text)) for text in (longest, longest[:-1] + "y"))
    assert any(
        whole[name].shape == other[name].shape and not torch.equal(whole[name], other[name]) for name in whole
    )  # its last character counts
    with pytest.raises(DataError, match=f"{most + 1} tokens is longer than {family.spec.title}'s {most}: 'x"):
        family.count_text_tokens(longest + "x")


def test_conditions_have_their_width(case: FamilyCase):
    family, pipeline = case.family, case.family.load_encoders(torch.float32)
    widths = [64, 512]
    expected = family.spec.text_width or 512  # of the widths of data.text_lengths, where the family has none
    assert family.condition_width(["x" * 100], widths) == expected
    assert family.longest_text(widths) == (family.spec.max_text_tokens if family.spec.text_width else 511)
    one, other = (case.conditions(pipeline, (text,)) for text in PROMPTS)
    assert {name: x.shape for name, x in one.items()} == {name: x.shape for name, x in other.items()}


@both_dtypes
def test_an_empty_transformer_lacks_nothing_but_its_parameters(case: FamilyCase, dtype):
    """Rotary tables are neither parameters nor always buffers: nothing would fill them later."""
    empty, full = case.family.empty_transformer(dtype), case.family.load_transformer(dtype)
    assert torch.get_default_dtype() == torch.float32 and not empty.training
    made, expected = dict(empty.named_parameters()), dict(full.named_parameters())
    assert {name: (p.shape, p.dtype) for name, p in made.items()} == {
        n: (p.shape, p.dtype) for n, p in expected.items()
    }
    assert all(parameter.is_meta for parameter in made.values())
    others, wanted = other_tensors(empty), other_tensors(full)
    assert others.keys() == wanted.keys()
    assert all(
        others[name].dtype == tensor.dtype and torch.equal(others[name], tensor)
        for name, tensor in wanted.items()
    )
    blocks = {type(module).__name__ for module in full.modules()}
    assert set(case.family.spec.block_classes) <= blocks


def other_tensors(model) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) | {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_tiny_checkpoint_is_small_whole_and_decided_by_its_seed(case: FamilyCase, tmp_path):
    tiny = importlib.import_module(f"omnirl_hpc.models.{case.name}.tiny")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for seed in (0, 1):
        tiny.write_tiny(tmp_path / str(seed), seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = (contents(f) for f in (case.checkpoint, tmp_path / "0", tmp_path / "1"))
    assert first == again
    assert sum(map(len, first.values())) < 4e6
    weights = {name for name in first if name.endswith(".safetensors")}
    assert {name.split("/")[0] for name in weights} == set(case.family.spec.modules)
    assert {name for name in first if first[name] != other[name]} == weights


def test_the_tiny_checkpoint_is_one_that_the_family_trains(case: FamilyCase):
    assert find_unsupported(case.checkpoint, find_spec(case.name)) == []
