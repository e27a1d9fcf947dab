"""The fixture that runs a test with each implementation of the step's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.atmm_problems import FORCED, isas
from vlora.atmm import tiles
from vlora.backends import Backend


@pytest.fixture(params=[*([] if FORCED else ["reference"]), *isas()])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Yield the backend of each implementation, and use its instruction set meanwhile."""
    if request.param == "reference":
        yield "reference"
        return
    with tiles.isa(request.param):
        yield "cpu"
