"""Host memory that this process may still take: of the machine, and of its cgroup, since Slurm gives a job a
part of the node.
"""

from __future__ import annotations

import re
from pathlib import Path

UNLIMITED = 1 << 60  # cgroup v1 says "no limit" by a number of about this size


def available(root: Path = Path("/")) -> int:
    """Bytes that the machine has, as the kernel estimates it. A virtual machine may get more when it asks."""
    meminfo = (root / "proc/meminfo").read_text()
    (kib,) = re.findall(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M)
    return int(kib) * 1024


def allowed(root: Path = Path("/")) -> int | None:
    """Bytes that the cgroups of this process still allow, whose limits are firm; None: there is no limit."""
    return min(_left_in_cgroups(root), default=None)


def _left_in_cgroups(root: Path) -> list[int]:
    """What each limit on the way from this process's cgroup to the top leaves. Page cache counts as free: it
    yields.
    """
    left = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":  # version 1
            top, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            cache = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            if (folder / limit).is_file():  # not in the topmost one, nor where a container shows another tree
                text = (folder / limit).read_text().strip()
                if text != "max" and int(text) < UNLIMITED:
                    reclaimable = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.M)
                    used = int((folder / usage).read_text()) - int(reclaimable[1] if reclaimable else 0)
                    left.append(max(0, int(text) - used))
    return left
