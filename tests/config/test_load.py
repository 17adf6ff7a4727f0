"""From overrides to a typed configuration, and the sentence said where that fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from omnirl_hpc.algorithms.flow_grpo import FlowGRPOConfig
from omnirl_hpc.checks.rules import check
from omnirl_hpc.config import classes, load
from omnirl_hpc.config.classes import config_dir
from omnirl_hpc.config.load import load_config, load_run_config, valid_keys
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.models.spec import find_spec
from omnirl_hpc.report.records import RunRecords
from tests.stand_ins import write_descriptions_of

NEEDED = ["run_dir=r", "model.path=m", "data.prompts=p"]
RECIPES = sorted(file.stem for file in (config_dir() / "recipe").glob("*.yaml"))


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*NEEDED, *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_choices_and_types():
    loaded = load_config(
        [*NEEDED, "sampling=cps", "actor.lora.rank=8", "sampling.window.size=null", "actor.optimizer.lr=1e-3"]
    )
    config = loaded.config
    assert isinstance(config, Config) and isinstance(config.algorithm, FlowGRPOConfig)
    assert (config.run_dir, config.model.path, config.data.prompts) == ("r", "m", "p")
    assert (config.sampling.transition, config.sampling.noise_level) == (
        "cps",
        0.8,
    )  # configs/sampling/cps.yaml
    assert (config.actor.lora.rank, config.sampling.window.size, config.actor.optimizer.lr) == (8, None, 1e-3)
    assert loaded.choices["sampling"] == "cps" and loaded.choices["algorithm"] == "flow_grpo"


def test_the_stored_configuration_is_the_whole_one():
    loaded = load_config([*NEEDED, "recipe=flowgrpo_tiny", "seed=7"])
    stored = OmegaConf.create(loaded.to_yaml())
    assert (
        OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(Config), {"algorithm": FlowGRPOConfig()}, stored)
        ).algorithm
        == loaded.config.algorithm
    )
    assert stored.seed == 7 and stored.actor.optimizer.betas == [0.9, 0.999]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_breaks_no_rule(recipe, tmp_path):
    loaded = load_config(
        [
            f"recipe={recipe}",
            f"run_dir={tmp_path}/run",
            f"model.path={tmp_path}",
            f"data.prompts={tmp_path}/model_index.json",
            *([f"algorithm.teacher={tmp_path}"] if recipe.startswith("diffusionopd") else []),
        ]
    )
    assert loaded.choices["recipe"] == recipe
    write_descriptions_of(find_spec(loaded.config.model.family), tmp_path)
    check(loaded.config, world_size=2)


def test_the_reference_recipe_has_the_published_values():
    config = load_config(
        [*NEEDED, "recipe=flowgrpo_qwen_image"]
    ).config  # verl_omni.md section 1.9, first row
    assert config.data.prompts_per_step * config.data.samples_per_prompt == 512
    assert (config.model.height, config.model.width, config.sampling.num_inference_steps) == (512, 512, 10)
    assert (config.sampling.true_cfg_scale, config.sampling.transition, config.sampling.noise_level) == (
        4.0,
        "sde",
        1.2,
    )
    assert (config.sampling.window.size, config.sampling.window.first, config.sampling.window.last) == (
        2,
        0,
        5,
    )
    assert (config.actor.lora.rank, config.actor.lora.alpha, config.actor.updates_per_step) == (64, 128, 2)
    assert (config.actor.optimizer.lr, config.actor.optimizer.weight_decay) == (3e-4, 1e-4)
    assert (config.algorithm.clip_range, config.algorithm.advantage_clip, config.algorithm.kl_coef) == (
        1e-5,
        5.0,
        0.0,
    )


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("actor.lora.rnk=3", "actor.lora.rnk", "actor.lora.rank"),
        ("actor.optimizer.learning_rate=1", "actor.optimizer.learning_rate", "actor.optimizer.lr"),
        ("stepz=3", "stepz", "steps"),
        ("rank=3", "rank", "actor.lora.rank"),
        ("algorithm.clip_rnge=1", "algorithm.clip_rnge", "algorithm.clip_range"),
        ("actor.lora={rnk: 3}", "actor.lora.rnk", "actor.lora.rank"),
        ("+sampling.window.sise=3", "sampling.window.sise", "sampling.window.size"),
        ("+algorithm.kl_coeff=3", "algorithm.kl_coeff", "algorithm.kl_coef"),
        ("+reward.max_failed=3", "reward.max_failed", "reward.max_failed_fraction"),
        ("reward.workers=3", "reward.workers", "reward.parts.ocr.workers"),
        (
            "reward.parts.jpeg_compressibility.wieght=3",
            "reward.parts.jpeg_compressibility.wieght",
            "reward.parts.jpeg_compressibility.weight",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(override, key, nearest):
    assert message(override) == f"unknown setting {key}; did you mean {nearest}?"


def test_an_unknown_key_that_is_near_nothing():
    assert message("qqqqq=1") == message("+qqqqq=1") == "unknown setting qqqqq"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            "actor:\n  lora: {rnk: 8}\n",
            "configs/recipe/mine.yaml: unknown setting actor.lora.rnk; did you mean actor.lora.rank?",
        ),
        (
            "steps: abc\n",
            "configs/recipe/mine.yaml: steps: Value 'abc' of type 'str' could not be converted to Integer",
        ),
        ("steps: [1\n", "a file of settings is not YAML: "),
    ],
)
def test_a_mistake_in_a_recipe_names_file_and_key(tmp_path, monkeypatch, recipe, said):
    configs = tmp_path / "configs"
    shutil.copytree(config_dir(), configs)
    (configs / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{recipe}")
    for module in (load, classes):
        monkeypatch.setattr(module, "config_dir", lambda: configs)
    assert message("recipe=mine").startswith(said)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("steps=abc", "steps"),
        ("actor.lora.rank=1.5", "actor.lora.rank"),
        ("seed=null", "seed"),
        ("data.text_lengths=[a]", "data.text_lengths"),
    ],
)
def test_a_value_of_the_wrong_type_names_its_key(override, key):
    assert message(override).startswith(f"{override}: the value must be ") and key in message(override)


@pytest.mark.parametrize("key", ["run_dir", "model.path", "data.prompts"])
def test_a_missing_value_names_its_key(key):
    with pytest.raises(
        ConfigError, match=f"^{key} has no value: add {key}=… to the command line or to the recipe$"
    ):
        load_config([override for override in NEEDED if not override.startswith(key)])


def test_an_unknown_choice_names_the_known_ones():
    assert message("recipe=nope") == f"recipe=nope is not known; it must be one of: {', '.join(RECIPES)}"
    assert message("sampling=ode") == "sampling=ode is not known; it must be one of: cps, dance, sde"


@pytest.mark.parametrize("override", ["--help", "steps", "steps=[1", "a b"])
def test_what_is_no_override(override):
    assert (
        message(override)
        == f"{override!r} cannot be read: settings are written as key=value, in Hydra's syntax"
    )


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("run_dir=/data/ünï", """'run_dir="/data/ünï"'"""),
        ("run_dir=lr=1", """'run_dir="lr=1"'"""),
        ("model.path=~/models/a", "write model.path=$HOME/models/a"),
        ("run_dir=a,b", "a list is written [a,b]"),
    ],
)
def test_what_hydra_cannot_read_comes_with_the_way_to_write_it(override, cure):
    assert override in message(override) and cure in message(override)


def test_valid_keys_are_those_that_hold_values():
    keys = valid_keys()
    assert {"steps", "actor.lora.rank", "reward.parts.ocr.min_confidence", "sampling.window.last"} <= set(
        keys
    )
    assert not {"actor", "actor.lora", "sampling.window"} & set(keys)


def test_an_incomplete_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(classes, "__file__", str(tmp_path / "omnirl_hpc" / "config" / "classes.py"))
    with pytest.raises(ConfigError, match="the installation is incomplete: no configs/train.yaml"):
        config_dir()


def test_the_folder_of_a_wheel_is_found(monkeypatch, tmp_path):
    inside = Path(tmp_path, "omnirl_hpc", "configs")
    inside.mkdir(parents=True)
    (inside / "train.yaml").touch()
    monkeypatch.setattr(classes, "__file__", str(tmp_path / "omnirl_hpc" / "config" / "classes.py"))
    assert config_dir() == inside


@pytest.fixture
def stored(tmp_path):
    """config.yaml of a run."""
    file = tmp_path / "config.yaml"
    overrides = [
        "recipe=flowgrpo_tiny",
        "sampling=cps",
        "seed=7",
        "init_adapter=null",
        "algorithm.clip_range=0.5",
    ]
    file.write_text(load_config([*NEEDED, *overrides]).to_yaml())
    return file


def test_a_runs_settings_come_back_with_values_on_top(stored):
    assert load_run_config(stored, []).to_yaml() == stored.read_text()
    config = load_run_config(stored, ["seed=8", "model.path=elsewhere"]).config
    assert isinstance(config.algorithm, FlowGRPOConfig) and config.algorithm.clip_range == 0.5
    assert (config.seed, config.model.path, config.sampling.transition) == (8, "elsewhere", "cps")


def test_a_setting_that_is_newer_than_the_run_has_its_default(stored):
    stored.write_text(
        "".join(line for line in stored.read_text().splitlines(True) if "stop_before" not in line)
    )
    assert load_run_config(stored, []).config.stop_before == 0.0


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (None, ["sede=3"], "unknown setting sede; did you mean seed?"),
        (None, ["seed=many"], "seed"),
        (None, ["sampling=sde"], "the run has chosen its sampling; only values can be changed"),
        ("seed: [", [], "does not hold the settings of a run"),
        ("seed: 3", [], "does not hold the settings of a run"),
        ("", [], "does not hold the settings of a run"),
    ],
)
def test_what_cannot_be_loaded_from_a_run_is_one_sentence(stored, text, overrides, said):
    if text is not None:
        stored.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(stored, overrides)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_settings_of_another_users_run_are_data(tmp_path, monkeypatch):
    """Neither what YAML can call nor a class in the run's folder is run."""
    mark = tmp_path / "mark"
    settings = ["recipe=flowgrpo_tiny", "model.path=m", "data.prompts=p", "run_dir=r"]
    stored = tmp_path / "config.yaml"
    stored.write_text(load_config(settings).to_yaml())
    ours, theirs = "name: jpeg_compressibility", "name: hostile_reward:Mine"
    assert stored.read_text().count(ours) == 1
    (tmp_path / "hostile_reward.py").write_text(f"open({str(mark)!r}, 'w')")
    stored.write_text(stored.read_text().replace(ours, theirs))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="reward=hostile_reward:Mine: .* use another working directory"):
        load_run_config(Path("config.yaml"), [])
    stored.write_text(f"seed: !!python/object/apply:os.system ['touch {mark}']\n")
    with pytest.raises(ConfigError, match="does not hold the settings of a run"):
        load_run_config(stored, [])
    with pytest.raises(ConfigError, match="cannot be read"):
        RunRecords.read(tmp_path)
    assert not mark.exists()
    assert os.system(f"touch {mark}") == 0 and mark.exists()  # the command would have left its mark
