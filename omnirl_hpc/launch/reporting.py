"""Which rank reports an error that every rank finds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from omnirl_hpc.errors import LaunchError, OmniRLError, PreflightError, ResumeError
from omnirl_hpc.launch.identity import Identity

REPORTING_SECONDS = 2.0


@contextmanager
def rank_0_reports_first(identity: Identity) -> Iterator[None]:
    """Hold an error of another rank back: a launcher may end all ranks as soon as one has ended.

    Who is still there afterwards says it with its name, because then rank 0 did not find it: a file is
    missing on one node only. What ranks found together, rank 0 knows and speaks of for them all.
    """
    try:
        yield
    except LaunchError:
        raise  # names its rank, and is not known to rank 0
    except OmniRLError as error:
        if identity.rank == 0:
            raise
        time.sleep(REPORTING_SECONDS)
        if isinstance(error, (PreflightError, ResumeError)):
            sys.exit(error.exit_code)
        raise type(error)(f"{identity}: {error}") from None
