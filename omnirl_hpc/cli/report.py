"""`omnirl-hpc report RUN`: a page about a run, from its files alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omnirl_hpc.errors import ConfigError
from omnirl_hpc.report.page import write_report
from omnirl_hpc.report.records import RunRecords


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc report",
        description=(
            "Write one page about a run: curves, samples, choices, how to make the same again. It holds "
            "everything it shows."
        ),
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of RUN/report.html")
    options = parser.parse_args(arguments)
    try:
        print(f"report: {write_report(RunRecords.read(options.run), options.out)}")
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from None
