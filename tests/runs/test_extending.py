"""The examples of docs/extending.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import omnirl_hpc
from omnirl_hpc.config.load import load_config
from tests.runs.program import lines

pytestmark = pytest.mark.slow

PAGE = (Path(omnirl_hpc.__file__).parent.parent / "docs/extending.md").read_text()
FILES = re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    [word.strip("'") for word in command.split() if word != "model.path=/path/to/checkpoint"]
    for command in re.findall(r"^omnirl-hpc train … (.*)$", PAGE, re.MULTILINE)
]


def test_the_page_has_its_examples():
    assert [name for name, _ in FILES] == ["my_reward.py", "my_algorithm.py", "my_family.py"]
    assert len(COMMANDS) == 4
    for _, code in FILES:
        assert len([line for line in code.splitlines() if line.strip()]) <= 12


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, code in FILES:
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_examples_are_settings(folder, command):
    """Each value of a command stands in the settings that it makes."""
    loaded = load_config(["run_dir=r", "model.path=m", "data.prompts=p", *command])
    settings = OmegaConf.create(loaded.to_yaml())
    for key, _, value in (override.partition("=") for override in command):
        if key in ("reward", "algorithm", "model"):  # a choice: its name, or its family
            chosen = {"reward": list(settings.reward.parts), "algorithm": settings.algorithm.name}
            chosen["model"] = settings.model.family
            assert all(name.rpartition(":")[2] in str(chosen[key]) for name in value.strip("[]").split(","))
        else:
            assert str(OmegaConf.select(settings, key)) == value


# Of the two for the reward, the second does all that the first does; on two ranks torchrun's idea of a
# working directory counts.
@pytest.mark.parametrize(("command", "ranks"), [*zip(COMMANDS[1:], (2, 1, 1))], ids=lambda value: str(value))
def test_the_examples_train_from_a_folder_of_their_own(program, folder, tmp_path, command, ranks):
    program.finish(tmp_path / "run", *command, "steps=1", "determinism=strict", ranks=ranks)
    (metrics,) = lines(tmp_path / "run/metrics.jsonl")
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    if "Brightness" in command[0]:
        parts = {name: metrics[f"reward/{name}/mean"] for name in ("Brightness", "ocr")}
        assert -0.5 <= parts["Brightness"] < 0 and 0 <= parts["ocr"] <= 1
        assert metrics["reward/mean"] == pytest.approx(parts["Brightness"] + 0.7 * parts["ocr"])
        program.finish(tmp_path / "run", *command, "steps=2", "determinism=strict", ranks=ranks)
        assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == [0, 1]
    elif "MostlyPositive" in command[0]:
        assert (
            config["algorithm"]["name"] == "my_algorithm:MostlyPositive"
            and config["algorithm"]["keep"] == 0.2
        )
    else:
        adapter = (tmp_path / "run/checkpoints/step_000001/adapter/adapter_config.json").read_text()
        assert "to_add_out" in adapter and "img_mlp" not in adapter
