"""A family's encoders without its transformer: prompts to conditions, images to latents."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load

from omnirl_hpc.data.preferences import SampleFile
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import DataError
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.pinned import PinnedTensors
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.streams import Streams


class Encoders:
    """A tenant of the device: asleep, it keeps its weights in host memory."""

    def __init__(self, family: ModelFamily, dtype: torch.dtype, device: torch.device) -> None:
        self._family, self._device = family, device
        self._driver = family.driver("diffusers")
        self._pipeline = family.load_encoders(dtype).to(device)
        self._pinned = PinnedTensors()
        for module in self._pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                self._pinned.add([*module.parameters(), *module.buffers()], frozen=True)

    def sleep(self) -> None:
        self._pinned.offload()

    def wake(self) -> None:
        self._pinned.onload()

    @torch.no_grad()
    def condition(self, prompt: Prompt) -> Condition:
        return self._driver.encode(self._pipeline, prompt)

    @torch.no_grad()
    def latents(self, file: SampleFile) -> Streams:
        """One sample's clean latents, fp32, on the device. Raises DataError for a file of another kind or
        size.
        """
        if file.holds_latents:
            return self._stored(file)
        try:
            image = Image.open(BytesIO(file.read())).convert("RGB")
        except UnidentifiedImageError:
            raise DataError(f"{file}: it is not an image") from None
        model = self._family.config
        if image.size != (model.width, model.height):
            raise DataError(
                f"{file}: an image of {image.height} x {image.width} pixels, and model.height x model.width "
                f"= {model.height} x {model.width}"
            )
        frames = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, None].to(self._device)
        streams = self._family.encode_media(self._pipeline, Media(frames=frames))
        return {name: latents[0].float() for name, latents in streams.items()}

    def _stored(self, file: SampleFile) -> Streams:
        try:
            streams = load(file.read())
        except SafetensorError as error:
            raise DataError(f"{file}: latents that are not safetensors: {error}") from None
        shapes = {name: tuple(tensor.shape) for name, tensor in streams.items()}
        if shapes != self._family.stream_shapes():
            raise DataError(f"{file}: latents of {shapes}, and the model has {self._family.stream_shapes()}")
        return {name: tensor.float().to(self._device) for name, tensor in streams.items()}
