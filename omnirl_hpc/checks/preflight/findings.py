"""What the facts of all ranks mean: one function for each check, on plain values. Failures name host, rank
and cure.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnirl_hpc.checks.preflight.facts import NOT_GIVEN, NodeFacts, RankFacts
from omnirl_hpc.checks.preflight.needs import Needs
from omnirl_hpc.config.schema import Config
from omnirl_hpc.launch.rendezvous import numbers

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "FAILED", "-"
MAX_SKEW_SECONDS = 3.0
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    level: str
    check: str
    text: str


def judge(config: Config, ranks: Sequence[RankFacts], needs: Needs | None) -> list[Finding]:
    """All checks that need no collective. `needs` is None where no model is given, or it cannot be read."""
    return [
        check_ranks(ranks),
        *check_devices(ranks),
        *check_packages(ranks),
        *same_on_all_nodes(
            "code",
            ranks,
            lambda r: f"source {_node(r).source}",
            FAILED,
            "install or check out the same omnirl_hpc",
        ),
        *same_on_all_nodes(
            "container",
            ranks,
            lambda r: _node(r).container or "none",
            WARNING,
            "start all ranks in the same image",
        ),
        *check_model(config, ranks),
        *check_run_dir(config, ranks, needs),
        *check_host_memory(config, ranks, needs),
        *check_gpu_memory(ranks, needs),
        *check_clocks(ranks),
        *check_offline(ranks),
    ]


def check_ranks(ranks: Sequence[RankFacts]) -> Finding:
    by_host = _by_host(ranks)
    shown = ", ".join(f"{host} ({numbers(r.rank for r in there)})" for host, there in by_host.items())
    if len({len(there) for there in by_host.values()}) > 1:
        return Finding(WARNING, "ranks", f"not the same number on every node: {shown}")
    return Finding(OK, "ranks", f"{len(ranks)} on {len(by_host)} node(s): {shown}")


def check_devices(ranks: Sequence[RankFacts]) -> list[Finding]:
    failures = []
    with_gpu, without = [r for r in ranks if r.gpu_id], [r for r in ranks if not r.gpu_id]
    if not with_gpu:
        return [Finding(OK, "devices", "no GPU: all ranks run on the CPU")]
    for rank in without:
        failures.append(
            f"{rank} sees no GPU, others do: give every node its GPUs (--gpus-per-node), "
            "and a container --nv or --rocm"
        )
    sharing: dict[tuple[str, str | None], list[int]] = {}
    for rank in with_gpu:
        sharing.setdefault((rank.host, rank.gpu_id), []).append(rank.rank)
    for (host, gpu), several in sharing.items():
        if len(several) > 1:
            failures.append(
                f"ranks {numbers(several)} on {host} share one GPU ({gpu}): start one rank for each GPU "
                "(--ntasks-per-node as --gpus-per-node), and do not set CUDA_VISIBLE_DEVICES"
            )
    names = Counter(rank.gpu_name for rank in with_gpu)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items())
    if failures:
        return [Finding(FAILED, "devices", failure) for failure in failures]
    return [Finding(OK if len(names) == 1 else WARNING, "devices", f"{shown}; one for each rank")]


def check_packages(ranks: Sequence[RankFacts]) -> list[Finding]:
    first, *others = _first_ranks(ranks)
    failures = []
    for rank in others:
        theirs, ours = _node(rank).packages, _node(first).packages
        if different := [name for name in ours if theirs[name] != ours[name]]:
            text = f"{rank} has {_versions(theirs, different)}, {first} has {_versions(ours, different)}"
            failures.append(Finding(FAILED, "packages", f"{text}: install the same versions on every node"))
    torch = f"torch {_node(first).packages['torch']}"
    return failures or [
        Finding(OK, "packages", f"{torch} and all others the same on all nodes" if others else torch)
    ]


def same_on_all_nodes(
    check: str, ranks: Sequence[RankFacts], value: Callable[[RankFacts], str], level: str, cure: str
) -> list[Finding]:
    first, *others = _first_ranks(ranks)
    different = [
        Finding(level, check, f"{rank} has {value(rank)}, {first} has {value(first)}: {cure}")
        for rank in others
        if value(rank) != value(first)
    ]
    return different or [Finding(OK, check, value(first) + (", the same on all nodes" if others else ""))]


def check_model(config: Config, ranks: Sequence[RankFacts]) -> list[Finding]:
    if config.model.path == NOT_GIVEN:
        return [Finding(SKIPPED, "model files", "not checked: add model.path=…")]
    failures = [
        Finding(
            FAILED,
            "model files",
            f"{rank}: {'; '.join(_node(rank).model_problems)}, in model.path={config.model.path}: fetch it "
            "again (omnirl-hpc prefetch)",
        )
        for rank in _first_ranks(ranks)
        if _node(rank).model_problems
    ]
    return failures or [Finding(OK, "model files", f"complete: {config.model.path}")]


def check_run_dir(config: Config, ranks: Sequence[RankFacts], needs: Needs | None) -> list[Finding]:
    if config.run_dir == NOT_GIVEN:
        return [Finding(SKIPPED, "run_dir", "not checked: add run_dir=…")]
    failures = [
        Finding(
            FAILED,
            "run_dir",
            f"{rank}: run_dir={config.run_dir} {rank.run_dir_problem}: it must be one folder on a file "
            "system that all nodes share and may write to (in a container: bound)",
        )
        for rank in ranks
        if rank.run_dir_problem
    ]
    if failures:
        return failures
    free = shutil.disk_usage(Path(config.run_dir)).free
    if needs is not None and free < needs.disk:
        return [
            Finding(
                FAILED,
                "run_dir",
                f"{_gib(free)} are free in run_dir={config.run_dir}, "
                f"checkpoint.keep={config.checkpoint.keep} checkpoints need {_gib(needs.disk)}: make room, "
                "choose another run_dir or a smaller checkpoint.keep",
            )
        ]
    least = f" (at least {_gib(needs.disk)} are needed)" if needs else ""
    return [Finding(OK, "run_dir", f"seen and writable by all ranks, {_gib(free)} free{least}")]


def check_host_memory(config: Config, ranks: Sequence[RankFacts], needs: Needs | None) -> list[Finding]:
    """A cgroup's limit is firm. What the kernel estimates is not: some virtual machines get memory as they
    use it.
    """
    on_host = {host: len(there) for host, there in _by_host(ranks).items()}
    least = {host: needs.host * count if needs else 0 for host, count in on_host.items()}
    findings = []
    for rank in _first_ranks(ranks):
        node, need = _node(rank), least[rank.host]
        there, limit = node.memory_available, node.memory_allowed
        cure = (
            f"{on_host[rank.host]} rank(s) with residency={config.residency} need at least {_gib(need)}: ask "
            "Slurm for more (--mem=0), use fewer ranks on a node, or residency=resident"
        )
        if limit is not None and limit < need:
            findings.append(
                Finding(FAILED, "host memory", f"{rank}: the job may take {_gib(limit)} more, {cure}")
            )
        elif there < need:
            findings.append(Finding(WARNING, "host memory", f"{rank}: {_gib(there)} are free, {cure}"))
    nodes = [_node(rank) for rank in _first_ranks(ranks)]
    free = min(v for node in nodes for v in (node.memory_available, node.memory_allowed) if v is not None)
    where = "the fullest node" if len(on_host) > 1 else "this node"
    at_least = f" (at least {_gib(max(least.values()))} are needed)" if needs and needs.host else ""
    return findings or [Finding(OK, "host memory", f"{_gib(free)} free on {where}{at_least}")]


def check_gpu_memory(ranks: Sequence[RankFacts], needs: Needs | None) -> list[Finding]:
    with_gpu = [rank for rank in ranks if rank.gpu_id]
    if not with_gpu:
        return []
    failures = [
        Finding(
            FAILED,
            "GPU memory",
            f"{rank}: {_gib(rank.gpu_free)} of {_gib(rank.gpu_total)} are free on {rank.device}, at least "
            f"{_gib(needs.gpu)} are needed: end what else runs there (nvidia-smi), "
            "or share the weights among more ranks",
        )
        for rank in with_gpu
        if needs is not None and rank.gpu_free < needs.gpu
    ]
    least = f" (at least {_gib(needs.gpu)} are needed)" if needs else ""
    fullest = min(with_gpu, key=lambda rank: rank.gpu_free)
    text = (
        f"{_gib(fullest.gpu_free)} of {_gib(fullest.gpu_total)} free on the fullest, "
        f"{fullest.device} of {fullest}{least}"
    )
    return failures or [Finding(OK, "GPU memory", text)]


def check_clocks(ranks: Sequence[RankFacts]) -> list[Finding]:
    first, *others = _first_ranks(ranks)
    if not others:
        return []
    skews = [(rank, rank.clock - first.clock) for rank in others]
    warnings = [
        Finding(
            WARNING,
            "clocks",
            f"{rank}'s is {skew:+.0f} s off {first}'s: times in logs mislead, tell the site's admins",
        )
        for rank, skew in skews
        if abs(skew) > MAX_SKEW_SECONDS
    ]
    return warnings or [
        Finding(OK, "clocks", f"within {max(abs(skew) for _, skew in skews):.1f} s of each other")
    ]


def check_offline(ranks: Sequence[RankFacts]) -> list[Finding]:
    online = [str(rank) for rank in _first_ranks(ranks) if not _node(rank).hub_offline]
    if online:
        text = (
            f"{', '.join(online)}: HF_HUB_OFFLINE is not 1: a library that asks a hub would wait for a "
            "network; export it"
        )
        return [Finding(WARNING, "offline", text)]
    return [Finding(OK, "offline", "HF_HUB_OFFLINE=1: no library asks a hub")]


def _by_host(ranks: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    by_host: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank)
    return by_host


def _first_ranks(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """The rank of each node that looked at the node."""
    return [rank for rank in ranks if rank.node is not None]


def _node(rank: RankFacts) -> NodeFacts:
    """What one of the first ranks saw of its node."""
    assert rank.node is not None
    return rank.node


def _versions(packages: dict[str, str | None], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {packages[name]}" if packages[name] else f"no {name}" for name in names)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
