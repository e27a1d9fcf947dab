"""Fixtures for all tests: a tiny untrained checkpoint and random adapters, made once per run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# GPU kernels run on CPU tensors, except for `make gpu`. `triton` reads this when it is first
# imported.
if "VLORA_GPU_TESTS" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrained but complete checkpoint of the demo architecture (seed 0)."""
    from tools.demo.build import build

    return build(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.fixture(scope="session")
def adapters_dir(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one random adapter per entry of `tests.support.make_adapters.SPECS`."""
    from tests.support.make_adapters import make_adapters

    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"))
