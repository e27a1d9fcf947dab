"""Each implementation of the step's kernels in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlora import native
from vlora.atmm import tiles
from vlora.backends import Backend


def implementations() -> list[str]:
    """The twins in plain torch, every instruction set of this CPU, and AMX in plain C++."""
    try:
        return ["reference", *native.kernels().runtime.isas(), "twin"]
    except ImportError:
        return ["reference"]


@pytest.fixture(params=implementations())
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "reference":
        yield "reference"
        return
    with tiles.isa(request.param):
        yield "cpu"
