"""Rank 0 reports an error that every rank finds; a rank that alone finds one reports it with its name."""

from __future__ import annotations

import pytest

from omnirl_hpc.errors import ConfigError, DataError, LaunchError, PreflightError
from omnirl_hpc.launch import reporting
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.reporting import REPORTING_SECONDS, rank_0_reports_first


@pytest.fixture
def waited(monkeypatch) -> list[float]:
    """How long ranks have held their errors back."""
    seconds: list[float] = []
    monkeypatch.setattr(reporting.time, "sleep", seconds.append)
    return seconds


def meet(rank: int, error: Exception) -> None:
    with rank_0_reports_first(Identity("srun", rank, rank, 2, "node1", 20007)):
        raise error


def test_rank_0_does_not_wait(waited):
    with pytest.raises(ConfigError, match="^steps=0$"):
        meet(0, ConfigError("steps=0"))
    with pytest.raises(PreflightError, match="^preflight: disk$"):
        meet(0, PreflightError("preflight: disk"))
    assert waited == []


def test_another_rank_waits_and_gives_its_name(waited):
    """A launcher may end all ranks as soon as one has ended: rank 0 must have spoken by then."""
    with pytest.raises(DataError, match=r"^rank 1 of 2 on \S+ \(srun\): no table$"):
        meet(1, DataError("no table"))
    assert waited == [REPORTING_SECONDS] and REPORTING_SECONDS >= 1


def test_what_all_ranks_found_together_rank_0_alone_says(waited):
    with pytest.raises(SystemExit) as ended:
        meet(1, PreflightError("preflight: disk"))
    assert ended.value.code == PreflightError.exit_code and waited == [REPORTING_SECONDS]


def test_what_rank_0_cannot_know_is_said_at_once(waited):
    with pytest.raises(LaunchError, match="^rank 1 is alone$"):
        meet(1, LaunchError("rank 1 is alone"))
    with pytest.raises(ZeroDivisionError):  # a fault of the program is never held back
        meet(1, ZeroDivisionError())
    assert waited == []
