"""Simulated loads of the engine under every policy, with fixed seeds.

VLORA_DRAWN_LOADS=N runs the first N seeds instead. Each seed is one load under each policy.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.baseline_policies import register
from tests.support.drawn_loads import run_loads
from vlora.config import POLICIES

register()

SEEDS = range(int(os.environ.get("VLORA_DRAWN_LOADS", "12")))


def test_batches_are_full_waits_are_bounded_and_no_request_is_lost(
    checkpoint: Path, adapters_dir: Path
) -> None:
    """Draw limits, pools, priorities, deadlines, aborts, streams and hot changes of adapters."""
    folders = {path.name: path for path in adapters_dir.iterdir()}
    tally = run_loads(SEEDS, sorted(POLICIES), checkpoint, folders, print)
    print(tally)
    assert tally.ended["answered"] > tally.requests // 3
    assert min(tally.preemptions, tally.evictions, tally.held_back) > 0
