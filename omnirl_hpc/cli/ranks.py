"""What commands that run on several ranks have in common before there is a process group."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import Iterator

from omnirl_hpc.errors import OmniRLError
from omnirl_hpc.launch.identity import Identity

SPEAKING_SECONDS = 2.0


@contextmanager
def rank_0_speaks(identity: Identity) -> Iterator[None]:
    """Every rank checks, and all end with the same exit code where something is wrong; only rank 0 says what."""
    try:
        yield
    except OmniRLError as error:
        if identity.rank == 0:
            raise
        time.sleep(SPEAKING_SECONDS)  # a launcher may end the other ranks as soon as one has ended: rank 0 speaks first
        sys.exit(error.exit_code)
