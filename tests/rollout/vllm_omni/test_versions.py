"""Which pairs of vllm and vllm-omni are accepted. Needs no vllm, and must not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omnirl_hpc.rollout.vllm_omni.versions import Versions, accepted


@pytest.mark.parametrize("pair", [("0.26.0", "0.26.0"), ("0.28.0", "0.28.1"), ("0.30.0+cu130", "0.30.0")])
def test_supported_pairs(pair):
    assert Versions(*pair).problem() is None


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((None, "0.30.0"), "needs vllm, missing"),
        (("0.30.0", None), "needs vllm-omni, missing"),
        ((None, None), "needs vllm and vllm-omni, missing"),
        (("0.28.0", "0.30.0"), "same minor version"),
        (("0.25.0", "0.25.0"), "0.26 to 0.30"),
        (("0.31.0", "0.31.0"), "0.26 to 0.30"),
        (("1.28.0", "1.28.0"), "0.26 to 0.30"),
    ],
)
def test_refused_pairs_name_the_cure(pair, words: str):
    problem = Versions(*pair).problem()
    assert words in problem and "make install ENGINE=vllm_omni" in problem


def test_versions_are_checked_before_torch_is_imported():
    program = (
        "import sys; from omnirl_hpc.rollout.vllm_omni import versions; versions.installed(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_accepted_drops_what_a_version_does_not_take():
    def old(size: int, backend: str) -> None: ...

    assert accepted(old, {"size": 1, "backend": "gloo", "allgather_degree": 1}) == {
        "size": 1,
        "backend": "gloo",
    }
