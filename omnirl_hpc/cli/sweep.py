"""`omnirl-hpc sweep OVERRIDES`: the combinations of a sweep in Hydra's syntax. sbatch/sweep.sh trains one in
each task.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from omnirl_hpc.errors import ConfigError


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc sweep",
        description=(
            "List the combinations of overrides such as seed=0,1 sampling.transition=sde,cps, with numbers."
        ),
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    parser.add_argument(
        "--task", type=int, metavar="N", help="print the overrides of combination N, one a line"
    )
    options = parser.parse_args(arguments)
    found = combinations(options.overrides)
    if options.task is None:
        for number, overrides in enumerate(found):
            print(number, *overrides)
    elif not 0 <= options.task < len(found):
        raise ConfigError(
            f"task {options.task}: the sweep has {len(found)} combinations: "
            f"submit it with --array=0-{len(found) - 1}"
        )
    else:
        print(*found[options.task], sep="\n")


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """All combinations, the last override varying fastest. Raises ConfigError where an override cannot be
    read.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from omnirl_hpc.config.load import explain

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        (batch,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise ConfigError(explain(error)) from None
    return [list(combination) for combination in batch]
