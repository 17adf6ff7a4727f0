"""The OCR reward, with the real RapidOCR."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.rewards.ocr import Ocr, OcrConfig, similarity
from omnirl_hpc.rewards.reward import RewardBatch


@pytest.mark.parametrize(
    ("recognised", "target", "expected"),
    [
        # flow_grpo/ocr.py: lower case, no spaces; 0 edits where the target occurs; at most as many edits as
        # the target is long
        ("River Night", "river night", 1.0),
        ("RIVERNIGHT", "river\n night", 1.0),
        ("grand opening of the river night club", "River Night", 1.0),
        ("rivernihgt", "River Night", 1 - 2 / 10),
        ("river nigh", "River Night", 1 - 1 / 10),
        ("", "River Night", 0.0),
        ("something else altogether, and much longer", "River Night", 0.0),
        ("c", "abcd", 1 - 3 / 4),
        ("cafe\u0301", "Caf\u00e9", 1.0),  # an accent of its own, and one that is part of the letter
        ("caf\u00e9", "CAFE\u0301 Noir", 1 - 4 / 8),
    ],
)
def test_similarity(recognised, target, expected):
    assert similarity(recognised, target) == pytest.approx(expected)


@pytest.fixture(scope="module")
def ocr() -> Ocr:
    return Ocr(OcrConfig())


def drawn(text: str, ink: str = "black", paper: str = "white") -> np.ndarray:
    image = Image.new("RGB", (320, 160), paper)
    ImageDraw.Draw(image).text((20, 40), text, ink, ImageFont.load_default(size=36))
    return np.asarray(image)


def score(ocr: Ocr, *samples: tuple[np.ndarray, str]) -> list[float]:
    images, targets = zip(*samples)
    return ocr.score(
        RewardBatch(np.stack(images)[:, None], [Prompt(str(i), "p", target=t) for i, t in enumerate(targets)])
    )


NOISE = np.random.default_rng(0).integers(0, 256, (160, 320, 3), dtype=np.uint8)


def test_drawn_text_scores_near_one_and_noise_zero(ocr):
    scores = score(
        ocr,
        (drawn("River Night"), "River Night"),
        (drawn("River Night"), "Velvet Moon"),
        (NOISE, "River Night"),
    )
    assert scores[0] > 0.9
    assert scores[1] < 0.5
    assert scores[2] == 0.0


def test_several_lines_are_one_text(ocr):
    assert score(ocr, (drawn("HELLO\nWORLD"), "hello world")) == [1.0]


def test_colours_are_those_of_the_image(ocr):
    """Blue on red: where channels are swapped nothing changes for grey images, and much for others."""
    assert ocr.recognise(drawn("Harbor", ink="blue", paper="yellow")) == "Harbor"


def test_a_sample_does_not_depend_on_its_neighbours(ocr):
    lemon, noise = (drawn("Lemon"), "Lemon Tree"), (NOISE, "Lemon")
    assert score(ocr, lemon, noise) == score(ocr, lemon) + score(ocr, noise)


def test_lines_below_the_confidence_are_not_read():
    assert score(Ocr(OcrConfig(min_confidence=1.0)), (drawn("River Night"), "River Night")) == [0.0]


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_settings_check_themselves(value):
    with pytest.raises(ConfigError, match="reward.parts.ocr.min_confidence=.* must be in"):
        OcrConfig(min_confidence=value)


def test_without_detection_a_picture_is_one_line():
    """Two lines, one above the other, cannot be read as one; a word in a small picture can."""
    reads_one_line = Ocr(OcrConfig(detect=False))
    word = np.asarray(Image.fromarray(drawn("KING")[34:84, 16:136]).resize((64, 32)))
    assert score(reads_one_line, (word, "KING")) == [1.0]
    assert score(reads_one_line, (drawn("HELLO\nWORLD"), "hello world"))[0] < 0.5
