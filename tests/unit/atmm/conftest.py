"""Fixtures of the operator's tests: each implementation, and a new random seed for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.atmm_problems import CUDA, EMULATED, implementations
from vlora.atmm import tiles
from vlora.atmm.cuda.operator import using
from vlora.backends import Backend


@pytest.fixture(params=implementations())
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Yield each implementation. For one on a GPU, new tensors are on the GPU by default."""
    if request.param == "reference":
        yield "reference"
    elif request.param == EMULATED:
        with using(request.getfixturevalue("emulated")) as operator:
            yield "cuda"
            operator.check()
    elif request.param == CUDA:
        torch.set_default_device("cuda")
        try:
            yield "cuda"
        finally:
            torch.set_default_device("cpu")
    else:
        with tiles.isa(request.param):
            yield "cpu"


@pytest.fixture(autouse=True)
def fresh_numbers() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
