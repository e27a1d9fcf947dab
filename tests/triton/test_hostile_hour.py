"""Test that healthy requests keep their answers and latency while clients attack the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.hostile_hour import hostile_hour

MAX_MORE_DESCRIPTORS = 16  # Of processes that decode images, or of a folder that is being read.


@pytest.mark.alone
def test_healthy_requests_keep_their_answers_under_attack(
    checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    """A slice of `python -m tests.programs.hostile_hour`.

    It has too few requests for the 99th percentile, which the whole run reports.
    """
    limits = {"max_decode_seconds": 2.0}
    with hostile_hour(checkpoint, adapters_dir, tmp_path, limits=limits) as hour:
        figures = hour.run(cycles=3, seconds=3)
    print(figures.summary())
    assert figures.quiet.wrong == figures.hostile.wrong == []
    faults = [name for name in figures.outcomes if "uncoded" in name or "INTERNAL" in name]
    assert faults == []
    assert figures.ratio(50) <= 2
    assert figures.outcomes["exchanged answered"]
    for model, counts in figures.descriptors.items():
        assert max(counts) <= counts[0] + MAX_MORE_DESCRIPTORS, (model, counts)
