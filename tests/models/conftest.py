"""Every family, on a tiny checkpoint that is made once."""

from __future__ import annotations

import pytest

from tests.models.families import FAMILIES, FamilyCase


@pytest.fixture(scope="session", params=FAMILIES)
def case(request, tmp_path_factory) -> FamilyCase:
    return FamilyCase.make(request.param, tmp_path_factory.mktemp(request.param) / "tiny")
