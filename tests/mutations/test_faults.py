"""The list of faults is up to date, and the script that runs it tells what is caught from what is not."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutations import __main__ as script
from tests.mutations.__main__ import ROOT
from tests.mutations.faults import FAULTS, Fault


def test_every_fault_can_still_be_put_in():
    """Where this fails, code that the list knows has changed: write down the same fault in the new code."""
    assert [problem for fault in FAULTS if (problem := fault.problem(ROOT))] == []


def test_no_fault_is_there_twice():
    assert [fault for fault, count in Counter(FAULTS).items() if count > 1] == []


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one function and one test, in place of this one."""
    (tmp_path / "doubling.py").write_text("def double(x):\n    return 2 * x\n\n\nUNUSED = 5\n")
    (tmp_path / "test_doubling.py").write_text(
        "from doubling import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PARTS", ("doubling.py", "test_doubling.py"))

    def run(*faults: Fault) -> int:
        monkeypatch.setattr(script, "FAULTS", faults)
        return script.main([])

    return run


def fault(old: str, new: str) -> Fault:
    return Fault("doubling.py", old, new, "test_doubling.py")


def test_what_is_caught_and_what_is_not(project, capfd, tmp_path):
    caught, missed = fault("2 * x", "3 * x"), fault("UNUSED = 5", "UNUSED = 6")
    assert project(caught) == 0
    assert "1 of 1 faults are caught" in capfd.readouterr().out
    assert project(caught, missed) == 1
    told = capfd.readouterr().out
    assert "\ncaught: doubling.py: 2 * x -> 3 * x" in told and "NOT CAUGHT: doubling.py: UNUSED = 5" in told
    assert "1 of 2 faults are caught" in told
    assert (tmp_path / "doubling.py").read_text().startswith("def double(x):\n    return 2 * x\n")


def test_a_fault_that_no_longer_fits_is_an_error(project, capfd):
    for old, times in (("4 * x", 0), ("x", 2)):
        assert project(fault(old, "y")) == 2
        assert f"doubling.py holds {old!r} {times} times" in capfd.readouterr().out


def test_tests_that_fail_without_a_fault_prove_nothing(project, capfd, tmp_path):
    (tmp_path / "test_doubling.py").write_text("def test_never():\n    assert False\n")
    assert project(fault("2 * x", "3 * x")) == 1
    assert "the tests fail without any fault" in capfd.readouterr().out


def test_a_fault_that_cannot_be_imported_tells_nothing(project, capfd):
    """Nobody leaves such a fault in, and every test would catch it."""
    assert project(fault("def double(x):", "def double(x)")) == 1
    assert "CANNOT TELL" in capfd.readouterr().out
