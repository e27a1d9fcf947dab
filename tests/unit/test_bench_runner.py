"""Tests of the benchmark runner, and of the kernels and switch benchmarks on tiny grids."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from benchmarks import kernels, llava, switch
from benchmarks.frame import (
    GRIDS,
    REGISTRY,
    Benchmark,
    Row,
    command_line,
    is_met,
    load,
    main,
    medians_by,
    run,
)
from benchmarks.lora_operators import KernelCell
from benchmarks.merges import MergeModel
from benchmarks.prefix import Prefix
from vlora.atmm.search.timing import Timing

ROOT = Path(__file__).parents[2]
KEYS = (
    *(
        f"{regime}_vs_{baseline}"
        for regime in ("decode", "prefill")
        for baseline in ("peft_loop", "slice_loop", "einsum", "padded")
    ),
    "adaptive_vs_best_static",
    "worst_cell_vs_best_baseline",
    "roofline_decode_hot",
    "roofline_decode_cold",
    "roofline_prefill",
)
GROUP = {
    "requests": [3],
    "d": [64],
    "rank": [8, "mixed"],
    "popularity": ["zipf"],
    "heat": ["hot", "cold"],
}


def test_the_kernels_benchmark_writes_all_summary_keys_for_both_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COLD_TOTAL_BYTES", 1 << 16)
    grid = tmp_path / "grid.json"
    groups = [
        {**GROUP, "regime": "decode", "rows": [1], "quick": True},
        {**GROUP, "regime": "prefill", "rows": [16], "quick": True},
    ]
    grid.write_text(json.dumps({"groups": groups}))
    out = tmp_path / "figures.json"
    arguments = ["--quick", "--threads", "1", "--grid", str(grid), "--json", str(out)]
    result = CliRunner().invoke(command_line("kernels"), arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert set(written) == {"meta", "rows", "summary"}
    for suffix in ("", "_bf16"):
        assert {key + suffix for key in KEYS} <= set(written["summary"])
    cells = written["rows"]
    assert len(cells) == 16
    assert all({"atmm", "peft_loop", "slice_loop"} <= set(row["us"]) for row in cells)
    assert written["meta"]["limits"]["1 threads"]["peak_gflops"]["fp32"] > 0


def test_the_switch_benchmark_writes_all_summary_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"whole": replace(llava.tiny(llava.Sizes()), layers=2)})
    monkeypatch.setattr(switch, "UNMERGES", 5)
    monkeypatch.setattr(switch, "READ_BYTES", 1 << 20)
    values = json.loads((GRIDS / "switch.json").read_text())
    values["models"] = [
        {
            "name": "small",
            "layers": 2,
            "quick_layers": 2,
            "rank": [4],
            "targets": [[64, 64], [16, 64]],
            "copied": [[16, 64]],
        }
    ]
    values["request"] |= {"context": 20, "quick_rounds": 2}
    values["drift"] |= {"switches": [1, 20], "hidden": 32}
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    grid.write_text(json.dumps(values))
    arguments = ["--quick", "--threads", "1", "--grid", str(grid), "--json", str(out)]
    result = CliRunner().invoke(
        command_line("switch"), [*arguments, "--root", str(tmp_path)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    summary = json.loads(out.read_text())["summary"]
    assert summary["unmerge_us"] > 0
    for suffix in ("", "_bf16"):
        assert summary["merge_vs_limit" + suffix] > 0
        assert 0 < summary["switch_p50_ms" + suffix] <= summary["switch_p99_ms" + suffix]
        assert 0 < summary["in_place_drift" + suffix] < 0.1
    for phase in ("decode", "prefill"):
        for starved in (2, 4, 6):
            assert summary[f"delora_{phase}_{starved}_of_16"] > 0
        assert summary[f"delora_error_{phase}"] >= 0


def test_invalid_lists_of_threads_and_types_are_rejected() -> None:
    for arguments in (["--threads", "0"], ["--threads", "x"], ["--dtypes", "int8"]):
        assert CliRunner().invoke(command_line("kernels"), [*arguments]).exit_code == 2


def test_a_cell_counts_as_slower_only_beyond_the_noise() -> None:
    row = row_of({"atmm": (10.0, 10.0, 10.0), "slice_loop": (9.0, 9.5, 10.0)})
    assert row["fastest_baseline"] == "slice_loop"
    assert row["vs_fastest_baseline"] == pytest.approx(0.95)
    assert row["noise"] == pytest.approx(0.5 / 9.5, abs=1e-4)
    assert not row["slower_than_noise"]
    slower = row_of({"atmm": (10.0, 10.0, 10.0), "slice_loop": (9.0, 9.0, 9.0)})
    assert slower["slower_than_noise"]


def test_the_best_static_tile_is_the_same_for_all_cells() -> None:
    rows = [
        row_of({"atmm": (1.0,), "slice_loop": (2.0,), "static:a": (1.0,), "static:b": (1.5,)}),
        row_of({"atmm": (1.0,), "slice_loop": (2.0,), "static:a": (4.0,), "static:b": (1.5,)}),
    ]
    summary = kernels.summarize(rows)
    assert summary["best_static"] == "b"
    assert summary["adaptive_vs_best_static"] == 1.5
    assert summary["worst_cell_vs_best_baseline"] == 2.0


def test_a_merge_counts_the_bytes_that_it_reads_and_writes() -> None:
    model = MergeModel("m", 2, ((8, 4), (4, 4)), 2, "bf16")
    assert model.elements == 2 * (32 + 16)
    assert model.flops == 2 * 2 * 96
    assert model.moved_bytes == 2 * 2 * 96 + 2 * 2 * (4 * 12 + 4 * 8)
    copied = MergeModel("m", 2, ((8, 4),), 2, "bf16", ((4, 4),))
    assert copied.elements == 2 * (32 + 16)
    assert copied.flops == 2 * 2 * 2 * 32
    assert copied.moved_bytes == 2 * 2 * 96 + 2 * 2 * 4 * 12


def test_the_list_of_benchmarks_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        listed = capsys.readouterr().out
        assert all(f"  {name} " in listed and text in listed for name, text in REGISTRY.items())


def test_each_benchmark_is_registered_under_its_name() -> None:
    assert [load(name).name for name in REGISTRY] == list(REGISTRY)


def test_an_unknown_benchmark_is_rejected_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["kernel"])
    assert ended.value.code == 2
    assert "did you mean 'kernels'?" in capsys.readouterr().err


def test_listing_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from benchmarks.frame import list_of_benchmarks\n"
        "list_of_benchmarks()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@dataclass(kw_only=True)
class CountingBenchmark(Benchmark):
    """Three cells of one row each. The last one is interrupted."""

    name = "counting"
    bars: ClassVar = {"rows": "≥ 3"}

    def cells(self) -> list[int]:
        return [0, 1, 2]

    def measure(self, cell: int) -> Iterator[Row]:
        if cell == 2:
            raise KeyboardInterrupt
        yield {"cell": cell}

    def summarize(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}


def test_an_interrupted_run_reports_and_keeps_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    run(CountingBenchmark(grid=GRIDS / "kernels.json", out=out))
    written = json.loads(out.read_text())
    assert written["rows"] == [{"cell": 0}, {"cell": 1}]
    assert written["summary"] == {"rows": 2}
    output = capsys.readouterr().out
    assert "interrupted after 2 rows" in output
    assert "≥ 3" in output


@dataclass(kw_only=True)
class SavingBenchmark(CountingBenchmark):
    """A benchmark whose second cell checks that the row of the first one has been written."""

    def measure(self, cell: int) -> Iterator[Row]:
        if cell == 1:
            assert self.out is not None
            assert json.loads(self.out.read_text())["rows"] == [{"cell": 0}]
        yield from super().measure(cell)

    def summarize(self) -> dict[str, Any]:
        assert len(self.rows) > 1, "a summary needs the rows of a complete or interrupted run"
        return {"rows": len(self.rows), "missing": math.nan}


def test_a_run_that_is_killed_keeps_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run(SavingBenchmark(grid=GRIDS / "kernels.json", out=out))
    assert json.loads(out.read_text())["summary"] == {"rows": 2, "missing": None}


def test_a_summary_of_rounds_that_were_not_run_has_no_figures() -> None:
    assert all(math.isnan(figure) for figure in Prefix().summarize().values())


@pytest.mark.parametrize(
    ("bar", "below", "equal", "above"),
    [("≥ 3", False, True, True), ("≤ 3", True, True, False), ("< 3", True, False, False)],
)
def test_a_bar_is_met_on_its_side(bar: str, below: bool, equal: bool, above: bool) -> None:
    assert [is_met(bar, value) for value in (2.9, 3, 3.1)] == [below, equal, above]


def test_medians_are_those_of_the_rows_with_equal_keys() -> None:
    rows = [{"kind": kind, "ms": ms} for kind, ms in (("a", 1), ("a", 5), ("a", 2), ("b", 7))]
    assert medians_by(rows, "kind") == [{"ms": 2, "kind": "a"}, {"ms": 7, "kind": "b"}]


def row_of(samples: dict[str, tuple[float, ...]]) -> Row:
    cell = KernelCell("decode", 1, 1, 8, 8, "distinct", False, "fp32")
    timings = {name: Timing(times) for name, times in samples.items()}
    return kernels.row_of(cell, 1, timings, 1.0, {})
