"""Runs that several tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.program import Program

STRICT = ("determinism=strict", "steps=6")


@pytest.fixture(scope="session")
def program(tiny_model, tiny_prompts, tmp_path_factory) -> Program:
    return Program(tiny_model, tiny_prompts, tmp_path_factory.mktemp("output"))


@pytest.fixture(scope="session")
def reference(program, tmp_path_factory) -> Path:
    """Six straight steps on two ranks, every checkpoint kept. Tests look at it and copy it, and never change
    it.
    """
    run_dir = tmp_path_factory.mktemp("runs") / "reference"
    program.finish(run_dir, *STRICT, "checkpoint.every=1", "checkpoint.keep=10")
    return run_dir
