"""The table and the picture of policies side by side."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from omnirl_hpc.errors import OutputError
from omnirl_hpc.evaluation.results import RESULT, read_result, table, write_comparison, write_result


@pytest.fixture
def results(tmp_path):
    """Two policies with three images each: 4 x 8 pixels, red and blue; one has no reward."""
    made = []
    for policy, color, rewards in (("base", "red", [1.0, 2.0, 3.0]), ("adapter", "blue", [1.5, 1.0, None])):
        samples = [
            {"file": f"{i}.png", "prompt": f"prompt {i}", "id": str(i), "reward": r}
            for i, r in enumerate(rewards)
        ]
        folder = tmp_path / policy
        folder.mkdir()
        for sample in samples:
            Image.new("RGB", (8, 4), color).save(folder / sample["file"])
        made.append(
            {
                "policy": policy,
                "folder": policy,
                "reward": 1.25,
                "standard_error": 0.5,
                "parts": {"ocr": 0.25},
                "samples": samples,
            }
        )
    return made


def test_the_table_counts_images_that_both_have(results):
    head, rule, base, adapter = table(results).splitlines()
    assert [cell.strip() for cell in base.strip("|").split("|")] == ["base", "1.25", "0.5", "", "3"]
    assert [cell.strip() for cell in adapter.strip("|").split("|")] == [
        "adapter",
        "1.25",
        "0.5",
        "1 of 2",
        "2",
    ]
    assert "better than base" in head and rule.count("|") == head.count("|")


def test_the_table_has_a_column_for_each_of_several_parts(results):
    for result in results:
        result["parts"] = {"ocr": 0.25, "jpeg": 0.0625}
    head, _, base, _ = table(results).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")][:4] == ["policy", "reward", "ocr", "jpeg"]
    assert [cell.strip() for cell in base.strip("|").split("|")][:4] == ["base", "1.25", "0.25", "0.0625"]


def test_the_picture_has_a_column_for_each_policy(results, tmp_path):
    (tmp_path / "step").mkdir()
    write_comparison(tmp_path, "step", results)
    assert (tmp_path / "step/comparison.md").read_text() == table(results) + "\n"
    pixels = np.asarray(Image.open(tmp_path / "step/comparison.jpg")).astype(int)
    red, blue = (
        np.argwhere((pixels[..., one] > 200) & (pixels[..., other] < 60)) for one, other in ((0, 2), (2, 0))
    )
    assert len(red) == pytest.approx(len(blue), rel=0.05) and len(red) > 3 * 320 * 150
    assert red[:, 1].max() < blue[:, 1].min()


def test_half_a_result_is_none(tmp_path):
    assert read_result(tmp_path) is None
    result = {"reward": 1.0, "samples": []}
    write_result(tmp_path, result)
    assert read_result(tmp_path) == result
    (tmp_path / RESULT).write_text(json.dumps(result)[:-3])
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("damage", ["gone", "torn", "empty"])
def test_a_result_whose_images_are_not_there_is_none(results, tmp_path, damage):
    """It is made again: a picture side by side needs them."""
    base = tmp_path / "base"
    write_result(base, results[0])
    assert read_result(base) == results[0]
    image = base / "1.png"
    if damage == "gone":
        image.unlink()
    else:
        image.write_bytes(image.read_bytes()[:-20] if damage == "torn" else b"")
    assert read_result(base) is None


def test_a_result_that_cannot_be_read_is_not_made_again(tmp_path):
    (tmp_path / RESULT).mkdir()
    with pytest.raises(OutputError, match=f"{tmp_path / RESULT} cannot be read .Is a directory."):
        read_result(tmp_path)
