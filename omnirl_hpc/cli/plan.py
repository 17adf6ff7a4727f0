"""`omnirl-hpc plan …`: what a run needs and how long it takes, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omnirl_hpc.checks.levers import changes_that_divide, changes_that_fit, show
from omnirl_hpc.checks.rules import check
from omnirl_hpc.cli.keys import split_keys
from omnirl_hpc.config.load import NO_PATHS, load_config
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import EXIT_FAILED, ConfigError
from omnirl_hpc.layout import Layout, make_layout
from omnirl_hpc.planning.estimate import (
    Estimate,
    estimate,
    find_shape,
    samples_of_rank,
    typical_text_width,
    with_residency,
)
from omnirl_hpc.planning.gpus import GIB, GPUS, Gpu, find_gpu
from omnirl_hpc.planning.residency import SAFE_SHARE, choose_residency
from omnirl_hpc.planning.speed import step_flops, step_seconds

USAGE = """usage: omnirl-hpc plan recipe=NAME [KEY=VALUE …]

Neither a GPU nor a checkpoint is needed; with model.path=DIR the sizes are those of its files. \
Exit code 1: it does not fit.
Keys of the machine, beside the overrides that `train` takes:
"""
RANKS_SHOWN_ONE_BY_ONE = 8
NODES_SHOWN = 16


@dataclass
class Machine:
    """Keys of the command line, with their defaults."""

    nodes: int = 1
    gpus_per_node: int = 4
    gpu: str = "h200"
    host_memory: int = 0  # GiB of a node; 0: not known
    text_tokens: int = (
        0  # the width that prompts are padded to; 0: the first of data.text_lengths from 128 on
    )


def run(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            USAGE
            + "\n".join(f"  {field.name}={field.default}" for field in fields(Machine))
            + f"\nGPUs: {', '.join(GPUS)}"
        )
        return
    machine, overrides = split_keys(arguments, Machine(), may_be_zero=("host_memory", "text_tokens"))
    gpu = find_gpu(machine.gpu)
    config = load_config([*NO_PATHS, *overrides]).config
    world_size = machine.nodes * machine.gpus_per_node
    _check(config, world_size)
    layout = make_layout(config, 0, world_size)
    text_width = _text_width(config, machine.text_tokens)
    config, why = _resolve(config, layout, gpu, text_width)
    needed = estimate(config, layout, text_width)

    console = Console()
    console = (
        console if console.is_terminal else Console(width=150)
    )  # a log is no terminal: rich would guess 80 columns
    console.print(
        f"{find_shape(config).source}; {machine.nodes} x {machine.gpus_per_node} {machine.gpu}; "
        f"{layout.describe()}"
    )
    console.print(f"residency {config.residency}" + (f" (auto: {why})" if why else ""), highlight=False)
    for table in (
        layout_table(config, world_size, machine.gpus_per_node),
        gpu_table(needed, gpu),
        host_table(needed, machine),
        time_table(config, layout, gpu, text_width),
    ):
        table.title_justify = "left"
        console.print(table)
    problems = verdict(config, layout, needed, machine, gpu, text_width)
    for line in problems or ["It fits."]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in hints(config, layout, needed, machine, gpu):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if problems:
        sys.exit(EXIT_FAILED)


def _check(config: Config, world_size: int) -> None:
    """Raises ConfigError as `train` would, with ways out where the step cannot be spread over the ranks."""
    try:
        check(config, world_size, files=False)
    except ConfigError as error:
        ways = " | ".join(show(change) for change in changes_that_divide(config, world_size))
        raise ConfigError(
            f"{error}" + (f". On {world_size} ranks these would do: {ways}" if ways else "")
        ) from None


def _text_width(config: Config, asked: int) -> int:
    if asked and asked not in config.data.text_lengths:
        raise ConfigError(f"text_tokens={asked} is none of data.text_lengths={config.data.text_lengths}")
    return asked or typical_text_width(config)


def _resolve(config: Config, layout: Layout, gpu: Gpu, text_width: int) -> tuple[Config, str]:
    if config.residency != "auto":
        return config, ""
    residency, why = choose_residency(config, layout, gpu.memory, text_width)
    return with_residency(config, residency), why


def layout_table(config: Config, world_size: int, per_node: int) -> Table:
    """A row for each rank of a small job, for each node of a large one."""
    table = Table(
        "node",
        "ranks",
        "rollout replicas",
        "copies of the actor's weights",
        "parts of a copy",
        title="Layout",
    )
    parts = [range(rank, rank + 1) for rank in range(world_size)]
    if world_size > RANKS_SHOWN_ONE_BY_ONE:
        parts = [range(first, first + per_node) for first in range(0, world_size, per_node)]
    for number, ranks in enumerate(parts):
        if len(parts) > NODES_SHOWN and NODES_SHOWN // 2 <= number < len(parts) - 1:
            if number == NODES_SHOWN // 2:
                table.add_row(*["…"] * 5)
            continue
        places = [make_layout(config, rank, world_size) for rank in ranks]
        columns = (
            [rank // per_node for rank in ranks],
            list(ranks),
            [place.replica for place in places],
            [place.rank // place.shard_size for place in places],
            [place.rank % place.shard_size for place in places],
        )
        table.add_row(*(span(column) for column in columns))
    return table


def span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def gpu_table(needed: Estimate, gpu: Gpu) -> Table:
    table = Table("part", "rollout", "actor", title="Memory of a GPU, GiB")
    for name, size in needed.always.items():
        table.add_row(name, gib(size), gib(size))
    for name, size in needed.rollout.items():
        table.add_row(name, gib(size), "")
    for name, size in needed.actor.items():
        table.add_row(name, "", gib(size))
    table.add_section()
    always = sum(needed.always.values())
    table.add_row("all", *(gib(always + sum(side.values())) for side in (needed.rollout, needed.actor)))
    table.add_row("the GPU has", gib(gpu.memory), gib(gpu.memory))
    return _numbers(table)


def host_table(needed: Estimate, machine: Machine) -> Table:
    table = Table(
        "part", "of a rank", f"of a node ({machine.gpus_per_node} rank(s))", title="Host memory and disk, GiB"
    )
    for name, size in needed.host.items():
        table.add_row(name, gib(size), gib(size * machine.gpus_per_node))
    table.add_section()
    table.add_row("all", gib(needed.node_bytes(1)), gib(needed.node_bytes(machine.gpus_per_node)))
    if machine.host_memory:
        table.add_row("the node has", "", f"{machine.host_memory:.1f}")
    table.add_section()
    for name, size in needed.disk.items():
        table.add_row(f"in run_dir: {name}", "", gib(size))
    return _numbers(table)


def time_table(config: Config, layout: Layout, gpu: Gpu, text_width: int) -> Table:
    flops, seconds = step_flops(config, layout, text_width), step_seconds(config, layout, gpu, text_width)
    total, images = sum(seconds.values()), samples_of_rank(config, layout)
    table = Table(
        "phase",
        "TFLOP of a GPU",
        "seconds",
        title=f"A step: {images} images of each GPU, {text_width} text tokens",
    )
    for phase, value in seconds.items():
        table.add_row(phase, number(flops[phase] / 1e12) if phase in flops else "", number(value))
    table.add_section()
    table.add_row("all", number(sum(flops.values()) / 1e12), number(total))
    table.add_row(
        "one forward pass of one image", number(find_shape(config).forward_flops(text_width) / 1e12), ""
    )
    table.add_row("images a second and GPU", "", number(images / total))
    table.add_row(f"hours for {config.steps} steps", "", number(config.steps * total / 3600))
    return _numbers(table)


def verdict(
    config: Config, layout: Layout, needed: Estimate, machine: Machine, gpu: Gpu, text_width: int
) -> list[str]:
    """What does not fit, and what to change; nothing where all fits."""
    problems = []
    if needed.gpu_bytes > gpu.memory:
        change, then = changes_that_fit(config, layout.world_size, text_width, SAFE_SHARE * gpu.memory)
        line = f"It does not fit: a GPU needs {gib(needed.gpu_bytes)} of {gib(gpu.memory)} GiB. "
        if then <= gpu.memory:
            line += f"Change: {show(change)} (then {gib(then)} GiB)"
        else:
            tried = f" even with {show(change)}" if change else ""
            line += (
                f"It needs {gib(then)} GiB{tried}: use more GPUs, a GPU with more memory, or smaller images"
            )
        problems.append(line)
    node = needed.node_bytes(machine.gpus_per_node)
    if machine.host_memory and node > machine.host_memory * GIB:
        resident = estimate(with_residency(config, "resident"), layout, text_width)
        cure = "fewer ranks a node (gpus_per_node=) on more nodes"
        if resident.gpu_bytes <= gpu.memory and resident.node_bytes(machine.gpus_per_node) < node:
            cure = (
                f"residency=resident (then {gib(resident.node_bytes(machine.gpus_per_node))} GiB), or {cure}"
            )
        problems.append(
            f"It does not fit: a node needs {gib(node)} of {machine.host_memory} GiB of host memory. Change: "
            f"{cure}"
        )
    return problems


def hints(config: Config, layout: Layout, needed: Estimate, machine: Machine, gpu: Gpu) -> list[str]:
    lines = []
    if f"model.path={config.model.path}" not in NO_PATHS and not Path(config.model.path).is_dir():
        lines.append(f"model.path={config.model.path} is not here: sizes are those of the published model.")
    if SAFE_SHARE * gpu.memory < needed.gpu_bytes <= gpu.memory:
        lines.append(
            f"It is tight: more than {SAFE_SHARE:.0%} of the GPU, and estimates are good to about a tenth."
        )
    if machine.nodes > 1 and layout.shard_size > machine.gpus_per_node:
        lines.append(
            f"The actor's weights are gathered over {machine.nodes} nodes in every pass, which is not in "
            f"these seconds: actor.shard_size={machine.gpus_per_node} keeps it inside a node."
        )
    if gpu is not find_gpu("h200"):
        lines.append("Seconds: the share of the peak that was measured on H200 is taken for this GPU.")
    if config.actor.dtype == "float32" or config.rollout.dtype == "float32":
        lines.append("Seconds: fp32 is taken to be half as fast as bf16, and is slower.")
    return lines


def gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / GIB:.2g}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _numbers(table: Table) -> Table:
    """Right-justify all columns but the first."""
    for column in table.columns[1:]:
        column.justify = "right"
    return table
