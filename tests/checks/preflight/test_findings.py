"""What the facts of several nodes mean. Facts are made by hand: two nodes with two ranks and two GPUs
each.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from omnirl_hpc.checks.preflight import findings as module
from omnirl_hpc.checks.preflight.facts import NodeFacts, RankFacts
from omnirl_hpc.checks.preflight.findings import FAILED, OK, WARNING, Finding, judge
from omnirl_hpc.checks.preflight.needs import Needs
from omnirl_hpc.config.load import load_config

GIB = 2**30
NODE = NodeFacts({"torch": "2.13.0", "peft": "0.21.2", "vllm": None}, "abc", None, 64 * GIB, None, [], True)


def rank(number: int, **changes: object) -> RankFacts:
    facts = RankFacts(
        rank=number,
        host=f"node{number // 2}",
        device=f"cuda:{number % 2}",
        gpu_name="H200",
        gpu_id=f"GPU-{number % 2}",  # numbers are a node's own here
        gpu_free=130 * GIB,
        gpu_total=140 * GIB,
        clock=1000.0,
        run_dir_problem=None,
        node=NODE if number % 2 == 0 else None,
    )
    return replace(facts, **changes)


RANKS = [rank(i) for i in range(4)]


@pytest.fixture
def verdict(tmp_path):
    """Levels and texts of one check, with some ranks' facts changed."""
    config = load_config([f"run_dir={tmp_path}", "model.path=/the/model", "data.prompts=-"]).config

    def judged(check: str, changed: dict[int, RankFacts], needs: Needs | None = None) -> list[Finding]:
        found = judge(config, [changed.get(i, r) for i, r in enumerate(RANKS)], needs)
        assert all(f.level == OK for f in found if f.check != check), found  # each fault is one check's
        return [f for f in found if f.check == check]

    return judged


def one_failure(found: list[Finding], *words: str) -> None:
    (finding,) = found
    assert finding.level == FAILED and all(word in finding.text for word in words), finding


def test_all_is_well(verdict):
    assert verdict("ranks", {}) == [Finding(OK, "ranks", "4 on 2 node(s): node0 (0-1), node1 (2-3)")]
    assert verdict("devices", {}) == [Finding(OK, "devices", "4 x H200; one for each rank")]
    assert verdict("clocks", {}) == [Finding(OK, "clocks", "within 0.0 s of each other")]


def test_two_ranks_on_one_gpu(verdict):
    one_failure(
        verdict("devices", {3: rank(3, gpu_id="GPU-0")}),
        "ranks 2-3 on node1 share one GPU (GPU-0)",
        "one rank for each GPU",
    )


def test_a_rank_without_a_gpu_among_others(verdict):
    lost = rank(3, device="cpu", gpu_id=None, gpu_name=None, gpu_free=0, gpu_total=0)
    one_failure(verdict("devices", {3: lost}), "rank 3 on node1 sees no GPU, others do", "--nv")


def test_other_gpus_and_uneven_nodes_are_warnings(verdict):
    (mixed,) = verdict("devices", {3: rank(3, gpu_name="A100")})
    assert mixed.level == WARNING and "3 x H200, 1 x A100" in mixed.text
    (uneven,) = verdict("ranks", {1: rank(1, host="node1", gpu_id="GPU-7")})
    assert uneven.level == WARNING and "node0 (0), node1 (1-3)" in uneven.text


def test_other_packages_on_a_node(verdict):
    other = replace(NODE, packages={"torch": "2.11.0", "peft": "0.21.2", "vllm": "0.30.0"})
    expected = (
        "rank 2 on node1 has torch 2.11.0, vllm 0.30.0, rank 0 on node0 has torch 2.13.0, no vllm: "
        "install the same"
    )
    one_failure(verdict("packages", {2: rank(2, node=other)}), expected)


def test_other_code_on_a_node(verdict):
    found = verdict("code", {2: rank(2, node=replace(NODE, source="def"))})
    one_failure(found, "rank 2 on node1 has source def, rank 0 on node0 has source abc")


def test_another_container_on_a_node_is_a_warning(verdict):
    (found,) = verdict("container", {2: rank(2, node=replace(NODE, container="apptainer a.sif"))})
    assert (
        found.level == WARNING
        and "rank 2 on node1 has apptainer a.sif, rank 0 on node0 has none" in found.text
    )


def test_an_incomplete_model_on_a_node(verdict):
    found = verdict(
        "model files", {2: rank(2, node=replace(NODE, model_problems=["vae/ is missing or empty"]))}
    )
    one_failure(
        found, "rank 2 on node1: vae/ is missing or empty, in model.path=/the/model", "omnirl-hpc prefetch"
    )


def test_a_run_dir_that_is_not_shared(verdict):
    one_failure(
        verdict("run_dir", {3: rank(3, run_dir_problem="does not exist there")}),
        "rank 3 on node1: run_dir=",
        "does not exist",
    )


def test_a_disk_that_is_full(verdict, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    found = verdict("run_dir", {}, Needs(gpu=0, host=0, disk=3 * GIB))
    one_failure(found, "1.0 GiB are free in run_dir=", "need 3.0 GiB", "smaller checkpoint.keep")
    assert verdict("run_dir", {}, Needs(gpu=0, host=0, disk=GIB))[0].level == OK


def test_host_memory_is_counted_by_node(verdict):
    """Two ranks of a node need 2 x 30 GiB: 64 are enough, 50 are not."""
    needs = Needs(gpu=0, host=30 * GIB, disk=0)
    assert (
        verdict("host memory", {}, needs)[0].text
        == "64.0 GiB free on the fullest node (at least 60.0 GiB are needed)"
    )
    short = (
        "rank 2 on node1: the job may take 50.0 GiB more, 2 rank(s) with residency=swap "
        "need at least 60.0 GiB"
    )
    limited = replace(NODE, memory_allowed=50 * GIB)
    one_failure(verdict("host memory", {2: rank(2, node=limited)}, needs), short, "residency=resident")
    (estimate,) = verdict("host memory", {2: rank(2, node=replace(NODE, memory_available=50 * GIB))}, needs)
    assert estimate.level == WARNING and estimate.text.startswith(
        "rank 2 on node1: 50.0 GiB are free, 2 rank(s)"
    )


def test_a_gpu_that_is_in_use(verdict):
    needs = Needs(gpu=40 * GIB, host=0, disk=0)
    one_failure(
        verdict("GPU memory", {1: rank(1, gpu_free=10 * GIB)}, needs),
        "rank 1 on node0: 10.0 GiB of 140.0 GiB are free on cuda:1",
    )


def test_clocks_are_a_warning_with_the_direction(verdict):
    (found,) = verdict("clocks", {2: rank(2, clock=990.0)})
    assert found.level == WARNING and found.text.startswith(
        "rank 2 on node1's is -10 s off rank 0 on node0's"
    )


def test_a_library_that_may_ask_the_hub(verdict):
    (found,) = verdict("offline", {2: rank(2, node=replace(NODE, hub_offline=False))})
    assert found.level == WARNING and found.text.startswith("rank 2 on node1: HF_HUB_OFFLINE is not 1")
