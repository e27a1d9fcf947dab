"""What every test of the operator has: each implementation in turn, and fresh numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.unit.atmm.problems import implementations
from vlora.atmm import backends, tiles


@pytest.fixture(params=implementations())
def backend(request: pytest.FixtureRequest) -> Iterator[backends.Backend]:
    """Every implementation in turn: the reference, and each instruction set of this CPU."""
    if request.param == "reference":
        yield "reference"
        return
    with tiles.isa(request.param):
        yield "cpu"


@pytest.fixture(autouse=True)
def fresh_numbers() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
