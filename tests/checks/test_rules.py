"""Each rule is broken alone, and names the keys to change."""

from __future__ import annotations

import copy
import importlib
import json
import math
import pkgutil
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnirl_hpc import checks
from omnirl_hpc.algorithms.diffusion_opd import DiffusionOPDConfig
from omnirl_hpc.checks import engine_rules, node_rules, rules, step_rules
from omnirl_hpc.config.load import NO_PATHS, load_config
from omnirl_hpc.errors import ConfigError
from tests.stand_ins import write_descriptions

POSITIVE = [
    "evaluation.num_prompts",
    "evaluation.samples_per_prompt",
    "evaluation.num_inference_steps",
    "steps",
    "timeout_seconds",
    "threads_per_rank",
    "data.prompts_per_step",
    "sampling.num_inference_steps",
    "rollout.micro_batch_size",
    "rollout.embedding_cache_size",
    "actor.micro_batch_size",
    "actor.updates_per_step",
    "actor.lora.rank",
    "actor.lora.alpha",
    "checkpoint.every",
    "checkpoint.keep",
    "reward.parts.jpeg_compressibility.workers",
    "reward.parts.jpeg_compressibility.timeout_seconds",
]

# checks/rules.py and the rules by subject, checks/…_rules.py
FILES = sorted(
    f"{checks.__name__}.{file.name}"
    for file in pkgutil.iter_modules(checks.__path__)
    if file.name.endswith("rules")
)

JPEG = "reward.parts.jpeg_compressibility"
EXPERTS = {
    "model.family": "tests.toy_experts:ToyExperts",
    f"{JPEG}.name": "tests.toy_reward_in_thread:CalmLatents",
}
VLLM_OMNI = {"rollout.engine": "vllm_omni"}

