"""Fixtures that run the GPU kernels: on CPU tensors with Triton's interpreter, or on a GPU."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.atmm_problems import emulation
from tests.support.device_tensors import DEVICE
from tests.support.gpu_kernels import ON_GPU
from vlora import backends
from vlora.atmm.cuda.operator import Operator, using


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of infinities by numpy, in which kernels are interpreted; a GPU has none."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Make random tensors repeatable."""
    torch.manual_seed(0)


@pytest.fixture
def _kernel_device() -> Iterator[None]:
    """Skip where `triton` is not installed. If the kernels run on a GPU, create tensors there."""
    triton = pytest.importorskip("triton", reason="needs the package 'triton' (extra 'gpu-check')")
    assert triton.knobs.runtime.interpret != ON_GPU, "tests/conftest.py sets TRITON_INTERPRET"
    with torch.device("cuda") if ON_GPU else contextlib.nullcontext():
        yield


@pytest.fixture
def launch(_kernel_device: None) -> ModuleType:
    """Return the kernels of the layers."""
    return importlib.import_module("vlora.kernels.gpu.launch")


@pytest.fixture
def draws(_kernel_device: None) -> ModuleType:
    """Return the kernels that choose tokens."""
    return importlib.import_module("vlora.kernels.gpu.draws")


@pytest.fixture
def cuda_operator() -> Iterator[Operator]:
    """Let the emulated CUDA library serve the LoRA operator; skip where it cannot be built."""
    operator = Operator(emulation(), DEVICE)
    with backends.override("atmm", "cuda"), using(operator):
        yield operator
        operator.check()
