"""Tests of the choice of implementations for the LoRA operator and the step's kernels."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.support.atmm_problems import check, group_of
from vlora import backends, native
from vlora.atmm.types import Segment
from vlora.backends import Component, backend_of
from vlora.config import Options
from vlora.device.cuda import CudaDevice
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument

COMPONENTS: list[Component] = ["atmm", "kernels"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_environment_names_the_backend(
    component: Component, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable = backends.VARIABLES[component]
    caplog.set_level("INFO")
    monkeypatch.setenv(variable, "reference")
    with backends.override(component, None):
        assert backend_of(component) == "reference"
        assert variable in caplog.text
    monkeypatch.setenv(variable, "gpu")
    with (
        backends.override(component, None),
        pytest.raises(InvalidArgument, match=f"{variable}='gpu'; it must be 'cpu' or 'reference'"),
    ):
        backend_of(component)


@pytest.mark.parametrize("component", COMPONENTS)
def test_without_the_core_the_reference_serves_with_one_warning(
    component: Component, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ImportError("not built")

    monkeypatch.delenv(backends.VARIABLES[component], raising=False)
    monkeypatch.setattr(native, "kernels", missing)
    with backends.override("atmm", "reference"), backends.override(component, None):
        assert backend_of(component) == backend_of(component) == "reference"
        assert len(caplog.records) == 1
        assert "not built" in caplog.text
        group = group_of(16, [8], [4])
        check(torch.zeros(3, 8), torch.randn(3, 16), [Segment(0, 3, 0)], group, "reference")


def test_a_gpu_has_its_own_kernels_and_the_cuda_library_if_it_can_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.delenv("VLORA_ATMM", raising=False)
    monkeypatch.setenv("VLORA_KERNELS", "reference")
    caplog.set_level("INFO")
    start = Mock()
    assert backend_of("kernels", "cuda") == "gpu"
    assert "kernels: for the GPU" in caplog.text
    assert backend_of("atmm", "cuda", start) == backend_of("atmm", "cuda", start) == "cuda"
    start.assert_called_once_with()
    for error in (ImportError("not built"), OSError("no libcuda"), RuntimeError("wrong version")):
        caplog.clear()
        monkeypatch.setattr(backends, "_chosen", {})
        assert backend_of("atmm", "cuda", Mock(side_effect=error)) == "reference"
        (record,) = caplog.records
        assert str(error) in record.getMessage()


def test_a_gpu_uses_the_reference_but_not_the_cpus_operator_if_the_environment_says_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled operator would read addresses of a GPU's memory."""
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setenv("VLORA_ATMM", "reference")
    start = Mock()
    assert backend_of("atmm", "cuda", start) == "reference"
    start.assert_not_called()
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setenv("VLORA_ATMM", "cpu")
    gpu = Mock(CudaDevice, torch_device=torch.device("cuda"))
    monkeypatch.setattr("vlora.engine.parts.engine_device", lambda *args, **options: gpu)
    with pytest.raises(InvalidArgument, match="VLORA_ATMM=cpu, but its kernels cannot read"):
        Engine(Options(model=checkpoint, device="cuda"))


def test_an_override_ends_with_its_context() -> None:
    before = backend_of("kernels")
    with backends.override("kernels", "reference"):
        assert backend_of("kernels") == "reference"
    assert backend_of("kernels") == before