# rule, what is set (on top of a valid configuration of 4 prompts x 8 samples), ranks, keys that the message
# names
BREAKS = [
    *[("counts_are_positive", {key: value}, 1, [key]) for key in POSITIVE for value in (0, -1)],
    *[("counts_are_positive", {key: math.inf}, 1, [key]) for key in ("timeout_seconds", POSITIVE[-1])],
    *[
        ("counts_are_not_negative", {key: -1}, 1, [key])
        for key in ("seed", "logging.samples_every", "logging.samples_count", "data.refill_rounds")
    ],
    (
        "algorithm_fits",
        {"data.samples_per_prompt": 1, "actor.micro_batch_size": 1},
        1,
        ["data.samples_per_prompt"],
    ),
    ("image_size_fits", {"model.height": 100}, 1, ["model.height", "nearest is 96"]),
    ("image_size_fits", {"model.width": 8}, 1, ["model.width", "nearest is 16"]),
    ("image_size_fits", {"model.width": -16}, 1, ["model.width", "nearest is 16"]),
    ("choices_are_known", {"rollout.engine": "vllm"}, 1, ["rollout.engine", "diffusers"]),
    ("choices_are_known", {"residency": "cloud"}, 1, ["residency", "resident"]),
    ("choices_are_known", {"determinism": "very"}, 1, ["determinism", "fast, strict"]),
    ("choices_are_known", {"sampling.transition": "ode"}, 1, ["sampling.transition", "sde, cps, dance"]),
    (
        "choices_are_known",
        {"sampling.window.per": "rank"},
        1,
        ["sampling.window.per", "step, prompt, sample"],
    ),
    ("choices_are_known", {"rollout.dtype": "float16"}, 1, ["rollout.dtype", "float32, bfloat16"]),
    ("choices_are_known", {"actor.dtype": "fp32"}, 1, ["actor.dtype", "float32, bfloat16"]),
    ("choices_are_known", {"actor.lora.dtype": "int8"}, 1, ["actor.lora.dtype", "float32, bfloat16"]),
    ("choices_are_known", {"actor.cfg": "parallel"}, 1, ["actor.cfg", "sequential, batched"]),
    (
        "model_is_known",
        {"model.family": "sdxl"},
        1,
        ["model.family", "qwen_image", "your own as module:Class"],
    ),
    (
        "engine_runs_the_family",
        {"model.family": "tests.toy_family:Toy", "rollout.engine": "vllm_omni"},
        1,
        ["rollout.engine=vllm_omni", "model.family=tests.toy_family:Toy", "choose rollout=diffusers"],
    ),
    (
        "rewards_get_what_they_need",
        {f"{JPEG}.name": "tests.toy_reward:QuietAndDark"},
        1,
        ["tests.toy_reward:QuietAndDark needs video", "model.family=qwen_image makes image"],
    ),
    ("frames_fit", {"model.frames": 9}, 1, ["model.frames=9", "must be 1"]),
    ("algorithm_is_known", {"algorithm.name": "ppo"}, 1, ["algorithm.name", "flow_grpo"]),
    (
        "rewards_get_what_they_need",
        {f"{JPEG}.name": "tests.toy_reward_of_text:ManyLetters"},
        1,
        ["ManyLetters needs text", "model.family=qwen_image makes image"],
    ),
    (
        "experts_take_turns",
        {**EXPERTS, "sampling.window.per": "sample"},
        1,
        ["sampling.window.per=sample", "the toy has 2 networks", "sampling.window.per=step"],
    ),
    (
        "experts_take_turns",
        {**EXPERTS, "algorithm.name": "diffusion_nft", "sampling.true_cfg_scale": 1.0},
        1,
        ["algorithm.name=diffusion_nft", "the toy has 2 networks", "algorithm=flow_grpo"],
    ),
    (
        "rewards_run_somewhere",
        {f"{JPEG}.name": "tests.rewards.scripted:NowhereToBe"},
        1,
        [f"{JPEG}.name", "runs_in=cloud is not known", "process, thread, device"],
    ),
    (
        "rewards_run_somewhere",
        {f"{JPEG}.name": "tests.rewards.scripted:WithoutModules"},
        1,
        [f"{JPEG}.name", "modules()"],
    ),
    (
        "rewards_run_somewhere",
        {f"{JPEG}.name": "tests.rewards.scripted:OnDevice", f"{JPEG}.workers": 2},
        1,
        [f"{JPEG}.workers=2", f"set {JPEG}.workers=1"],
    ),
    (
        "rewards_run_somewhere",
        {f"{JPEG}.name": "tests.rewards.scripted:OnDevice", "residency": "auto"},
        1,
        ["residency=auto", f"{JPEG}.name", "residency=swap"],
    ),
    (
        "rewards_are_known",
        {f"{JPEG}.name": "beauty"},
        1,
        [f"{JPEG}.name", "jpeg_compressibility, loudness, ocr"],
    ),
    ("model_is_known", {"model.family": "nowhere:Family"}, 1, ["model=nowhere:Family", "no module nowhere"]),
    ("text_lengths_ascend", {"data.text_lengths": []}, 1, ["data.text_lengths"]),
    ("text_lengths_ascend", {"data.text_lengths": [0, 64]}, 1, ["data.text_lengths"]),
    ("text_lengths_ascend", {"data.text_lengths": [64, 64]}, 1, ["data.text_lengths", "ascending"]),
    ("text_lengths_ascend", {"data.text_lengths": [64, 1025]}, 1, ["data.text_lengths", "1024"]),
    ("guidance_is_valid", {"sampling.true_cfg_scale": 0.5}, 1, ["sampling.true_cfg_scale"]),
    ("guidance_is_valid", {"sampling.true_cfg_scale": math.nan}, 1, ["sampling.true_cfg_scale"]),
    ("noise_level_fits_transition", {"sampling.noise_level": 0.0}, 1, ["sampling.noise_level"]),
    ("noise_level_fits_transition", {"sampling.noise_level": math.nan}, 1, ["sampling.noise_level"]),
    (
        "noise_level_fits_transition",
        {"sampling.noise_level": 1.2, "sampling.transition": "cps"},
        1,
        ["sampling.noise_level", "sampling.transition=cps"],
    ),
    (
        "window_fits_schedule",
        {"sampling.num_inference_steps": 1},
        1,
        ["sampling.num_inference_steps"],
    ),
    (
        "window_fits_schedule",
        {"sampling.window.last": 6},  # of 6 steps
        1,
        ["sampling.window.first", "sampling.window.last", "sampling.num_inference_steps"],
    ),
    (
        "window_fits_schedule",
        {"sampling.window.first": -1},
        1,
        ["sampling.window.first", "sampling.window.last"],
    ),
    (
        "window_fits_schedule",
        {"sampling.window.first": 5},
        1,
        ["sampling.window.first", "sampling.window.last"],
    ),
    (
        "window_fits_schedule",
        {"sampling.window.first": 2, "sampling.window.last": 4, "sampling.window.size": 3},
        1,
        ["sampling.window.size", "sampling.window.first", "sampling.window.last", "1 to 2"],
    ),
    ("window_fits_schedule", {"sampling.window.size": 0}, 1, ["sampling.window.size"]),
    ("choices_are_known", {"sampling.window.solver": "heun"}, 1, ["sampling.window.solver", "euler, dpm2"]),
    (
        "window_can_be_followed_by_fewer_steps",
        {"sampling.window.compress": 0.0},
        1,
        ["sampling.window.compress", "above 0"],
    ),
    (
        "window_can_be_followed_by_fewer_steps",
        {"sampling.window.compress": 0.5, "sampling.window.per": "sample"},
        1,
        ["sampling.window.compress", "sampling.window.per=step"],
    ),
    ("layout_is_possible", {"rollout.ulysses_degree": 0}, 1, ["rollout.ulysses_degree"]),
    ("layout_is_possible", {"data.prompts_per_step": 5}, 2, ["data.prompts_per_step", "multiple of 2"]),
    ("layout_is_possible", {"actor.shard_size": 3}, 4, ["actor.shard_size"]),
    (
        "layout_is_possible",
        {"rollout.tensor_parallel_size": 3},
        4,
        ["rollout.tensor_parallel_size", "rollout.ulysses_degree", "rollout.cfg_parallel_size"],
    ),
    (
        "updates_divide_the_step",
        {"actor.updates_per_step": 3},
        1,
        ["actor.updates_per_step", "data.prompts_per_step"],
    ),
    (
        "updates_divide_the_step",
        {"actor.updates_per_step": 4},
        2,
        ["actor.updates_per_step", "2 prompts of a replica"],
    ),
    (
        "algorithm_fits",
        {"actor.micro_batch_size": 12},
        1,
        ["actor.micro_batch_size", "data.samples_per_prompt", "such as 4"],
    ),
    (
        "algorithm_fits",
        {"data.samples_per_prompt": 3, "actor.updates_per_step": 2, "rollout.tensor_parallel_size": 2},
        4,
        ["data.samples_per_prompt", "actor.updates_per_step"],
    ),
    (
        "diffusers_engine_is_one_rank",
        {"rollout.cfg_parallel_size": 2, "actor.micro_batch_size": 4},
        2,
        [
            "rollout.engine=diffusers",
            "rollout.tensor_parallel_size",
            "rollout.ulysses_degree",
            "rollout.cfg_parallel_size",
        ],
    ),
    ("choices_are_known", {"rollout.lora": "fused"}, 1, ["rollout.lora", "adapter, merged"]),
    ("choices_are_known", {"rollout.attention": "fa2"}, 1, ["rollout.attention", "sdpa, fa3, flash_attn"]),
    *[
        (
            "diffusers_engine_has_no_options",
            {f"rollout.{key}": value},
            1,
            [f"rollout.{key}", "rollout.engine=vllm_omni"],
        )
        for key, value in (("lora", "merged"), ("attention", "fa3"), ("compile", True), ("awake", ["vae"]))
    ],
    (
        "vllm_omni_engine_is_possible",
        VLLM_OMNI | {"rollout.cfg_parallel_size": 4, "actor.micro_batch_size": 4},
        4,
        ["rollout.cfg_parallel_size=4", "1 or 2"],
    ),
    (
        "vllm_omni_engine_is_possible",
        VLLM_OMNI | {"rollout.cfg_parallel_size": 2, "sampling.true_cfg_scale": 1.0},
        2,
        ["rollout.cfg_parallel_size=2", "sampling.true_cfg_scale"],
    ),
    (
        "vllm_omni_engine_is_possible",
        VLLM_OMNI | {"rollout.attention": "fa3"},
        1,
        ["rollout.attention=fa3", "rollout.dtype=bfloat16"],
    ),
    (
        "vllm_omni_engine_is_possible",
        VLLM_OMNI | {"rollout.ulysses_degree": 2, "model.height": 48, "model.width": 48},
        2,
        ["rollout.ulysses_degree=2", "9 tokens"],
    ),
    (
        "attention_heads_divide",
        VLLM_OMNI | {"rollout.tensor_parallel_size": 2, "rollout.ulysses_degree": 2},
        4,
        ["2 attention heads", "rollout.tensor_parallel_size x rollout.ulysses_degree = 4"],
    ),
    *[
        ("optimizer_is_valid", {f"actor.optimizer.{key}": 0.0}, 1, [f"actor.optimizer.{key}"])
        for key in ("lr", "eps", "max_grad_norm")
    ],
    ("optimizer_is_valid", {"actor.optimizer.lr": math.inf}, 1, ["actor.optimizer.lr"]),
    ("optimizer_is_valid", {"actor.optimizer.weight_decay": -0.1}, 1, ["actor.optimizer.weight_decay"]),
    ("optimizer_is_valid", {"actor.optimizer.warmup_updates": -1}, 1, ["actor.optimizer.warmup_updates"]),
    ("optimizer_is_valid", {"actor.optimizer.betas": [0.9]}, 1, ["actor.optimizer.betas"]),
    ("optimizer_is_valid", {"actor.optimizer.betas": [0.9, 1.0]}, 1, ["actor.optimizer.betas"]),
    ("compiler_is_there", {"actor.compile": True}, 1, ["actor.compile", "module load gcc"]),
    ("choices_are_known", {"reward.mix": "mean"}, 1, ["reward.mix", "sum, normalized"]),
    ("reward_fraction_is_valid", {"reward.max_failed_fraction": 1.0}, 1, ["reward.max_failed_fraction"]),
    ("reward_fraction_is_valid", {"reward.max_failed_fraction": -0.1}, 1, ["reward.max_failed_fraction"]),
    ("reward_parts_are_valid", {"reward.parts": {}}, 1, ["reward.parts", "reward=NAME"]),
    *[
        ("reward_parts_are_valid", {f"{JPEG}.weight": weight}, 1, [f"{JPEG}.weight"])
        for weight in (0.0, math.nan, math.inf)
    ],
    (
        "reward_packages_are_installed",
        {f"{JPEG}.name": "tests.rewards.scripted:NeedsPackages"},
        1,
        [JPEG, "needs no_such_package, not installed: pip install no_such_package"],
    ),
    ("paths_exist", {"model.path": "/nowhere"}, 1, ["model.path", "model_index.json"]),
    (
        "paths_exist",
        {"model.path": "Qwen/Qwen-Image"},
        1,
        ["model.path=Qwen/Qwen-Image", "omnirl-hpc prefetch"],
    ),
    (
        "model_is_supported",
        {"model.path": "distilled"},
        1,
        ["model.path=distilled", "model.family=qwen_image", "guidance_embeds=true"],
    ),
    ("paths_exist", {"data.prompts": "/nowhere.parquet"}, 1, ["data.prompts"]),
    ("init_adapter_fits", {"init_adapter": "/nowhere"}, 1, ["init_adapter", "adapter_model.safetensors"]),
    (
        "given_policies_fit",
        {"algorithm": DiffusionOPDConfig(teacher="/nowhere")},
        1,
        ["algorithm.teacher=/nowhere", "adapter_model.safetensors"],
    ),
    ("ema_decay_is_valid", {"actor.ema_decay": 1.0}, 1, ["actor.ema_decay=1.0"]),
    *[
        (
            "full_training_is_possible",
            {"actor.train": "full", key: value},
            1,
            [f"{key}={value}", "actor.train=full", f"Set {key}="],
        )
        for key, value in (
            ("actor.ema_decay", 0.9),
            ("evaluation.every", 1),
            ("init_adapter", "/x"),
        )
    ],
    (
        "algorithm_fits",
        {"actor.train": "full", "algorithm.kl_coef": 0.1},
        1,
        ["algorithm.name=flow_grpo", "reference", "actor.train=full", "algorithm.kl_coef=0"],
    ),
    ("choices_are_known", {"actor.train": "all"}, 1, ["actor.train=all", "lora, full"]),
    (
        "trackers_are_installed",
        {"logging.trackers": ["mlflow"]},
        1,
        ["logging.trackers=mlflow", "tensorboard, wandb, trackio"],
    ),
    (
        "evaluation_is_possible",
        {"evaluation.every": 1, "evaluation.num_prompts": 3},
        2,
        ["evaluation.num_prompts=3", "multiple of 2"],
    ),
    (
        "evaluation_is_possible",
        {
            "evaluation.every": 1,
            "evaluation.num_prompts": 1,
            "rollout.tensor_parallel_size": 2,
            "rollout.engine": "vllm_omni",
        },
        2,
        ["1 images", "evaluation.samples_per_prompt", "2 ranks"],
    ),
    ("paths_exist", {"evaluation.prompts": "/nowhere"}, 1, ["evaluation.prompts=/nowhere"]),
    (
        "step_to_resume_is_there",
        {"checkpoint.resume_step": 7},
        1,
        ["checkpoint.resume_step=7", "it has: none"],
    ),
    ("step_to_resume_is_there", {"checkpoint.resume_step": -1}, 1, ["checkpoint.resume_step=-1"]),
]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """A node without one."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(node_rules.shutil, "which", lambda name: None)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """The tiny recipe with one update a step, over files that exist."""
    folder = tmp_path_factory.mktemp("files")
    write_descriptions(folder, num_attention_heads=2)
    write_descriptions(folder / "distilled", guidance_embeds=True)
    (folder / "prompts.parquet").touch()
    paths = [f"run_dir={folder}/run", f"model.path={folder}", f"data.prompts={folder}/prompts.parquet"]
    return load_config(["recipe=flowgrpo_tiny", "actor.updates_per_step=1", *paths]).config


def changed(config, settings: dict[str, object]):
    """A copy with some keys set; past Hydra's types, as a rule sees it."""
    config = copy.deepcopy(config)
    for key, value in settings.items():
        *path, name = key.split(".")
        node = config
        for part in path:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        assert hasattr(node, name)
        setattr(node, name, value)
    return config


