"""What `train` settles and says before it trains."""

from __future__ import annotations

import time

import pytest

from omnirl_hpc.cli.train import describe_choices, find_deadline
from omnirl_hpc.config.load import NO_PATHS, load_config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.layout import make_layout


def test_stop_before_leaves_time_to_train(monkeypatch):
    end = int(time.time()) + 1000
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    assert find_deadline(300, Identity("alone", 0, 0, 1)) == end - 300
    for too_long in (1000, 3600):
        with pytest.raises(ConfigError, match=f"^stop_before={too_long}, and the job ends in "):
            find_deadline(too_long, Identity("alone", 0, 0, 1))
    assert find_deadline(3600, Identity("srun", 1, 1, 2)) is None  # rank 0 looks at the clock


def choices(*overrides: str) -> dict[str, str]:
    config = load_config([*NO_PATHS, *overrides]).config
    return describe_choices(config, make_layout(config, 0, 2), Identity("alone", 0, 0, 2), "cpu")


def test_the_table_at_the_start_names_no_engine_where_none_is_built():
    """Nor rewards; where it evaluates, all of them."""
    alone, evaluated = choices("recipe=dpo_tiny"), choices("recipe=dpo_tiny", "evaluation.every=5")
    assert {"rollout", "sampling", "reward"} == evaluated.keys() - alone.keys()
    assert "rollout" not in alone["attention"] and "rollout" in evaluated["attention"]
    assert alone["step"] == "8 pairs of a table, 2 update(s)"
    assert choices("recipe=flowgrpo_tiny")["step"].endswith("images, 2 update(s)")
