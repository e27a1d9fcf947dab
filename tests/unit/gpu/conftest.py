"""Fixtures that run the GPU kernels on CPU tensors with Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.support.atmm_problems import emulation
from vlora import backends
from vlora.atmm.cuda.operator import Operator, using


@pytest.fixture(scope="session")
def _interpreter() -> None:
    """Skip where `triton` is not installed."""
    triton = pytest.importorskip("triton", reason="needs the package 'triton' (extra 'gpu-check')")
    assert triton.knobs.runtime.interpret, "tests/conftest.py sets TRITON_INTERPRET"


@pytest.fixture
def launch(_interpreter: None) -> ModuleType:
    """Return the interpreted kernels of the layers."""
    return importlib.import_module("vlora.kernels.gpu.launch")


@pytest.fixture
def draws(_interpreter: None) -> ModuleType:
    """Return the interpreted kernels that choose tokens."""
    return importlib.import_module("vlora.kernels.gpu.draws")


@pytest.fixture
def cuda_operator() -> Iterator[Operator]:
    """Let the emulated CUDA library serve the LoRA operator; skip where it cannot be built."""
    operator = Operator(emulation(), torch.device("cpu"))
    with backends.override("atmm", "cuda"), using(operator):
        yield operator
        operator.check()
