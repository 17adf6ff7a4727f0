"""What a step gets of a table of preferences."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from omnirl_hpc.data.preferences import PreferenceTable, SampleFile
from omnirl_hpc.errors import ConfigError, DataError
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.metrics.memory import DevicePeaks
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.residency import Residency
from omnirl_hpc.sampling.samples import Media
from omnirl_hpc.sampling.streams import LATENTS
from omnirl_hpc.sources.encoders import Encoders
from omnirl_hpc.sources.preferences import PreferenceSource
from tests.helpers import ALONE, CPU, go_on, make_config
from tests.sources.cases import PROMPTS, image_bytes, latents, write_images, write_latents


@pytest.fixture(scope="module")
def config(tiny_model, tiny_prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    config = make_config(tiny_model, tiny_prompts, folder / "run", "model.width=32")
    shape = QwenImage(config.model).stream_shapes()[LATENTS]
    config.data.prompts = str(write_latents(folder / "latents.parquet", shape))
    config.data.prompts_per_step = 4
    return config


def source(config, layout: Layout = ALONE) -> PreferenceSource:
    hashes = StepHashes(None, layout.rank, enabled=False)
    timer = PhaseTimer(CPU)
    residency = Residency("resident", timer, DevicePeaks(CPU))
    return PreferenceSource(config, QwenImage(config.model), layout, CPU, timer, hashes, residency)


def test_the_latents_of_the_table_and_the_encoders_conditions(config):
    given = source(config).next(3, go_on)
    batch, pairs = given.batch, given.batch.units
    shape = QwenImage(config.model).stream_shapes()[LATENTS]
    assert len(batch) == 4 and batch.weights.tolist() == [1 / 2] * 4  # two updates of two pairs
    for i, who in enumerate(pairs.identity):
        row = int(who.prompt_id)
        assert (who.seed, who.step, who.sample) == (config.seed, 3, 0)
        assert torch.equal(pairs.chosen[LATENTS][i], latents(row, shape))
        assert torch.equal(pairs.rejected[LATENTS][i], latents(100 + row, shape))
    widths = {len(condition["mask"]) for condition in pairs.conditions}
    assert len(widths) == 1 and pairs.group.tolist() == [0, 1, 2, 3]


def test_ranks_share_a_step_and_see_it_whole(config):
    whole = source(config).next(0, go_on).batch.units
    parts = [source(config, Layout(rank, 2, 1, 2)).next(0, go_on).batch for rank in range(2)]
    for rank, part in enumerate(parts):
        assert part.weights.tolist() == [1 / 2] * 2  # of all ranks' pairs of an update
        assert torch.equal(part.units.chosen[LATENTS], whole.chosen[LATENTS][rank::2])
        assert part.units.group.tolist() == [rank, rank + 2]
        for a, b in zip(part.units.conditions, whole.conditions[rank::2]):
            assert torch.equal(a["embeds"], b["embeds"])


def test_the_cursor_comes_back_and_another_table_is_refused(config, tmp_path):
    first = source(config)
    first.next(0, go_on)
    state = first.state_dict()
    expected = first.next(1, go_on).batch.units.identity
    again = source(config)
    again.load_state_dict(state)
    assert again.next(1, go_on).batch.units.identity == expected
    with pytest.raises(ConfigError, match="is not the table that the run was started with"):
        again.load_state_dict(state | {"prompts": "another"})


@pytest.fixture(scope="module")
def encoders(config):
    return Encoders(QwenImage(config.model), torch.float32, CPU)


def file(data: bytes, holds_latents: bool = False) -> SampleFile:
    return SampleFile("pairs.parquet, row 3", holds_latents, lambda: data)


def test_images_are_encoded_as_the_vae_does(config, encoders, tmp_path):
    """The mode, normalised: what `decode` undoes before it calls the VAE."""
    row = PreferenceTable(write_images(tmp_path / "images.parquet"))[1]
    made = encoders.latents(row.rejected)[LATENTS]
    assert made.dtype == torch.float32 and made.shape == QwenImage(config.model).stream_shapes()[LATENTS]
    vae, seen = encoders._pipeline.vae, []
    family, usual = QwenImage(config.model), vae.decode
    vae.decode = lambda z, **options: seen.append(z) or usual(z, **options)
    try:
        family.decode(encoders._pipeline, {LATENTS: made[None]})
    finally:
        del vae.decode
    pixels = torch.from_numpy(np.array(Image.open(BytesIO(image_bytes(101))))).permute(2, 0, 1)
    with torch.no_grad():
        expected = vae.encode(pixels[None, :, None].float() / 127.5 - 1).latent_dist.mode()
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(encoders.latents(row.rejected)[LATENTS], made)
    other = family.encode_media(
        encoders._pipeline, Media(frames=torch.zeros(1, 1, 3, 32, 32, dtype=torch.uint8))
    )
    assert not torch.equal(other[LATENTS][0], made)


def test_encoders_hold_no_transformer_and_sleep(encoders, config):
    assert encoders._pipeline.transformer is None
    before = encoders.latents(file(image_bytes(7)))[LATENTS].clone()
    encoders.sleep()
    parameters = [*encoders._pipeline.vae.parameters(), *encoders._pipeline.text_encoder.parameters()]
    assert sum(p.untyped_storage().nbytes() for p in parameters) == 0
    encoders.wake()
    assert torch.equal(encoders.latents(file(image_bytes(7)))[LATENTS], before)


@pytest.mark.parametrize(
    ("data", "holds_latents", "said"),
    [
        (b"no image", False, "it is not an image"),
        (
            image_bytes(0, height=48),
            False,
            "an image of 48 x 32 pixels, and model.height x model.width = 32 x 32",
        ),
        (b"no tensors", True, "latents that are not safetensors"),
    ],
)
def test_what_cannot_be_used_names_the_row(encoders, data, holds_latents, said):
    with pytest.raises(DataError, match=f"^pairs.parquet, row 3: .*{said}"):
        encoders.latents(file(data, holds_latents))


def test_latents_of_another_shape_are_refused(encoders, tmp_path):
    table = PreferenceTable(write_latents(tmp_path / "small.parquet", (2, 2)))
    assert len(table) == len(PROMPTS)
    with pytest.raises(DataError, match=r"latents of \{'latents': \(2, 2\)\}, and the model has"):
        encoders.latents(table[0].chosen)
