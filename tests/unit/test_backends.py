"""Tests of the choice of implementations for the LoRA operator and the step's kernels."""

from __future__ import annotations

import pytest
import torch

from tests.support.atmm_problems import check, group_of
from vlora import backends, native
from vlora.atmm.types import Segment
from vlora.backends import Component, backend_of

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
        pytest.raises(ValueError, match=f"{variable}=gpu; it must be 'cpu' or 'reference'"),
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


def test_an_override_ends_with_its_context() -> None:
    before = backend_of("kernels")
    with backends.override("kernels", "reference"):
        assert backend_of("kernels") == "reference"
    assert backend_of("kernels") == before
