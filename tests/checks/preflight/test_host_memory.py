"""Free memory by /proc and cgroups, from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

from omnirl_hpc.checks.preflight.host_memory import allowed, available

MIB = 2**20


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def machine(cgroup: str) -> dict[str, str]:
    return {
        # 2048 MiB available
        "proc/meminfo": "MemTotal:  4194304 kB\nMemFree:  1024 kB\nMemAvailable:  2097152 kB\n",
        "proc/self/cgroup": cgroup,
    }


def group(folder: str, limit: str, used: int, cache: int) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache * MIB}\n"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used * MIB),
        f"{folder}/memory.stat": stat,
    }


def test_without_limits(tmp_path):
    root = make(tmp_path, machine("0::/\n"))
    assert (available(root), allowed(root)) == (2048 * MIB, None)


def test_the_job_has_less_than_the_node(tmp_path):
    """The step has no limit of its own, the job 1000 MiB, of which 300 are used and 100 of these are
    cache.
    """
    top = "sys/fs/cgroup/slurm/job_7"
    files = (
        machine("0::/slurm/job_7/step_0\n")
        | group(top, f"{1000 * MIB}\n", 300, 100)
        | group(f"{top}/step_0", "max\n", 1, 0)
    )
    assert allowed(make(tmp_path, files)) == 800 * MIB


def test_cgroup_version_1(tmp_path):
    folder = "sys/fs/cgroup/memory/slurm/uid_1/job_7"
    files = machine("11:cpuset:/slurm\n4:memory:/slurm/uid_1/job_7\n0::/\n") | {
        f"{folder}/memory.limit_in_bytes": str(500 * MIB),
        f"{folder}/memory.usage_in_bytes": str(200 * MIB),
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}\n",
        # what version 1 writes for no limit
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert allowed(make(tmp_path, files)) == 350 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    files = machine("0::/job\n") | group("sys/fs/cgroup/job", str(10 * MIB), 20, 0)
    assert allowed(make(tmp_path, files)) == 0


def test_this_machine():
    assert available() > 0 and (allowed() is None or allowed() >= 0)
