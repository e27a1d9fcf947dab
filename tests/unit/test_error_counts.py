"""Tests of the counts of the errors that a process sends."""

from __future__ import annotations

from tests.support.fakes import FakeRegistry
from vlora.errors import BY_CODE, Internal, NotFound
from vlora.serving.metrics import ErrorCounts, ErrorExporter


def test_each_code_is_exported_from_the_start() -> None:
    registry = FakeRegistry()
    counts = ErrorCounts()
    exporter = ErrorExporter(registry, {"model": "lmm"}, counts)
    series = {dict(labels)["code"]: metric for (_, labels), metric in registry.metrics.items()}
    assert set(series) == set(BY_CODE)
    for error in (NotFound("a"), NotFound("b"), Internal("c")):
        counts.add(error)
    exporter.flush()
    exporter.flush()
    assert series["NOT_FOUND"].value == 2
    assert series["INTERNAL"].value == 1
    assert series["CANCELLED"].value == 0
