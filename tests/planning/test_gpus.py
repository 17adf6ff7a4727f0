"""The table of GPUs."""

from __future__ import annotations

import pytest

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.planning.gpus import GIB, GPUS, find_gpu


def test_what_issue_6_asks_for_is_there():
    assert {"h100", "h200", "a100-40", "a100-80", "b200", "l40s", "mi250x", "mi300x", "gh200"} <= GPUS.keys()
    assert find_gpu("H200") is GPUS["h200"]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_units(gpu):
    """Bytes and FLOP/s: a figure in GB or TFLOP/s would be far outside."""
    assert 16 * GIB < gpu.memory < 512 * GIB
    assert 1e14 < gpu.flops < 1e16
    assert 1e10 < gpu.host_link < 1e12


def test_an_unknown_gpu_names_the_known():
    with pytest.raises(ConfigError, match="gpu=v100 is not known; it must be one of: a100-40, a100-80, l40s"):
        find_gpu("v100")
