"""However a reward's code ends, and whatever it returns."""

from __future__ import annotations

import array
import json
import math
import subprocess
import sys
from collections import deque
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import omnirl_hpc
from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.rewards.call import call_reward
from omnirl_hpc.rewards.reward import Reward, RewardBatch, ScoresWithComponents

BATCH = RewardBatch(np.zeros((2, 1, 4, 4, 3), np.uint8), [Prompt("0", "a"), Prompt("1", "b")])


class Does(Reward):
    """Does what it is given."""

    def __init__(self, action) -> None:
        super().__init__(RewardPartConfig())
        self._action = action

    def score(self, batch):
        return self._action()


def raising(failure: BaseException):
    def action():
        raise failure

    return action


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no message for you")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (lambda: exit(0), "SystemExit: 0 (test_call.py, line "),
        (lambda: sys.exit("bye"), "SystemExit: bye (test_call.py, line "),
        (raising(KeyboardInterrupt()), "KeyboardInterrupt (test_call.py, line "),
        (raising(GeneratorExit()), "GeneratorExit (test_call.py, line "),
        (raising(MemoryError()), "MemoryError (test_call.py, line "),
        (raising(Silent()), "tests.rewards.test_call.Silent: <exception str() failed> (test_call.py, line "),
        (raising(ValueError("two\nlines")), "ValueError: two lines (test_call.py, line "),
        (lambda: json.loads("{"), "json.decoder.JSONDecodeError: Expecting property name"),
    ],
)
def test_every_way_to_end_is_a_failed_call(action, said):
    outcome = call_reward(Does(action), BATCH)
    assert outcome.scores == [] and outcome.error.startswith(said) and "\n" not in outcome.error
    assert "(test_call.py, line " in outcome.error  # not the line of a library, and not ours


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({0.25: "a", 0.5: "b"}, "returned dict, not a list of numbers"),
        ({0.25, 0.5}, "returned set, not a list of numbers"),
        ("12", "returned str, not a list of numbers"),
        (b"12", "returned bytes, not a list of numbers"),
        (None, "returned NoneType, not a list of numbers"),
        (0.5, "returned float, not a list of numbers"),
        ((score for score in (0.25, 0.5)), "returned generator, not a list of numbers"),
        (np.float64(0.5), "returned float, not a list of numbers"),
        ([], "returned 0 scores for 2 samples"),
        ([0.5, 0.5, 0.5], "returned 3 scores for 2 samples"),
        (np.zeros((1, 2)), "returned 1 scores for 2 samples"),
        (np.zeros((2, 1)), "returned list as the score of a sample, not a number"),
        ([np.zeros(1), np.zeros(1)], "returned ndarray as the score of a sample, not a number"),
        ([torch.zeros(1), 0.5], "returned Tensor as the score of a sample, not a number"),
        ([None, 0.5], "returned NoneType as the score of a sample, not a number"),
        (["1", "2"], "returned str as the score of a sample, not a number"),
        ([1j, 0.5], "returned complex as the score of a sample, not a number"),
        ([{"score": 1}, 0.5], "returned dict as the score of a sample, not a number"),
    ],
)
def test_what_is_no_list_of_numbers_is_a_failed_call(returned, said):
    outcome = call_reward(Does(lambda: returned), BATCH)
    assert (outcome.scores, outcome.error) == ([], said)


@pytest.mark.parametrize(
    "returned",
    [
        [0, 1],
        (0.0, 1.0),
        [False, True],
        deque([0, 1]),
        array.array("f", [0, 1]),
        np.array([0, 1], np.float16),
        torch.tensor([0.0, 1.0]),
        [np.float32(0), np.int64(1)],
        [torch.tensor(0.0), torch.tensor(1.0)],
        [Fraction(0), Fraction(1)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_lists_of_numbers_of_every_kind(returned):
    outcome = call_reward(Does(lambda: returned), BATCH)
    assert outcome.error is None and outcome.scores == [0.0, 1.0]
    assert all(type(score) is float for score in outcome.scores)


def test_a_sample_alone_may_have_no_score():
    outcome = call_reward(Does(lambda: [math.nan, 0.5]), BATCH)
    assert outcome.error is None and math.isnan(outcome.scores[0]) and outcome.scores[1] == 0.5


class InTwo(Does):
    components = ("red", "blue")


def test_components_come_beside_the_scores():
    both = {"blue": np.array([3.0, 4.0]), "red": [1, 2]}
    outcome = call_reward(InTwo(lambda: ScoresWithComponents([4, 6], both)), BATCH)
    assert outcome.scores == [4, 6] and outcome.components == {"red": [1, 2], "blue": [3, 4]}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1, 2], "returned the components [], not those that its class names: ['blue', 'red']"),
        (
            ScoresWithComponents([1, 2], {"red": [1, 2], "green": [1, 2]}),
            "returned the components ['green', 'red'], not those that its class names: ['blue', 'red']",
        ),
        (
            ScoresWithComponents([1, 2], {"red": [1, 2], "blue": [1]}),
            "returned 1 scores for 2 samples",
        ),
    ],
)
def test_components_are_those_that_the_class_names(returned, said):
    outcome = call_reward(InTwo(lambda: returned), BATCH)
    assert (outcome.scores, outcome.components, outcome.error) == ([], {}, said)


def test_a_module_that_leaves_the_program_when_imported_is_a_sentence(tmp_path):
    (tmp_path / "leaver.py").write_text("import sys\nsys.exit(0)\n")
    program = "from omnirl_hpc.config.classes import find_class; find_class('reward', 'leaver:Mine')"
    root = Path(omnirl_hpc.__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{root}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "reward=leaver:Mine cannot be imported: SystemExit: 0 (leaver.py, line 2)" in ended.stderr
