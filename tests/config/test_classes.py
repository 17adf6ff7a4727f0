"""Classes by short name and by import path, and the sentence said where one cannot be used."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import omnirl_hpc
from omnirl_hpc.checks.model_rules import model_is_known
from omnirl_hpc.config.classes import BASE_SETTINGS, BASES, MODULES, built_in, find_class, settings_class
from omnirl_hpc.config.load import load_config, load_run_config
from omnirl_hpc.config.schema import RewardPartConfig
from omnirl_hpc.errors import ConfigError

NEEDED = ["run_dir=r", "model.path=m", "data.prompts=p"]


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in MODULES for name in built_in(group)])
def test_every_name_is_a_file_with_a_class_and_its_settings(group, name):
    found = find_class(group, name)
    assert found.__module__ == MODULES[group].format(name)
    assert find_class(group, f"{found.__module__}:{found.__name__}") is found
    if group in BASE_SETTINGS:
        settings = settings_class(group, name)
        assert settings is found.Settings and settings in (
            BASE_SETTINGS[group],
            *vars(sys.modules[found.__module__]).values(),
        )


@pytest.mark.parametrize("group", MODULES)
def test_every_class_of_ours_has_a_name(group):
    """A file in the folder of a group that holds such a class has a file in configs/."""
    base_module, _, base = BASES[group].partition(":")
    folder = Path(omnirl_hpc.__file__).parent / MODULES[group].split(".")[1]
    pattern = "*/family.py" if group == "model" else "*.py"
    names = set()
    for file in folder.glob(pattern):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        module = importlib.import_module(".".join(("omnirl_hpc", *parts)).removesuffix(".__init__"))
        kind = getattr(importlib.import_module(base_module), base)
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        own = [c for c in classes if c.__module__ == module.__name__ and issubclass(c, kind)]
        if not all(inspect.isabstract(c) for c in own):
            names.add(file.parent.name if group == "model" else file.stem)
    assert names - {base_module.rpartition(".")[2]} == set(built_in(group))


MINE = """
from dataclasses import dataclass, field
from omnirl_hpc.rewards import Reward, RewardBatch, RewardPartConfig

@dataclass
class MineConfig(RewardPartConfig):
    level: float = 0.5
    tags: list[str] = field(default_factory=lambda: ["a"])

class Mine(Reward):
    Settings = MineConfig
    def score(self, batch):
        return [self.settings.level] * len(batch.images)

class Abstract(Reward):
    pass

class Untyped(Mine):
    Settings = dict

class Odd(Mine):
    @dataclass
    class Settings(RewardPartConfig):
        level: complex = 1j

class Bare(Mine):
    def __init__(self):
        pass

class Stranger:
    pass

number = 3
"""


FAMILY = """
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.models.qwen_image.family import QwenImage

class Half(ModelFamily):
    def stream_shapes(self):
        return {"latents": (1, 1)}

class Nothing(ModelFamily):
    pass

Nothing.__abstractmethods__ = frozenset()

class Whole(QwenImage):
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The file mine.py in the working directory, which is not on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("def :\n")
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    (tmp_path / "hasty.py").write_text("import json\n\nlimits = json.loads('{')\n")
    (tmp_path / "family.py").write_text(FAMILY)
    yield tmp_path
    for name in ("mine", "broken", "needy", "hasty", "family"):
        sys.modules.pop(name, None)


def test_a_model_family_and_a_reward_are_checked_alike(module):
    """Families have no settings of their own, and are looked at by the rules."""
    assert find_class("model", "family:Whole").spec.lora_targets
    for path, message in (
        (
            "family:Half",
            "Half does not define decode, driver, pad, predict, schedules, spec$",
        ),
        ("family:Nothing", "Nothing does not define spec$"),
    ):
        config = load_config([*NEEDED, f"model={path}", "reward=ocr", "algorithm=flow_grpo"]).config
        with pytest.raises(ConfigError, match=f"^model={path}: {message}"):
            model_is_known(config, 1)


def test_a_run_whose_classes_are_not_here_is_read_without_them(module):
    overrides = [*NEEDED, "algorithm=flow_grpo", "reward=[mine:Mine,ocr]", "reward.parts.Mine.level=0.25"]
    file = module / "run" / "config.yaml"
    file.parent.mkdir()
    file.write_text(
        load_config([*overrides, "reward.parts.Mine.weight=2"]).to_yaml().replace("mine:Mine", "gone:Mine")
    )
    with pytest.raises(ConfigError, match="no module gone"):
        load_run_config(file, [], unused=["algorithm"])
    parts = load_run_config(file, [], unused=["algorithm", "reward"]).config.reward.parts
    assert parts == {"Mine": RewardPartConfig("gone:Mine", weight=2.0), "ocr": RewardPartConfig("ocr")}


