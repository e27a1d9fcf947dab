"""Tests of the adapters and prefix benchmarks on small grids."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.adapters.measurement import ManyAdapters, summarize
from benchmarks.adapters.requests import draw_names
from benchmarks.benchmark import GRIDS, load_grid_values
from benchmarks.prefix import Conversations
from benchmarks.prefix import summarize as summarize_rounds
from tests.support.adapters_grid import SMALL_GRID


@pytest.fixture(autouse=True)
def one_thread(_restore_threads: None) -> None:
    torch.set_num_threads(1)


def test_all_requests_are_answered_with_more_adapters_than_fit_and_no_step_reads_a_file(
    checkpoint: Path, tmp_path: Path
) -> None:
    adapters = ManyAdapters(checkpoint, tmp_path, SMALL_GRID)
    results = [
        *adapters.run_registered(),
        *adapters.run_burst(),
        *adapters.run_traces(lambda text: None),
    ]
    assert all(result.outcome.failed == 0 for result in results)
    assert all(result.outcome.disk_steps == 0 for result in results)
    few = next(result for result in results if result.setting == "room for few")
    assert few.figures["loads"] > 0
    assert few.figures["evictions"] > 0
    registered = [result for result in results if result.part == "registered"]
    results += [replace(result, part="resident") for result in registered]
    results += [replace(results[0], part="distinct", figures={"over_predicted": 1.0})]
    assert {
        "registered_2000_vs_5",
        "resident_64_vs_8",
        "overcommit_throughput_ratio",
        "overcommit_limit",
        "steps_that_waited_for_disk",
    } <= set(summarize(results))


def test_later_rounds_about_an_image_compute_few_tokens(checkpoint: Path) -> None:
    grid = {"image_tokens": 64, "question": 8, "output": 8, "rounds": 2, "repeats": 1}
    conversations = Conversations(checkpoint, grid)
    summary = summarize_rounds(conversations.run(0))
    conversations.close()
    assert summary["computed_token_ratio"] < 0.5
    assert summary["second_round_ttft_ratio"] > 0


def test_each_kind_of_trace_has_the_popularity_of_its_name() -> None:
    names = [f"a{i}" for i in range(50)]
    zipf = Counter(draw_names("zipf", names, 2000)).most_common()
    assert zipf[0][1] > 5 * zipf[20][1]
    assert len(Counter(draw_names("uniform", names, 2000))) == 50
    churning = draw_names("churning", names, 400)
    assert len(set(churning[:40])) <= 8
    assert set(churning[:40]) != set(churning[-40:])


@pytest.mark.parametrize("quick", [False, True])
def test_the_grid_has_the_sizes_in_the_names_of_the_summary_keys(quick: bool) -> None:
    grid = load_grid_values(GRIDS / "adapters.json", quick=quick)
    assert grid["registered"] == [5, 2000]
    assert grid["resident"] == [8, 64]
    assert (grid["burst"]["adapters"], grid["burst"]["room"]) == (200, 8)
