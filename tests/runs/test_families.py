"""Flow-GRPO on the tiny checkpoint of each family, on two ranks: engine and actor compute the same, to the
bit. Qwen-Image is what all other runs are of.
"""

from __future__ import annotations

import wave

import pytest
from PIL import Image

from tests.models.families import FAMILIES, FamilyCase
from tests.runs.program import Program, lines

pytestmark = pytest.mark.slow

# A matrix product of another batch size may round otherwise.
ONE_SHAPE = ("rollout.micro_batch_size=2", "actor.micro_batch_size=2")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen_image"])
def test_it_trains(name, tiny_prompts, tmp_path):
    case = FamilyCase.make(name, tmp_path / "model")
    program, run = Program(case.checkpoint, tiny_prompts, tmp_path), tmp_path / "run"
    program.finish(run, *case.settings, *ONE_SHAPE, "steps=2")
    steps = lines(run / "metrics.jsonl")
    assert [step["ratio/first_update_max_abs_log"] for step in steps] == [0, 0]
    assert {step["sync/bound"] for step in steps} == {case.facts.adapted}
    assert all(step["grad_norm"] > 0 and step["ratio/max_abs_log"] > 0 for step in steps)
    sample = run / "samples" / lines(run / "samples" / "index.jsonl")[0]["file"]
    with Image.open(sample) as picture:
        assert getattr(picture, "n_frames", 1) == case.config.frames
        assert picture.size == (case.config.width, case.config.height)
    page = (run / "report.html").read_text()
    if "audio" in case.family.spec.makes:
        with wave.open(str(sample.with_suffix(".wav"))) as sound:
            seconds = sound.getnframes() / sound.getframerate()
        assert seconds == pytest.approx(case.config.frames / case.config.fps, abs=0.1)
        assert "data:image/webp" in page and "<audio" in page
    else:
        assert "data:image/jpeg" in page and "<audio" not in page
