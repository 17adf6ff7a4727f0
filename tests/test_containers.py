"""The definition files of containers/, as far as they can be judged without Apptainer: sections, arguments,
shell, files.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import omnirl_hpc

ROOT = Path(omnirl_hpc.__file__).parent.parent
FILES = sorted((ROOT / "containers").glob("*.def"))
SECTIONS = {"arguments", "files", "post", "environment", "test", "runscript", "labels", "help"}


def parse(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The header's keys, and the text of each section."""
    header, *parts = re.split(r"^%(\w+)$", file.read_text(), flags=re.MULTILINE)
    keys = dict(line.split(": ", 1) for line in header.splitlines() if line and not line.startswith("#"))
    assert len(set(parts[::2])) == len(parts[::2]), "a section comes twice"
    return keys, dict(zip(parts[::2], parts[1::2]))


def arguments(sections: dict[str, str]) -> dict[str, str]:
    return dict(re.findall(r"^ *(\w+)=(.*)$", sections["arguments"], re.MULTILINE))


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def definition(request):
    return parse(request.param)


def test_there_are_definitions():
    assert [file.stem for file in FILES] == ["omnirl_cpu", "omnirl_cuda"]


def test_header_and_sections(definition):
    keys, sections = definition
    assert keys.keys() == {"Bootstrap", "From"}
    assert sections.keys() == SECTIONS
    if keys["Bootstrap"] == "docker":
        assert re.search(r":\S+$", keys["From"]), "without a tag it is another image every month"


def test_every_argument_has_a_default_and_is_used(definition):
    keys, sections = definition
    text = keys["From"] + "".join(sections.values())
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == arguments(sections).keys()


@pytest.mark.parametrize("section", ["post", "environment", "test", "runscript"])
def test_scripts_are_shell(definition, section):
    _, sections = definition
    script = re.sub(r"\{\{ (\w+) \}\}", lambda match: arguments(sections)[match[1]], sections[section])
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    if section in ("post", "test"):
        assert script.split("\n")[1].strip() == "set -eu"


def test_files_exist(definition):
    _, sections = definition
    for line in sections["files"].strip().splitlines():
        source, target = line.split()
        assert (ROOT / source).exists()
        assert target == f"/opt/omnirl_hpc/{source}"
