"""Fixtures of the tests of the step's kernels: each implementation, and numbers of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.atmm_problems import FORCED, isas
from vlora.atmm import tiles
from vlora.backends import Backend


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same matrices in every run."""
    torch.manual_seed(0)


@pytest.fixture(params=[*([] if FORCED else ["reference"]), *isas()])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Yield the backend of each implementation, and use its instruction set meanwhile."""
    if request.param == "reference":
        yield "reference"
        return
    with tiles.isa(request.param):
        yield "cpu"


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest, _restore_threads: None) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)
