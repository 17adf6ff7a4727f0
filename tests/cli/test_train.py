"""What `train` settles before it imports torch."""

from __future__ import annotations

import time

import pytest

from omnirl_hpc.cli.train import find_deadline
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.identity import Identity


def test_stop_before_leaves_time_to_train(monkeypatch):
    end = int(time.time()) + 1000
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    assert find_deadline(300, Identity("alone", 0, 0, 1)) == end - 300
    for too_long in (1000, 3600):
        with pytest.raises(ConfigError, match=f"^stop_before={too_long}, and the job ends in "):
            find_deadline(too_long, Identity("alone", 0, 0, 1))
    assert find_deadline(3600, Identity("srun", 1, 1, 2)) is None  # rank 0 looks at the clock
