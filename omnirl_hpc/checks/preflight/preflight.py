"""The checks in order, the same by hand (`doctor`) and before each run (`train`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from omnirl_hpc.checks.preflight.facts import NOT_GIVEN, NodeFacts, RankFacts, make_probe, observe
from omnirl_hpc.checks.preflight.findings import FAILED, Finding, judge
from omnirl_hpc.checks.preflight.model_files import parameter_shapes
from omnirl_hpc.checks.preflight.needs import Needs, least_needs
from omnirl_hpc.checks.preflight.network import measure_all_reduce
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError, PreflightError
from omnirl_hpc.launch.groups import process_group
from omnirl_hpc.launch.identity import Identity
from omnirl_hpc.launch.rendezvous import Rendezvous
from omnirl_hpc.layout import make_layout
from omnirl_hpc.models.spec import find_spec
from omnirl_hpc.planning.estimate import with_residency
from omnirl_hpc.planning.residency import choose_residency

DEADLINE = 0.9  # of the time that collectives have: a sentence must come before torch's own traceback


@contextmanager
def checked_process_group(
    config: Config, identity: Identity, device: torch.device, sizes: Mapping[str, Sequence[int]]
) -> Iterator[list[Finding]]:
    """The default process group, formed after every check has passed; gives what they found.

    sizes: of the all-reduce, by type of device, in bytes. Raises LaunchError where ranks do not come
    together, and PreflightError on every rank where one check fails on any.
    """
    rendezvous = Rendezvous(identity, config.timeout_seconds, f"run_dir={config.run_dir}")
    findings = inspect(config, identity, device, rendezvous)
    if failures := [f"{finding.check}: {finding.text}" for finding in findings if finding.level == FAILED]:
        raise PreflightError(f"preflight: {'; '.join(failures)}", findings)
    with process_group(rendezvous, device):
        deadline = DEADLINE * config.timeout_seconds
        findings.append(measure_all_reduce(identity, device, sizes[device.type], deadline))
        yield findings


def inspect(
    config: Config, identity: Identity, device: torch.device, rendezvous: Rendezvous
) -> list[Finding]:
    """Every rank looks, rank 0 judges; the same findings on all. Before there is a group: a GPU used twice
    would break NCCL.
    """
    probe = rendezvous.share("probe", make_probe(config) if identity.rank == 0 else "")
    facts = asdict(observe(config, identity, device, probe))
    try:
        said = rendezvous.gather("facts", json.dumps(facts))
    finally:
        if identity.rank == 0 and probe:
            (Path(config.run_dir) / probe).unlink()
    found: list[Finding] = []
    if identity.rank == 0:
        ranks = [_rank_facts(text) for text in said]
        found = judge(config, ranks, find_needs(config, ranks))
    shared = rendezvous.share("findings", json.dumps([asdict(finding) for finding in found]))
    rendezvous.gather("heard", "")  # rank 0, which serves the store, must not end before all have read it
    return [Finding(**finding) for finding in json.loads(shared)]


def find_needs(config: Config, ranks: Sequence[RankFacts]) -> Needs | None:
    """None where no model is given, or the one that rank 0 sees is not complete."""
    node = ranks[0].node
    assert node is not None  # the first rank of a node looks at it
    if config.model.path == NOT_GIVEN or node.model_problems:
        return None
    config = with_residency(config, expected_residency(config, ranks))
    spec = find_spec(config.model.family)
    targets = config.actor.lora.target_modules or spec.lora_targets
    shapes = {
        f"{expert}.{name}": shape
        for expert in spec.experts
        for name, shape in parameter_shapes(Path(config.model.path) / expert).items()
    }
    return least_needs(config, shapes, targets, len(ranks))


def expected_residency(config: Config, ranks: Sequence[RankFacts]) -> str:
    """What residency=auto will become on these devices (residency.settle_residency)."""
    if config.residency != "auto":
        return config.residency
    if not all(rank.gpu_id for rank in ranks):
        return "resident"
    try:
        smallest = min(rank.gpu_total for rank in ranks)
        return choose_residency(config, make_layout(config, 0, len(ranks)), smallest)[0]
    except ConfigError:
        return "auto"  # settle_residency will say so, on all ranks; here rank 0 is alone


def _rank_facts(text: str) -> RankFacts:
    values = json.loads(text)
    node = values.pop("node")
    return RankFacts(**values, node=NodeFacts(**node) if node else None)
