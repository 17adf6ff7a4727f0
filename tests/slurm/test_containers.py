"""containers/omnirl_cpu.def with the real Apptainer: built without a network, tested by itself, and run by
Slurm on both hosts.

Root in a user namespace is what an unprivileged Apptainer is: a FUSE process beside the ranks mounts the
image. What a site's setuid Apptainer, --nv or --rocm does is not seen here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.runs.program import ROOT, compare, lines
from tests.slurm.apptainer import CACHE, ENVIRON, call
from tests.test_containers import parse

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.apptainer]

DEFINITION = ROOT / "containers/omnirl_cpu.def"
TINY = "sbatch/flowgrpo_tiny.sh"


def contents(definition: Path) -> str:
    """A hash of the definition and of every file that it copies."""
    _, sections = parse(definition)
    sources = [definition, *(ROOT / line.split()[0] for line in sections["files"].strip().splitlines())]
    files = [
        file
        for source in sources
        for file in ([source] if source.is_file() else sorted(source.rglob("*")))
        if file.is_file()
    ]
    whole = hashlib.sha256()
    for file in files:
        if "__pycache__" not in file.parts:
            whole.update(
                f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
            )
    return whole.hexdigest()[:16]


@pytest.fixture(scope="module")
def image() -> Path:
    """The image, built now or before from the same files. A build ends with %test: two steps of training."""
    image = CACHE / f"omnirl_cpu-{contents(DEFINITION)}.sif"
    if not image.exists():
        for old in CACHE.glob("omnirl_cpu-*.sif"):
            old.unlink()
        built = image.with_suffix(".part.sif")
        wheels = ("--bind", f"{CACHE}/wheels:/mnt", "--build-arg", "PIP_ARGS=--no-index --find-links=/mnt")
        rootfs = ("--build-arg", f"ROOTFS={CACHE}/rootfs")
        quickly = ("--mksquashfs-args", "-comp zstd -Xcompression-level 1")  # a third of the build is gzip
        said = call(
            "build", "--force", *quickly, *wheels, *rootfs, str(built), str(DEFINITION), without_network=True
        )
        assert "\nstep    2/2 " in said
        built.rename(image)
    return image


@pytest.fixture
def in_image(cluster, image) -> dict[str, str]:
    """The environment of a job in the image. There is no Python outside that it could take by mistake."""
    return ENVIRON | {"CONTAINER": str(image), "PYTHON": "/nonexistent", "PYTHONPATH": ""}


def test_the_image_says_what_it_is_and_is_complete(image):
    assert "org.opencontainers.image.title: omnirl_hpc (CPU)" in call("inspect", str(image))
    assert "\ntorch         2.13.0" in call("run", str(image), "doctor")
    assert "/opt/venv/lib/" in call(
        "exec", str(image), "python", "-I", "-c", "import omnirl_hpc; print(omnirl_hpc.__file__)"
    )


def test_the_tiny_job_is_the_same_inside_and_outside(cluster, reference, in_image, tmp_path):
    run_dir = tmp_path / "run"
    job = cluster.submit(TINY, run_dir, "checkpoint.every=1", **in_image)
    assert job.wait() == 0, job.output()
    assert ", 2 node(s) hpc[01-02], 4 ranks\n" in job.output()
    code, said = compare(reference, run_dir)
    assert code == 0, said


def test_a_warned_job_saves_and_goes_on(cluster, reference, in_image, tmp_path):
    """The warning reaches the ranks by a file: a signal to the step would take the mounted image away from
    under them.
    """
    run_dir = tmp_path / "run"
    job = cluster.submit(TINY, run_dir, "steps=12", **in_image)
    job.wait_for(run_dir / "metrics.jsonl")
    job.signal("USR1", "--batch")
    assert job.wait() == 0, job.output()
    assert job.show()["Restarts"] == "1", job.output()
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == list(range(12))
