"""The combinations of a sweep."""

from __future__ import annotations

import pytest

from omnirl_hpc.cli.main import main
from omnirl_hpc.cli.sweep import combinations
from omnirl_hpc.config.quoting import setting
from omnirl_hpc.errors import ConfigError


def test_every_combination_once_and_lists_stay_lists():
    assert combinations(
        ["seed=0,1", "steps=5", "sampling.transition=sde,cps", "rollout.awake=[vae,text_encoder]"]
    ) == [
        [f"seed={seed}", "steps=5", f"sampling.transition={transition}", "rollout.awake=[vae,text_encoder]"]
        for seed in (0, 1)
        for transition in ("sde", "cps")
    ]


def test_quoted_values_stay_what_they_are():
    """Each task reads its combination as an override again."""
    names = ["it's", 'a"b', "a=b,c", "\\", "ünï (1)"]
    found = combinations(["data.prompts=" + ",".join(setting("", name)[1:] for name in names)])
    assert [only for (only,) in found] == [setting("data.prompts", name) for name in names]


def test_without_values_to_choose_from_there_is_one(capsys):
    main(["sweep", "--task", "0", "seed=1", "steps=2"])
    assert capsys.readouterr().out.splitlines() == ["seed=1", "steps=2"]


def test_the_list(capsys):
    main(["sweep", "seed=0,1", "steps=2"])
    assert capsys.readouterr().out.splitlines() == ["0 seed=0 steps=2", "1 seed=1 steps=2"]


@pytest.mark.parametrize("task", ["2", "-1"])
def test_a_task_that_has_no_combination(task, capsys):
    with pytest.raises(SystemExit) as end:
        main(["sweep", f"--task={task}", "seed=0,1"])
    assert end.value.code == 2
    assert (
        capsys.readouterr().err
        == f"omnirl-hpc sweep: task {task}: the sweep has 2 combinations: submit it with --array=0-1\n"
    )


def test_what_is_no_override():
    with pytest.raises(ConfigError, match="seed"):
        combinations(["seed 0"])
