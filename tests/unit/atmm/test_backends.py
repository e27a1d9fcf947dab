"""Which implementation serves, and what it keeps of a step."""

from __future__ import annotations

import pytest
import torch

from tests.support.atmm_problems import check, group_of
from vlora import native
from vlora.atmm import backends
from vlora.atmm.types import Segment, Segments


def test_the_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.default.cache_clear()
    try:
        monkeypatch.setenv(backends.VARIABLE, "reference")
        assert backends.default() == "reference"
        backends.default.cache_clear()
        monkeypatch.setenv(backends.VARIABLE, "gpu")
        with pytest.raises(ValueError, match="'cpu' or 'reference'"):
            backends.default()
    finally:
        backends.default.cache_clear()


def test_without_the_core_the_reference_serves_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ImportError("not built")

    monkeypatch.delenv(backends.VARIABLE, raising=False)
    monkeypatch.setattr(native, "kernels", missing)
    backends.default.cache_clear()
    try:
        assert backends.default() == backends.default() == "reference"
        assert len(caplog.records) == 1
        assert "not built" in caplog.text
        group = group_of(16, [8], [4])
        check(torch.zeros(3, 8), torch.randn(3, 16), [Segment(0, 3, 0)], group, "reference")
    finally:
        backends.default.cache_clear()


def test_segments_are_a_tuple_that_keeps_the_cores_copy() -> None:
    segments = Segments([Segment(0, 1, 0)])
    assert segments == (Segment(0, 1, 0),)
    assert Segments.of(segments) is segments
    assert Segments.of([Segment(0, 1, 0)]) == segments
