"""What README and docs/ name exists: links, files, commands, settings; rooms are drawn as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnirl_hpc.cli.main import COMMANDS
from omnirl_hpc.config.load import valid_keys
from tests.test_imports import LEVELS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:omnirl-hpc|-m omnirl_hpc) ([a-z][\w-]*)")
GROUPS = "model|data|sampling|rollout|actor|checkpoint|evaluation|logging"
KEY = re.compile(rf"(?<![\w./-])(?:{GROUPS})\.[a-z]\w*(?:\.[a-z]\w*)*(?![\w/(])")
FILE = re.compile(
    r"(?<![\w./-])(?:omnirl_hpc|tests|configs|sbatch|benchmarks|containers|constraints|docs)/[\w./-]*\w"
)
A_PLACE = re.compile(r"NAME|MODULE")  # stands for a name that the reader chooses

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if not link.startswith("http"):
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                yield link


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= 900


def test_the_readme_leads_to_every_page():
    assert {page for page in PAGES if page.name not in README.read_text()} == {README}


def test_the_drawing_of_rooms_is_that_of_the_code():
    _, _, section = README.read_text().partition("## The rooms")
    drawing = FENCE.search(section)[0].splitlines()[1:-1]
    assert [set(line.split("  ")[0].split()) for line in reversed(drawing)] == list(LEVELS)


@every_page
def test_links_lead_somewhere(page):
    assert list(broken_links(page)) == []


@every_page
def test_commands_exist(page):
    assert set(COMMAND.findall(page.read_text())) <= {*COMMANDS, "help"}


@every_page
def test_settings_exist(page):
    keys = valid_keys()
    named = set(KEY.findall(page.read_text()))
    assert {name for name in named if not any(f"{key}.".startswith(f"{name}.") for key in keys)} == set()


@every_page
def test_files_exist(page):
    named = {name for name in FILE.findall(page.read_text()) if not A_PLACE.search(name)}
    assert {name for name in named if not (ROOT / name).exists()} == set()