def said(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*NEEDED, *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward=nowhere:Mine",
            "reward=nowhere:Mine: there is no module nowhere on Python's path or in the working directory ",
        ),
        ("reward=mine.deeper:Mine", "reward=mine.deeper:Mine: there is no module mine.deeper on"),
        ("reward=needy:Mine", "reward=needy:Mine: needy needs no_such_package, which is not installed"),
        (
            "reward=broken:Mine",
            "reward=broken:Mine cannot be imported: SyntaxError: invalid syntax (broken.py, line 1)",
        ),
        (
            "reward=hasty:Mine",
            "reward=hasty:Mine cannot be imported: JSONDecodeError: Expecting property name enclosed in ",
        ),
        (
            "reward=mine:Bare",
            "reward=mine:Bare: Bare cannot be made from its settings alone: too many positional arguments",
        ),
        ("reward=mine:Other", "reward=mine:Other: the module mine has no class Other"),
        ("reward=mine:number", "reward=mine:number: the module mine has no class number"),
        *[
            (f"reward={path}", f"reward={path}: a class of your own is written as")
            for path in ("mine:", ":Mine", ".mine:Mine")
        ],
        (
            "reward=mine:Stranger",
            "reward=mine:Stranger: Stranger does not derive from omnirl_hpc.rewards.reward.Reward",
        ),
        (
            "algorithm=mine:Mine",
            "algorithm=mine:Mine: Mine does not derive from omnirl_hpc.algorithms.algorithm.Algorithm",
        ),
        ("reward=mine:Abstract", "reward=mine:Abstract: Abstract does not define score"),
        (
            "reward=mine:Untyped",
            "reward=mine:Untyped: its Settings must be a dataclass that derives from "
            "omnirl_hpc.config.schema.RewardPartConfig",
        ),
        (
            "reward=mine:Odd",
            "reward=mine:Odd: its Settings cannot be used: Unexpected type annotation: complex",
        ),
        ("reward=[ocr,nowhere:Mine]", "reward=nowhere:Mine: there is no module nowhere"),
        (
            "reward=[mine:Mine,ocr,other:Mine]",
            "reward=['mine:Mine', 'ocr', 'other:Mine'] has several parts named Mine: one of each",
        ),
        ("reward=[ocr,ocr]", "reward=['ocr', 'ocr'] has several parts named ocr: one of each name"),
    ],
)
def test_what_cannot_be_used(module, override, message):
    assert said(override).startswith(message)


def test_a_reward_of_ones_own_brings_its_settings(module):
    loaded = load_config(
        [*NEEDED, "reward=mine:Mine", "reward.parts.Mine.level=0.25", "reward.parts.Mine.weight=2"]
    )
    (part,) = loaded.config.reward.parts.values()
    assert type(part).__name__ == "MineConfig" and (part.name, part.level, part.weight, part.tags) == (
        "mine:Mine",
        0.25,
        2.0,
        ["a"],
    )
    assert "reward.parts.Mine.level=high" in said("reward=mine:Mine", "reward.parts.Mine.level=high")
    assert said("reward=mine:Mine", "reward.parts.Mine.lvel=1") == (
        "unknown setting reward.parts.Mine.lvel; did you mean reward.parts.Mine.level?"
    )


def test_ones_own_and_ours_together(module):
    parts = load_config(
        [*NEEDED, "reward=[mine:Mine,ocr]", "reward.parts.ocr.weight=0.7"]
    ).config.reward.parts
    assert {name: part.weight for name, part in parts.items()} == {"Mine": 1.0, "ocr": 0.7}


def test_a_reward_that_was_not_chosen_has_no_settings():
    assert said("reward.parts.ocr.weight=1") == (
        "reward.parts.ocr is not among the chosen rewards: choose them by reward=NAME or 'reward=[NAME,NAME]'"
    )


def test_without_the_algorithm_torch_is_not_imported():
    program = (
        "import sys; from omnirl_hpc.config.load import load_config; "
        "from omnirl_hpc.checks.reward_rules import rewards_are_known;"
        f"config = load_config({[*NEEDED, 'reward=ocr']}, unused=['algorithm']).config; "
        "rewards_are_known(config, 1);"
        "print(sorted({'torch', 'rapidocr', 'diffusers'} & set(sys.modules)))"
    )
    environ = {"PYTHONPATH": ":".join([str(Path(omnirl_hpc.__file__).parent.parent), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ
    )
    assert result.stdout.strip() == "[]"
