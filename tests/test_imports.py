"""Dependencies point downwards (README, The rooms), and what must be fast does not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import omnirl_hpc

PACKAGE = Path(omnirl_hpc.__file__).parent

# Rooms by level, the lowest first: a room may import from its own level and from those below. A new room gets
# its place here.
LEVELS = (
    {"errors", "hashing", "pinned", "determinism", "installation", "policies", "sharded_files"},
    {"config", "layout", "launch", "run_directory"},
    {"models", "sampling", "algorithms", "data"},
    {"metrics", "planning"},
    {"rollout", "actor", "rewards", "sync", "residency"},
    {"sources"},
    {"checkpoints", "evaluation", "checks"},
    {"trainer"},
    {"report"},
    {"cli"},
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in PACKAGE.rglob("*.py")}


def imports(name: str) -> set[str]:
    """Dotted names of everything that a module imports, inside functions too: modules, and modules or objects
    in them.
    """
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import, line {node.lineno}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module(imported: str) -> str | None:
    """The module of this package that `imported` names or lies in."""
    while imported and imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported or None


def room(name: str) -> str:
    return (name.split(".") + [""])[1]


INTERNAL = {name: {module(i) for i in imports(name)} - {None, name} for name in MODULES}
ROOMS = {room(name) for name in MODULES} - {"", "__main__"}


def test_every_room_has_a_level():
    assert ROOMS <= set(LEVEL), f"rooms without a level in LEVELS: {ROOMS - set(LEVEL)}"
    assert {"cli", "trainer", "rollout", "algorithms", "config"} <= ROOMS  # the files were found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_dependencies_point_downwards(name):
    if name == "omnirl_hpc.__main__":
        assert INTERNAL[name] == {"omnirl_hpc.cli.main"}
    elif name == "omnirl_hpc":
        assert INTERNAL[name] == set()
    else:
        upwards = {
            other for other in INTERNAL[name] if room(other) and LEVEL[room(other)] > LEVEL[room(name)]
        }
        assert not upwards


def test_no_module_needs_itself():
    order = list(TopologicalSorter(INTERNAL).static_order())  # raises CycleError naming the modules
    place = {name: i for i, name in enumerate(order)}
    assert all(place[other] < place[name] for name in MODULES for other in INTERNAL[name])


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        ({"algorithms", "sampling"}, {"models", "rollout", "actor"}),  # know no model and no engine
        ({"models"}, {"algorithms"}),
        ({"data"}, {"models", "sampling", "algorithms"}),
        ({"rollout"}, {"actor", "rewards", "sync", "algorithms"}),
        ({"actor"}, {"rollout", "rewards", "sync"}),
        ({"rewards"}, {"rollout", "actor", "sync"}),
    ],
)
def test_rooms_that_do_not_know_each_other(rooms, forbidden):
    for name in MODULES:
        if room(name) in rooms:
            assert not {other for other in INTERNAL[name] if room(other) in forbidden}, name


@pytest.mark.parametrize(
    "name", sorted(name for name in MODULES if room(name) in ("algorithms", "sampling", "models", "data"))
)
def test_no_process_group_below_the_engines(name):
    assert not {i for i in imports(name) if i.startswith("torch.distributed")}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_optional_packages_stay_where_they_belong(name):
    tops = {i.partition(".")[0] for i in imports(name)}
    if not name.startswith("omnirl_hpc.rollout.vllm_omni"):
        # How a family's pipeline is called is the family's business: in a function, once the engine is there.
        of_a_driver = {"vllm_omni"} if name.endswith(".drivers") and room(name) == "models" else set()
        assert not tops & ({"vllm", "vllm_omni"} - of_a_driver)
    if name != "omnirl_hpc.metrics.trackers":
        assert not tops & {"tensorboard", "wandb", "trackio"}
    assert not tops & {"ray", "verl"}


@pytest.mark.parametrize(
    "names",
    [
        ["omnirl_hpc.config.load", "omnirl_hpc.checks.rules", "omnirl_hpc.config.schema"],
        ["omnirl_hpc.launch.identity"],
        ["omnirl_hpc.layout"],
        sorted(name for name in MODULES if room(name) == "planning"),
        sorted(name for name in MODULES if room(name) == "models" and name.endswith((".spec", ".shape"))),
        ["omnirl_hpc.cli.plan", "omnirl_hpc.cli.recipes"],
        [
            "omnirl_hpc.cli.main",
            "omnirl_hpc.cli.train",
            "omnirl_hpc.cli.prompts",
            "omnirl_hpc.cli.tiny_model",
        ],
        ["omnirl_hpc.cli.export", "omnirl_hpc.cli.evaluate", "omnirl_hpc.checkpoints.adapters"],
        ["omnirl_hpc.cli.status", "omnirl_hpc.cli.report", "omnirl_hpc.evaluation.results"],
        ["omnirl_hpc.run_directory", "omnirl_hpc.errors"],
        ["omnirl_hpc.models.spec", "omnirl_hpc.models.qwen_image.spec"],
        # what a reward worker imports
        ["omnirl_hpc.rewards", "omnirl_hpc.rewards.processes", "omnirl_hpc.rewards.threads"],
        sorted(
            name
            for name in MODULES
            if room(name) == "rewards" and not name.endswith((".gather", ".device", ".mix"))
        ),
    ],
    ids=lambda names: names[0],
)
def test_is_imported_without_torch(names):
    program = (
        f"import sys, {', '.join(names)}; "
        "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    environ = {"PYTHONPATH": ":".join([str(PACKAGE.parent), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ
    )
    assert result.stdout.strip() == "[]"
