"""Is the text that the prompt asks for in the image? Read by RapidOCR, whose models come in its wheel."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from PIL import Image

from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import require
from omnirl_hpc.rewards.reward import Reward, RewardBatch

# Workers are processes, and sums that depend on a number of threads are not reproducible.
ONE_THREAD = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
# The recogniser alone, on images as wide as they are: RapidOCR would widen them to 320 x 48 pixels.
ONE_LINE = {"Global.use_det": False, "Rec.rec_img_shape": [3, 48, 48]}


@dataclass
class OcrConfig(RewardPartConfig):
    """Text in the image, compared with the prompt's target."""

    name: str = "ocr"
    min_confidence: float = 0.5  # of a recognised line; less is not read
    detect: bool = True  # find the lines first; false: the image is one line, as Glyph's are (far less time)

    def __post_init__(self) -> None:
        value = self.min_confidence
        require(0 <= value <= 1, f"reward.parts.ocr.min_confidence={value} must be in [0, 1]")


class Ocr(Reward):
    """The definition of flow_grpo (flow_grpo/ocr.py): 1 - d / length of the target, both texts in lower case
    without white space.

    d is 0 where the target occurs in the recognised text, otherwise the Levenshtein distance of the two, at
    most the length.
    """

    Settings = OcrConfig
    needs_target = True
    packages = ("rapidocr", "onnxruntime", "rapidfuzz")

    def __init__(self, settings: OcrConfig) -> None:
        super().__init__(settings)
        from rapidocr import RapidOCR

        self._read: Any = RapidOCR(
            params={
                "Global.text_score": settings.min_confidence,
                "Global.use_cls": False,  # does not turn lines that stand on their heads
                "Global.log_level": "error",
                **({} if settings.detect else ONE_LINE),
                **ONE_THREAD,
            }
        )

    def score(self, batch: RewardBatch) -> list[float]:
        return [
            similarity(self.recognise(image), cast(str, prompt.target))
            for image, prompt in zip(batch.images, batch.prompts)
        ]

    def recognise(self, image: np.ndarray) -> str:
        """All lines in an image [H, W, 3] uint8, in reading order; "" where there are none."""
        return "".join(self._read(Image.fromarray(image)).txts or ())


def similarity(recognised: str, target: str) -> float:
    """1 where the target was recognised, 0 where nothing of it was."""
    from rapidfuzz.distance import Levenshtein

    recognised, target = normalise(recognised), normalise(target)
    if target in recognised:
        return 1.0
    return 1 - min(Levenshtein.distance(recognised, target), len(target)) / len(target)


def normalise(text: str) -> str:
    """Lower case without white space; a letter and its accent are one character, however written."""
    return unicodedata.normalize("NFC", "".join(text.lower().split()))
