"""What an evaluation leaves behind: results by policy, a table and a picture of policies side by side. Needs
no torch.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from omnirl_hpc.errors import OutputError

RESULT = "result.json"
ROWS = 16  # of the picture
TILE = 320  # pixels, at most
MARGIN, TEXT, LINES = 8, 16, 3  # pixels; lines of a prompt above its images


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of one policy; None where there is none, or half of one, or one of its images is gone or
    torn: they are to be made again then.

    Raises OutputError where it cannot be read.
    """
    try:
        result = json.loads((folder / RESULT).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    except OSError as error:
        raise OutputError(
            f"{folder / RESULT} cannot be read ({error.strerror}): regain access to it"
        ) from None
    return result if all(_is_whole(folder / sample["file"]) for sample in result["samples"]) else None


def _is_whole(image: Path) -> bool:
    try:
        with Image.open(image) as opened:
            opened.verify()
    except (OSError, SyntaxError):  # Pillow's words for a torn PNG
        return False
    return True


def write_result(folder: Path, result: dict[str, Any]) -> None:
    _replace(folder / RESULT, json.dumps(result, indent=1, allow_nan=False))


def write_comparison(folder: Path, place: str, results: Sequence[dict[str, Any]]) -> None:
    """comparison.md and comparison.jpg in `folder/place`, for results in `folder`."""
    _replace(folder / place / "comparison.md", table(results) + "\n")
    grid(folder, results).save(folder / place / "comparison.jpg", quality=90)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: mean reward of each policy, its parts where there are several, and against the first one,
    image by image.
    """
    first = results[0]
    parts = list(first["parts"]) if len(first["parts"]) > 1 else []
    head = ["policy", "reward", *parts, "standard error", f"better than {first['policy']}", "images"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for result in results:
        scored = [sample["reward"] for sample in result["samples"] if sample["reward"] is not None]
        better = "" if result is first else _better(result["samples"], first["samples"])
        means = [f"{value:.6g}" for value in (result["reward"], *(result["parts"][part] for part in parts))]
        cells = [result["policy"], *means, f"{result['standard_error']:.2g}", better, str(len(scored))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _better(samples: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    pairs = [(a["reward"], b["reward"]) for a, b in zip(samples, others)]
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    return f"{sum(a > b for a, b in pairs)} of {len(pairs)}"


def grid(folder: Path, results: Sequence[dict[str, Any]]) -> Image.Image:
    """A row for each sample, a column for each policy; prompts and rewards in between."""
    font = ImageFont.load_default(TEXT - 2)
    rows = min(ROWS, len(results[0]["samples"]))
    with Image.open(folder / results[0]["folder"] / results[0]["samples"][0]["file"]) as image:
        scale = TILE / max(image.size)
        width, height = round(image.width * scale), round(image.height * scale)
    row_height = LINES * TEXT + height + TEXT + MARGIN
    page_width = len(results) * (width + MARGIN) + MARGIN
    page = Image.new("RGB", (page_width, TEXT + 2 * MARGIN + rows * row_height), "white")
    draw = ImageDraw.Draw(page)
    letters = int((page_width - 2 * MARGIN) / font.getlength("n"))
    for column, result in enumerate(results):
        x = MARGIN + column * (width + MARGIN)
        draw.text((x, MARGIN), result["policy"], "black", font)
        for row in range(rows):
            y, sample = TEXT + 2 * MARGIN + row * row_height, result["samples"][row]
            if column == 0:
                prompt = textwrap.wrap(sample["prompt"], letters, max_lines=LINES, placeholder=" …")
                draw.multiline_text((x, y), "\n".join(prompt), "black", font, spacing=1)
            with Image.open(folder / result["folder"] / sample["file"]) as image:
                page.paste(
                    image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS),
                    (x, y + LINES * TEXT),
                )
            reward = "no reward" if sample["reward"] is None else f"{sample['reward']:.4g}"
            draw.text((x, y + LINES * TEXT + height), reward, "dimgray", font)
    return page


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
