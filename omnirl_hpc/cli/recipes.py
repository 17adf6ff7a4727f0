"""`omnirl-hpc recipes`: what there is to start from."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omnirl_hpc.config.classes import config_dir
from omnirl_hpc.config.load import NO_PATHS, load_config
from omnirl_hpc.errors import ConfigError

COLUMNS = ("recipe", "model", "algorithm", "rollout", "actor", "reward", "GPUs", "source of the numbers")


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc recipes", description="List the recipes: omnirl-hpc train recipe=NAME …"
    )
    parser.parse_args(arguments)
    table = Table(*COLUMNS)
    for file in recipe_files():
        try:
            table.add_row(*row(file))
        except (
            ConfigError
        ) as error:  # one that cannot be used here, as where its own classes are not found, hides no other
            table.add_row(file.stem, *[""] * (len(COLUMNS) - 2), str(error))
    console = Console()
    (console if console.is_terminal else Console(width=240)).print(
        table
    )  # a log is no terminal: rich would guess 80 columns


def recipe_files() -> list[Path]:
    return sorted(file for file in (config_dir() / "recipe").glob("*.yaml") if file.stem != "none")


def row(file: Path) -> tuple[str, ...]:
    """The cells of one recipe."""
    config = load_config([*NO_PATHS, f"recipe={file.stem}"], unused=("algorithm",)).config
    facts, adapter = header(file), config.actor.adapter
    return (
        file.stem,
        f"{config.model.family}, {config.model.height} x {config.model.width}",
        config.algorithm.name,
        config.rollout.engine,
        "FSDP2, all weights" if adapter is None else f"FSDP2, LoRA r{adapter.rank}",
        " + ".join(config.reward.parts),
        facts["GPUs"],
        facts["Source"],
    )


def header(file: Path) -> dict[str, str]:
    """What the comments at the top of a recipe say in lines `# GPUs: …` and `# Source: …`; empty where they
    do not.
    """
    return {"GPUs": "", "Source": ""} | dict(
        re.findall(r"^# (GPUs|Source): (.+)$", file.read_text(), re.MULTILINE)
    )
