"""The recipe of the demo learns: the score on words that neither pretraining nor training saw rises by more
than chance, and falls where the advantages have the wrong sign.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning import Point, make_once, read_curve, train

pytestmark = pytest.mark.slow

STEPS = 12
# Less than any seed rose in as many steps (benchmarks/results/2026-11-30_cpu_learning.md).
MARGIN = 0.08


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    held_out = make_once(folder / "held_out.parquet", "prompts", "--kind", "glyph", "--held-out")
    needed = [
        "recipe=flowgrpo_glyph",
        f"model.path={make_once(folder / 'glyph', 'glyph-model')}",
        f"data.prompts={make_once(folder / 'words.parquet', 'prompts', '--kind', 'glyph')}",
        f"evaluation.prompts={held_out}",
        f"evaluation.every={STEPS}",
        f"steps={STEPS}",
    ]

    def run(name: str, *overrides: str) -> list[Point]:
        train(Path(folder / name), 2, [*needed, *overrides])
        return list(read_curve(folder / name))

    return run


def test_the_held_out_score_rises(curve):
    base, trained = curve("forwards")
    assert trained.score > base.score + MARGIN


def test_with_the_wrong_sign_it_falls(curve):
    base, trained = curve("backwards", "algorithm=tests.runs.backwards:Backwards")
    assert trained.score < base.score - MARGIN
