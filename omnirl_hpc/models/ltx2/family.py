"""LTX-2.3 (arXiv 2601.03233): text to a video with its sound, two transformers that attend to each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from diffusers import LTX2Pipeline
from torch import Tensor

from omnirl_hpc.models.family import ModelFamily, PipelineDriver, as_pixels
from omnirl_hpc.models.ltx2.drivers import Ltx2Diffusers, Ltx2VllmOmni
from omnirl_hpc.models.ltx2.shape import audio_cells, video_cells
from omnirl_hpc.models.ltx2.spec import SPEC
from omnirl_hpc.models.spec import Numerics
from omnirl_hpc.sampling.samples import Condition, Media
from omnirl_hpc.sampling.schedule import Schedule, make_schedule
from omnirl_hpc.sampling.streams import Streams

VIDEO, AUDIO = "video", "audio"
BINS_PER_CELL = 4  # of the spectrogram


class Ltx2(ModelFamily):
    """See ModelFamily. Streams: `video` [S, C] and `audio` [S', C'], packed as the network takes them, the
    latents of sound normalised; one schedule for both. A condition is `video` [1024, D] and `audio`
    [1024, D'], without a mask. Guidance is the plain one: stock pipelines can add three others.
    """

    spec = SPEC

    def driver(self, engine: str) -> PipelineDriver:
        return {"diffusers": Ltx2Diffusers, "vllm_omni": Ltx2VllmOmni}[engine](self)

    def schedules(self, num_steps: int) -> dict[str, Schedule]:
        tokens, _ = self.stream_shapes()[VIDEO]
        schedule = make_schedule(self.component_config("scheduler"), num_steps, tokens)
        return {VIDEO: schedule, AUDIO: schedule}

    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        frames, height, width = video_cells(self.config)
        return {
            VIDEO: (frames * height * width, self._network["in_channels"]),
            AUDIO: (audio_cells(self.config, self._network), self._network["audio_in_channels"]),
        }

    def tokenized_length(self, text: str) -> int:
        return super().tokenized_length(text.strip())  # as the pipeline does

    def pad(self, condition: Condition, width: int) -> Condition:
        """It has its width already."""
        return condition

    def predict(
        self,
        transformer: Callable[..., Any],
        latents: Streams,
        timesteps: Streams,
        conditions: dict[str, Tensor],
        numerics: Numerics,
    ) -> Streams:
        frames, height, width = video_cells(self.config)
        dtype, time = conditions[VIDEO].dtype, timesteps[VIDEO]
        video, audio = transformer(
            hidden_states=latents[VIDEO].to(dtype),
            audio_hidden_states=latents[AUDIO].to(dtype),
            encoder_hidden_states=conditions[VIDEO],
            audio_encoder_hidden_states=conditions[AUDIO],
            timestep=time,
            sigma=time,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.config.fps,
            audio_num_frames=audio_cells(self.config, self._network),
            use_cross_timestep=True,  # 2.0 does without
            return_dict=False,
        )
        return {VIDEO: video.float(), AUDIO: audio.float()}

    @torch.no_grad()
    def decode(self, pipeline: Any, latents: Streams) -> Media:
        vae, audio_vae, vocoder = pipeline.vae, pipeline.audio_vae, pipeline.vocoder
        cells = LTX2Pipeline._unpack_latents(latents[VIDEO], *video_cells(self.config))
        cells = LTX2Pipeline._denormalize_latents(
            cells, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )
        video = vae.decode(cells.to(vae.dtype), None, return_dict=False)[0]  # [B, 3, F, H, W]
        sound = LTX2Pipeline._denormalize_audio_latents(
            latents[AUDIO], audio_vae.latents_mean, audio_vae.latents_std
        )
        bins = audio_vae.config.mel_bins // BINS_PER_CELL
        sound = LTX2Pipeline._unpack_audio_latents(sound, latents[AUDIO].shape[1], num_mel_bins=bins)
        spectrogram = audio_vae.decode(sound.to(audio_vae.dtype), return_dict=False)[0]
        return Media(
            frames=as_pixels(video).transpose(1, 2),
            audio=vocoder(spectrogram).float(),
            fps=self.config.fps,
            sample_rate=vocoder.config.output_sampling_rate,
        )

    @cached_property
    def _network(self) -> dict[str, Any]:
        return self.component_config("transformer")
