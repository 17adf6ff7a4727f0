"""When the job's time is up, as Slurm knows it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from datetime import datetime

from omnirl_hpc.errors import ConfigError


def job_end_time(environ: Mapping[str, str]) -> float | None:
    """Seconds since the epoch at which Slurm ends this job; None outside of a job, and for a job without a
    limit.

    Raises ConfigError in a job whose end cannot be found out.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if given := environ.get("SLURM_JOB_END_TIME"):  # newer Slurm sets it, and sbatch/common.sh for older ones
        return float(given)
    try:
        shown = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"stop_before needs the end of job {job}, and scontrol did not say it ({error}): export "
            "SLURM_JOB_END_TIME (seconds "
            "since the epoch) in the job script, or set stop_before=0"
        ) from None
    # The number of an array's task can be the array's own, for which all tasks are shown, one a line.
    own = next((line for line in shown.splitlines() if line.startswith(f"JobId={job} ")), "")
    found = re.search(
        r"\bEndTime=(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2})", own
    )  # local time; Unknown: no limit
    return datetime.fromisoformat(found[1]).timestamp() if found else None