def test_the_valid_configuration_breaks_no_rule(valid):
    broken = [(rule.__name__, n) for rule in rules.RULES for n in (1, 2, 4) if breaks(rule, valid, n)]
    assert broken == []


@pytest.mark.parametrize(
    ("rule", "settings", "world_size", "named"),
    BREAKS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_names_its_keys(valid, monkeypatch, rule, settings, world_size, named):
    monkeypatch.chdir(valid.model.path)
    config = changed(valid, settings)
    with pytest.raises(ConfigError) as caught:
        rules.check(config, world_size)
    message = str(caught.value)
    assert "\n" not in message
    assert all(name in message for name in named), message
    assert next(r.__name__ for r in rules.RULES if breaks(r, config, world_size)) == rule


def breaks(rule, config, world_size: int) -> bool:
    try:
        rule(config, world_size)
    except ConfigError:
        return True
    return False


def test_every_rule_is_broken_by_some_test_and_every_rule_is_checked():
    assert {rule for rule, *_ in BREAKS} == {rule.__name__ for rule in rules.RULES}
    defined = {
        name
        for module in map(importlib.import_module, FILES)
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and name != "check"
    }
    assert defined == {rule.__name__ for rule in rules.RULES}


def test_what_needs_the_algorithms_file_can_be_left_for_later(valid):
    config = changed(valid, {"actor.micro_batch_size": 12})
    assert breaks(step_rules.algorithm_fits, config, 1)
    rules.check(config, 1, algorithm=False)


def test_a_compiler_may_be_named_or_found(valid, monkeypatch):
    compiled = changed(valid, {"actor.compile": True})
    with monkeypatch.context() as patch:
        patch.setattr(node_rules.shutil, "which", lambda name: None)
        patch.delenv("CC", raising=False)
        assert breaks(rules.check, compiled, 1)
        patch.setenv("CC", "/opt/gcc/bin/gcc")
        assert not breaks(rules.check, compiled, 1)
    monkeypatch.setattr(node_rules.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert not breaks(rules.check, compiled, 1)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "ulysses_degree", "cfg_parallel_size"])
