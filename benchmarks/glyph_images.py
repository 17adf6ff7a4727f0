"""Pictures of words to pretrain Glyph on: Pillow draws masks, in processes; the device adds colours and
grounds.
"""

from __future__ import annotations

import importlib.util
import random
import string
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

# Package on PyPI, file in it. Licences: Roboto and Caladea Apache 2.0, all others SIL OFL 1.1.
FONTS = (
    ("font_roboto", "Roboto-Bold.ttf"),
    ("font_lato", "Lato-Bold.ttf"),
    ("font_source_sans_pro", "SourceSansPro-Bold.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-Bold.ttf"),
    ("font_caladea", "Caladea-Bold.ttf"),
    ("font_manrope", "Manrope-Bold.ttf"),
    ("font_fredoka_one", "FredokaOne-Regular.ttf"),
    ("font_fjallaone", "FjallaOne-Regular.ttf"),
)
LARGEST_FONT, SMALLEST_FONT = 0.75, 0.5  # of the height of the picture
MARGIN = 2  # pixels
OFF_CENTRE = 0.15  # of the height of the picture, at most, in both directions
MASKS_A_TASK = 2000
CONTRAST = 0.4  # of ink and ground, at least, in luminance from 0 to 1
LUMINANCE = (0.299, 0.587, 0.114)


def font_files() -> list[str]:
    """Raises SystemExit where a package is missing."""
    files = []
    for package, name in FONTS:
        spec = importlib.util.find_spec(package)
        if spec is None:
            packages = " ".join(package.replace("_", "-") for package, _ in FONTS)
            raise SystemExit(f"the fonts are not installed: pip install {packages}")
        files.append(str(Path(spec.origin).parent / "files" / name))
    return files


@cache
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size)


def draw_mask(word: str, height: int, width: int, fonts: list[str], draw: random.Random) -> np.ndarray:
    """[height, width] uint8: a word in a random font, as large as fits or smaller, near the centre."""
    file = draw.choice(fonts)
    for size in range(draw.randint(round(SMALLEST_FONT * height), round(LARGEST_FONT * height)), 6, -1):
        left, top, right, bottom = _font(file, size).getbbox(word)
        free_x, free_y = width - 2 * MARGIN - (right - left), height - 2 * MARGIN - (bottom - top)
        if free_x >= 0 and free_y >= 0:
            break
    mask = Image.new("L", (width, height))
    place = (_place(free_x, height, draw) - left, _place(free_y, height, draw) - top)
    ImageDraw.Draw(mask).text(place, word, 255, _font(file, size))
    return np.asarray(mask)


def _place(free: int, height: int, draw: random.Random) -> int:
    furthest = min(max(0, free) // 2, round(OFF_CENTRE * height))
    return MARGIN + max(0, free) // 2 + draw.randint(-furthest, furthest)


def random_word(draw: random.Random, lengths: tuple[int, ...] = (3, 4)) -> str:
    return "".join(draw.choices(string.ascii_uppercase, k=draw.choice(lengths)))


def _masks(
    seed: int, count: int, height: int, width: int, avoid: frozenset[str], fonts: list[str]
) -> tuple[list[str], np.ndarray]:
    draw = random.Random(seed)
    words = []
    while len(words) < count:
        word = random_word(draw)
        if word not in avoid:
            words.append(word)
    return words, np.stack([draw_mask(word, height, width, fonts, draw) for word in words])


def make_masks(
    count: int, height: int, width: int, avoid: frozenset[str], seed: int, processes: int
) -> tuple[list[str], np.ndarray]:
    """Random words, none of `avoid`, and their masks [count, height, width] uint8."""
    tasks = -(-count // MASKS_A_TASK)
    make = partial(_masks, count=MASKS_A_TASK, height=height, width=width, avoid=avoid, fonts=font_files())
    seeds = range(seed * tasks, (seed + 1) * tasks)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(make, seeds))
    return [word for words, _ in parts for word in words], np.concatenate([masks for _, masks in parts])


def paint(masks: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """[B, H, W] uint8 -> pictures [B, 3, H, W] in [-1, 1], fp32: ink and ground of random colours, the ground
    plain, shaded from side to side, or striped.
    """
    count, height, width = masks.shape
    device = masks.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    ground_light = uniform(count)
    ink_light = (ground_light + CONTRAST + (1 - 2 * CONTRAST) * uniform(count)) % 1
    ink, ground = _colour(ink_light, uniform(count, 3)), _colour(ground_light, uniform(count, 3))
    y = torch.linspace(-1, 1, height, device=device).view(1, -1, 1)
    x = torch.linspace(-1, 1, width, device=device).view(1, 1, -1) * (width / height)
    angle, kind = 2 * torch.pi * uniform(count, 1, 1), uniform(count, 1, 1)
    along = x * torch.cos(angle) + y * torch.sin(angle)
    stripes = torch.sin(along * (3 + 9 * uniform(count, 1, 1)) + 6 * uniform(count, 1, 1))
    pattern = torch.where(kind < 0.4, 0.0, torch.where(kind < 0.7, along / 2, stripes))
    strength = 0.12 * uniform(count, 1, 1)
    grounds = (ground[:, :, None, None] + (pattern * strength)[:, None]).clamp(0, 1)
    alpha = masks[:, None].float() / 255
    return (grounds * (1 - alpha) + ink[:, :, None, None] * alpha) * 2 - 1


def _colour(light: Tensor, hue: Tensor) -> Tensor:
    """[B, 3] in [0, 1]: a random hue, brought to a luminance as nearly as it can."""
    shifted = hue - sum(weight * hue[:, i, None] for i, weight in enumerate(LUMINANCE))
    return (light[:, None] + 0.6 * shifted).clamp(0, 1)


def edges(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbours in height and in width."""
    return pictures[..., 1:, :] - pictures[..., :-1, :], pictures[..., 1:] - pictures[..., :-1]


def letter_weights(masks: Tensor) -> Tensor:
    """[B, 1, H, W]: 1, and 4 on a letter and within two pixels of one."""
    near = functional.max_pool2d(masks[:, None].float(), 5, stride=1, padding=2)
    return 1 + 3 * (near > 64).float()
