"""When is the job's time up?"""

from __future__ import annotations

import subprocess
import time

import pytest

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch import time_limit
from omnirl_hpc.launch.time_limit import job_end_time

JOB = {"SLURM_JOB_ID": "12"}


@pytest.fixture
def scontrol(monkeypatch):
    def say(text: str) -> None:
        def run(command, **_):
            assert command == ["scontrol", "show", "job", "--oneliner", "12"]
            return subprocess.CompletedProcess(command, 0, stdout=text)

        monkeypatch.setattr(time_limit.subprocess, "run", run)

    return say


def test_outside_of_slurm_there_is_no_end():
    assert job_end_time({}) is None


def test_the_environment_says_it():
    assert job_end_time(JOB | {"SLURM_JOB_END_TIME": "1796000000"}) == 1796000000.0


def test_scontrol_says_it_in_local_time(scontrol):
    scontrol(
        "JobId=12 StartTime=2026-11-29T10:00:00 EndTime=2026-11-29T22:30:05 Deadline=N/A "
        "PreemptEligibleTime=Unknown"
    )
    assert job_end_time(JOB) == time.mktime((2026, 11, 29, 22, 30, 5, 0, 0, -1))


def test_the_task_of_an_array_is_found_among_the_others(scontrol):
    others = "JobId=13 ArrayJobId=12 EndTime=2026-11-29T01:00:00"
    scontrol(f"{others}\nJobId=12 ArrayJobId=12 ArrayTaskId=1 EndTime=2026-11-29T22:30:05 Deadline=N/A\n")
    assert job_end_time(JOB) == time.mktime((2026, 11, 29, 22, 30, 5, 0, 0, -1))


def test_a_job_without_a_limit(scontrol):
    scontrol("JobId=12 StartTime=2026-11-29T10:00:00 EndTime=Unknown Deadline=N/A")
    assert job_end_time(JOB) is None


def test_without_scontrol_the_cure_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^stop_before needs the end of job 12, .*export SLURM_JOB_END_TIME"
    ):
        job_end_time(JOB)
