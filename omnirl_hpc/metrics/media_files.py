"""Samples as files that people can open."""

from __future__ import annotations

import wave
from pathlib import Path

from PIL import Image
from torch import Tensor

from omnirl_hpc.sampling.samples import Media


def write_media(stem: Path, sample: Media) -> str:
    """Write one sample: an image as STEM.png, a video as an animated STEM.webp, its sound beside it as
    STEM.wav.

    Returns the name of the picture's file.
    """
    frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in sample.frames[0]]
    picture = stem.with_name(stem.name + picture_suffix(sample))
    if len(frames) == 1:
        frames[0].save(picture)
    else:
        duration = round(1000 / sample.fps)  # milliseconds of a frame
        frames[0].save(picture, save_all=True, append_images=frames[1:], duration=duration, loop=0)
    if sample.audio is not None:
        _write_sound(stem.with_name(stem.name + ".wav"), sample.audio[0], sample.sample_rate)
    return picture.name


def picture_suffix(media: Media) -> str:
    """Of the files that `write_media` makes."""
    return ".png" if media.frames.shape[1] == 1 else ".webp"


def _write_sound(file: Path, waveform: Tensor, sample_rate: int) -> None:
    """16-bit PCM of a waveform [channels, T]."""
    samples = waveform.clamp(-1, 1).mul(2**15 - 1).round().short()
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(len(samples))
        sound.setsampwidth(2)
        sound.setframerate(sample_rate)
        sound.writeframes(samples.T.contiguous().numpy().tobytes())
