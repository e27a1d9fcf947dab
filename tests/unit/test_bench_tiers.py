"""`vlora bench adapters` and `prefix`, small: their keys, and what must hold anywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import prefix
from benchmarks.adapters.measurement import Bench, draw, load_grid, summarize
from benchmarks.kernels.cells import GRIDS

GRID = {
    "rank": 2,
    "prompt": 8,
    "output": 3,
    "sequences": 2,
    "registered": [2, 8],
    "resident": [2, 4],
    "burst": {"adapters": 6, "room": 2, "host": 2, "requests": 12},
    "traces": {"registered": 4, "requests": 8, "room": [2], "host": 3, "kinds": ["zipf"]},
    "repeats": 1,
    "rounds": 2,
}


@pytest.fixture(autouse=True)
def one_thread(_threads_put_back: None) -> None:
    torch.set_num_threads(1)


def test_more_adapters_than_fit_are_answered_and_no_step_reads_a_file(
    checkpoint: Path, tmp_path: Path
) -> None:
    bench = Bench(checkpoint, tmp_path, GRID)
    rows = [*bench.registered(), *bench.burst(), *bench.traces(lambda what: None)]
    assert all(row.outcome.failed == 0 for row in rows)
    assert all(row.outcome.disk_steps == 0 for row in rows)
    few = next(row for row in rows if row.setting == "room for few")
    assert few.more["loads"] > 0
    assert few.more["evictions"] > 0
    resident = [row for row in rows if row.what == "registered"]
    rows += [type(row)("resident", row.setting, row.outcome, row.more) for row in resident]
    rows += [type(rows[0])("distinct", "1", rows[0].outcome, {"over_predicted": 1.0})]
    assert {
        "registered_2000_vs_5",
        "resident_64_vs_8",
        "overcommit_throughput_ratio",
        "overcommit_limit",
        "steps_that_waited_for_disk",
    } <= set(summarize(rows))


def test_later_rounds_on_an_image_compute_little(checkpoint: Path) -> None:
    grid = {"image_tokens": 64, "question": 8, "output": 8, "rounds": 2, "repeats": 1}
    summary = prefix.summarize(prefix.run(checkpoint, grid))
    assert summary["computed_token_ratio"] < 0.5
    assert summary["second_round_ttft_ratio"] > 0


def test_traces_ask_as_their_names_say() -> None:
    names = [f"a{i}" for i in range(50)]
    zipf = Counter(draw("zipf", names, 2000)).most_common()
    assert zipf[0][1] > 5 * zipf[20][1]
    assert len(Counter(draw("uniform", names, 2000))) == 50
    churning = draw("churning", names, 400)
    assert len(set(churning[:40])) <= 8
    assert set(churning[:40]) != set(churning[-40:])


@pytest.mark.parametrize("quick", [False, True])
def test_the_grids_have_what_is_asked_of_them(quick: bool) -> None:
    grid = load_grid(GRIDS / "adapters.json", quick=quick)
    assert grid["registered"] == [5, 2000]
    assert grid["resident"] == [8, 64]
    assert (grid["burst"]["adapters"], grid["burst"]["room"]) == (200, 8)
