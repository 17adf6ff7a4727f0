"""`omnirl-hpc doctor [OVERRIDES]`: is all as a run needs it? Alone: the installation; under srun or torchrun:
the nodes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from omnirl_hpc import __version__, installation
from omnirl_hpc.checks.node_rules import model_is_supported
from omnirl_hpc.checks.rules import check
from omnirl_hpc.config.load import load_config
from omnirl_hpc.errors import PreflightError
from omnirl_hpc.launch.identity import find_identity
from omnirl_hpc.launch.reporting import rank_0_reports_first
from omnirl_hpc.launch.runtime import prepare_process
from omnirl_hpc.rollout.vllm_omni import versions

USAGE = """usage: omnirl-hpc doctor [KEY=VALUE …]

Alone, it says what is installed and whether it goes together. Started as a run is started, with the run's \
settings, it tests
the nodes for that run in seconds; `train` does the same by itself before it loads weights:

  srun omnirl-hpc doctor recipe=NAME run_dir=DIR model.path=DIR data.prompts=FILE [KEY=VALUE …]
  torchrun --nproc-per-node 4 -m omnirl_hpc doctor …

What is not given is not checked. Ranks that do not arrive within 60 s are named \
(timeout_seconds=… for another time).
Exit code 0: all is well, or there are warnings; 1: a check failed; 2: a setting is wrong.
"""

# Settings without a default, which a preflight by hand may leave out (preflight.facts.NOT_GIVEN), and a
# shorter deadline.
DEFAULTS = ("run_dir=-", "model.path=-", "data.prompts=-", "timeout_seconds=60")

# vllm-omni -> the versions that it was released with (its metadata, and the sets in constraints/ that install
# together)
GOES_WITH = {
    (0, 30): {"torch": "2.13", "diffusers": "0.40", "transformers": "5.1", "accelerate": "1.12"},
    (0, 26): {"torch": "2.11", "diffusers": "0.38"},
}


def run(arguments: Sequence[str]) -> None:
    """Print what is installed and what the checks found. Raises PreflightError where a check failed."""
    if "-h" in arguments or "--help" in arguments:
        print(USAGE, end="")
        return
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # nothing is to be saved: end at once, even within a C++ wait
    identity = find_identity()
    with rank_0_reports_first(identity):
        config = load_config([*DEFAULTS, *arguments], unused=("algorithm",)).config
        if "-" not in (config.run_dir, config.model.path, config.data.prompts):
            check(config, identity.world_size, algorithm=False)
        elif config.model.path != "-":
            model_is_supported(config, identity.world_size)
        if identity.rank == 0:
            print_installation()
        if config.rollout.engine == "vllm_omni":
            versions.require()
    with rank_0_reports_first(identity):
        prepare_process(config.threads_per_rank, identity.local_rank)
        config = load_config([*DEFAULTS, *arguments]).config  # plans ask the algorithm, which brings torch
    from omnirl_hpc.checks.preflight.findings import FAILED, SKIPPED
    from omnirl_hpc.checks.preflight.network import SIZES
    from omnirl_hpc.checks.preflight.preflight import checked_process_group
    from omnirl_hpc.launch.groups import pick_device

    with rank_0_reports_first(identity):
        try:
            with checked_process_group(config, identity, pick_device(identity), SIZES) as findings:
                pass
        except PreflightError as error:
            findings = error.findings
        if identity.rank == 0:
            for finding in findings:
                print(f"{finding.level:<9}{finding.check:<13}{finding.text}", flush=True)
        done = [finding for finding in findings if finding.level != SKIPPED]
        if failed := sum(finding.level == FAILED for finding in done):
            raise PreflightError(f"{failed} of {len(done)} checks failed")


def print_installation() -> None:
    installed = installation.packages()
    print(f"omnirl_hpc    {__version__}")
    print(f"python        {sys.version.split()[0]}")
    for name, version in installed.items():
        if version or not name.startswith("vllm"):
            print(f"{name:<14}{version or 'missing'}")
    found = versions.installed()
    print(f"engines       diffusers: ready; {describe_vllm_omni(found)}")
    for warning in warnings(installed, found):
        print(f"warning       {warning}")
    print()


def describe_vllm_omni(found: versions.Versions) -> str:
    if found.vllm is None and found.vllm_omni is None:
        return f"vllm_omni: not installed ({versions.INSTALL})"
    return f"vllm_omni: {found.problem() or f'ready ({found})'}"


def warnings(installed: dict[str, str | None], found: versions.Versions) -> list[str]:
    """Packages of another version than vllm-omni was released with. They may work; nobody has tried."""
    if found.vllm_omni is None or found.problem():
        return []
    expected = GOES_WITH.get(versions.minor(found.vllm_omni), {})
    return [
        f"vllm-omni {found.vllm_omni} was released with {name} {prefix}, {installed[name] or 'none'} is "
        "installed"
        for name, prefix in expected.items()
        if not (installed[name] or "").startswith(prefix)
    ]