def test_an_engine_that_cannot_spread_a_family(valid, monkeypatch, name):
    config = load_config([*NO_PATHS, "rollout=vllm_omni", f"rollout.{name}=2"]).config
    engine_rules.vllm_omni_engine_is_possible(config, 2)
    spec = replace(engine_rules.find_spec(config.model.family), engine_parallel=())
    monkeypatch.setattr(engine_rules, "find_spec", lambda family: spec)
    with pytest.raises(ConfigError, match=f"rollout.{name}=2 must be 1: the engine cannot spread Qwen-Image"):
        engine_rules.vllm_omni_engine_is_possible(config, 2)


def test_suggested_micro_batch_is_accepted(valid):
    with pytest.raises(ConfigError) as error:
        rules.check(changed(valid, {"actor.micro_batch_size": 12}), 1)  # of 32 samples
    (suggested,) = re.findall(r"such as (\d+)", str(error.value))
    assert not breaks(rules.check, changed(valid, {"actor.micro_batch_size": int(suggested)}), 1)


@pytest.mark.parametrize(
    "file", ["adapter_model.safetensors", "pytorch_lora_weights.safetensors", "mine.safetensors"]
)
@pytest.mark.parametrize(("rank", "fits"), [(64, True), (8, False)])
def test_an_adapter_of_another_rank_is_refused(valid, tmp_path, file, rank, fits):
    """Whatever its alpha: the adapter is scaled to the recipe's. A file alone has the recipe's own."""
    tensors = {"to_q.lora_A.weight": np.zeros((rank, 3)), "to_q.lora_B.weight": np.zeros((5, rank))}
    save_file(tensors, tmp_path / file)
    adapter = tmp_path / file
    if file == "adapter_model.safetensors":
        adapter = tmp_path
        settings = {"r": rank, "lora_alpha": 7, "target_modules": ["to_q"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    config = changed(valid, {"init_adapter": str(adapter), "actor.lora.rank": 64, "actor.lora.alpha": 128})
    assert breaks(node_rules.init_adapter_fits, config, 1) != fits


@pytest.mark.parametrize("damage", ["torn", "no settings", "torn settings", "other tensors", "folder"])
def test_an_adapter_that_cannot_be_read_is_refused_before_weights_load(valid, tmp_path, damage):
    save_file({"to_q.lora_A.weight": np.zeros((4, 3))}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4, "target_modules": ["to_q"]}')
    if damage == "torn":
        (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    elif damage == "other tensors":
        save_file({"to_q.alpha": np.zeros(1)}, tmp_path / "adapter_model.safetensors")
    elif damage == "folder":
        (tmp_path / "adapter_config.json").unlink()
        (tmp_path / "adapter_config.json").mkdir()
    elif damage == "torn settings":
        (tmp_path / "adapter_config.json").write_text('{"r": 4')
    else:
        (tmp_path / "adapter_config.json").unlink()
    config = changed(valid, {"init_adapter": str(tmp_path), "actor.lora.rank": 4})
    with pytest.raises(ConfigError, match=f"init_adapter={tmp_path}: .*adapter_model.safetensors"):
        node_rules.init_adapter_fits(config, 1)


def taught(valid, teacher: Path, **changes):
    config = changed(valid, {"actor.lora.rank": 4} | changes)
    config.algorithm = DiffusionOPDConfig(teacher=str(teacher))
    return config


def test_a_teacher_is_an_adapter_of_the_same_rank_or_a_checkpoint_of_the_family(valid, tmp_path):
    tensors = {"to_q.lora_A.weight": np.zeros((8, 3)), "to_q.lora_B.weight": np.zeros((5, 8))}
    save_file(tensors, tmp_path / "adapter.safetensors")
    write_descriptions(tmp_path / "checkpoint")
    write_descriptions(tmp_path / "other", guidance_embeds=True)
    for teacher, changes, said in (
        ("nothing", {}, "algorithm.teacher=.*nothing is not an adapter"),
        ("adapter.safetensors", {}, "algorithm.teacher=.* has rank 8, and actor.lora.rank=4"),
        ("adapter.safetensors", {"actor.train": "full"}, "is an adapter, and actor.train=full has none"),
        ("other", {}, "is not a checkpoint of model.family=qwen_image: .*guidance_embeds"),
    ):
        with pytest.raises(ConfigError, match=said):
            node_rules.given_policies_fit(taught(valid, tmp_path / teacher, **changes), 1)
    node_rules.given_policies_fit(taught(valid, tmp_path / "checkpoint", **{"actor.train": "full"}), 1)
    fitting = taught(valid, tmp_path / "adapter.safetensors", **{"actor.lora.rank": 8})
    node_rules.given_policies_fit(fitting, 1)
    assert (
        rules.given_policies_fit in rules.ALGORITHM_RULES and rules.given_policies_fit in rules.TRAINING_RULES
    )


def test_a_run_in_the_folder_of_its_model_is_refused(valid):
    with pytest.raises(ConfigError, match="run_dir=.* holds a model: a run needs a folder of its own"):
        rules.check(changed(valid, {"run_dir": valid.model.path}), 1)


def test_a_tracker_that_is_missing_names_its_extra(valid, monkeypatch):
    monkeypatch.setattr(node_rules, "is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed; pip install '.\[tensorboard\]'"):
        rules.check(changed(valid, {"logging.trackers": ["tensorboard"]}), 1)
    assert not breaks(rules.check, changed(valid, {"logging.trackers": []}), 1)


def test_what_only_training_needs_does_not_stop_an_evaluation(valid):
    """3 ranks do not divide the step's prompts, nor 12 its samples; an evaluation deals out its own."""
    config = changed(
        valid, {"actor.micro_batch_size": 12, "evaluation.every": 1, "evaluation.num_prompts": 3}
    )
    assert breaks(step_rules.layout_is_possible, config, 3)
    rules.check(config, 3, trains=False)
    compiled = changed(config, {"rollout.engine": "vllm_omni", "rollout.compile": True})
    assert breaks(
        lambda *args: rules.check(*args, trains=False), compiled, 3
    )  # the engine compiles then, too


def test_a_plan_needs_no_package_of_a_reward(monkeypatch):
    monkeypatch.setattr(node_rules, "is_installed", lambda name: False)
    config = load_config(["recipe=flowgrpo_tiny", "reward=ocr", *NO_PATHS]).config
    assert breaks(node_rules.reward_packages_are_installed, config, 1)
    assert not breaks(partial(rules.check, files=False), config, 2)
