"""Tests of the adapters and prefix benchmarks on small grids."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.adapters import Adapters, ManyAdapters, summarize
from benchmarks.prefix import Prefix

SMALL_GRID: dict[str, Any] = {
    "rank": 2,
    "prompt": 8,
    "output": 3,
    "sequences": 2,
    "registered": [2, 8],
    "resident": [2, 4],
    "burst": {"adapters": 6, "room": 2, "host": 2, "requests": 12},
    "repeats": 1,
    "rounds": 2,
}


@pytest.fixture(autouse=True)
def one_thread(_restore_threads: None) -> None:
    torch.set_num_threads(1)


def test_all_requests_are_answered_with_more_adapters_than_fit_and_no_step_reads_a_file(
    checkpoint: Path, tmp_path: Path
) -> None:
    adapters = ManyAdapters(checkpoint, tmp_path, SMALL_GRID)
    rows = [*adapters.run_registered(), *adapters.run_burst()]
    assert all(row["failed"] == row["disk_steps"] == 0 for row in rows)
    few = next(row for row in rows if row["setting"] == "room for few")
    assert few["loads"] > 0
    assert few["evictions"] > 0
    rows += [row | {"what": "resident"} for row in rows if row["what"] == "registered"]
    rows += [rows[0] | {"what": "distinct", "over_predicted": 1.0}]
    summary = summarize(rows)
    assert summary["registered_2000_vs_5"] > 0
    assert summary["resident_64_vs_8"] > 0
    assert summary["overcommit_throughput_ratio"] > 0
    assert summary["steps_that_waited_for_disk"] == 0


def test_later_rounds_about_an_image_compute_few_tokens(checkpoint: Path) -> None:
    with closing(Prefix(model=checkpoint)) as benchmark:
        benchmark.prepare()
        benchmark.values = {"image_tokens": 64, "question": 8, "output": 8, "rounds": 2}
        benchmark.values |= {"repeats": 1}
        for seed in benchmark.cells():
            benchmark.rows += benchmark.measure(seed)
        summary = benchmark.summarize()
    assert summary["computed_token_ratio"] < 0.5
    assert summary["second_round_ttft_ratio"] > 0


@pytest.mark.parametrize("quick", [False, True])
def test_the_grid_has_the_sizes_in_the_names_of_the_summary_keys(quick: bool) -> None:
    with closing(Adapters(quick=quick)) as benchmark:
        benchmark.prepare()
        grid = benchmark.values
    assert grid["registered"] == [5, 2000]
    assert grid["resident"] == [8, 64]
    assert (grid["burst"]["adapters"], grid["burst"]["room"]) == (200, 8)
