"""What a run will need, from what its ranks have seen."""

from __future__ import annotations

import pytest

from omnirl_hpc.checks.preflight.preflight import find_needs
from omnirl_hpc.layout import make_layout
from omnirl_hpc.planning.estimate import estimate, with_residency
from tests.checks.preflight.test_findings import NODE, rank
from tests.helpers import make_config


@pytest.fixture
def needs(tiny_model, tiny_prompts, tmp_path):
    """Of two ranks with GPUs of `gpu_total` bytes (0: without)."""
    config = make_config(tiny_model, tiny_prompts, tmp_path)

    def found(residency: str, gpu_total: int, awake: tuple[str, ...] = ()):
        config.rollout.awake = list(awake)
        seen = {"gpu_total": gpu_total, "gpu_id": None if gpu_total == 0 else "GPU"}
        return find_needs(with_residency(config, residency), [rank(0, node=NODE, **seen), rank(1, **seen)])

    resident = estimate(with_residency(config, "resident"), make_layout(config, 0, 2)).gpu_bytes
    return found, int(resident)


def test_auto_needs_what_it_will_become(needs):
    found, resident = needs
    swap, stay = found("swap", resident), found("resident", resident)
    assert swap.host > stay.host == 0 and stay.gpu > swap.gpu
    assert found("auto", int(resident / 0.95)) == swap  # a tenth is kept free
    assert found("auto", int(resident / 0.85)) == stay
    assert found("auto", 0) == stay


def test_what_cannot_be_planned_is_no_matter_of_rank_0_alone(needs):
    """The run itself raises on all ranks, when it settles auto."""
    found, resident = needs
    swap, stay = found("swap", resident), found("resident", resident)
    auto = found("auto", resident, awake=("no such part",))
    assert (auto.host, auto.gpu) == (stay.host, swap.gpu)
