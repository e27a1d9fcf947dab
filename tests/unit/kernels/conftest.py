"""The fixture that runs a test with each implementation of the step's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlora import native
from vlora.atmm import tiles
from vlora.backends import Backend


def implementations() -> list[str]:
    """Return the names of the implementations: the reference in plain torch, every instruction set
    of this CPU, sorted by name, and "twin", a plain C++ version of AMX.
    """
    try:
        return ["reference", *sorted(native.kernels().runtime.isas()), "twin"]
    except ImportError:
        return ["reference"]


@pytest.fixture(params=implementations())
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Yield the backend of each implementation, and use its instruction set meanwhile."""
    if request.param == "reference":
        yield "reference"
        return
    with tiles.isa(request.param):
        yield "cpu"
