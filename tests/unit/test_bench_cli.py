"""The bench commands: a tiny grid through the whole path, to the JSON that others read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.cli import bench_app
from benchmarks.kernels import measurement as kernels
from benchmarks.kernels.cells import GRIDS, Cell
from benchmarks.kernels.measurement import Result
from benchmarks.roofline import Limits
from benchmarks.switch import delora_work as mixture
from benchmarks.switch import merges as switch
from benchmarks.switch import mode_changes as modes
from benchmarks.switch.merges import Model
from benchmarks.timing import Timing

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


def test_kernels_writes_the_keys_of_the_issue_for_both_types(
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
    arguments = ["kernels", "--quick", "--threads", "1", "--grid", str(grid), "--json", str(out)]
    done = CliRunner().invoke(bench_app, arguments)
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert set(written) == {"meta", "rows", "summary"}
    for suffix in ("", "_bf16"):
        assert {key + suffix for key in KEYS} <= set(written["summary"])
    cells = [row for row in written["rows"] if "us" in row]
    assert len(cells) == 16
    assert all({"atmm", "peft_loop", "slice_loop"} <= set(row["us"]) for row in cells)
    assert written["meta"]["limits"]["1 threads"]["peak_gflops"]["fp32"] > 0


def test_switch_writes_the_keys_of_the_issue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"whole": replace(llava.tiny(llava.Sizes()), layers=2)})
    monkeypatch.setattr(modes, "UNMERGES", 5)
    monkeypatch.setattr(mixture, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(switch, "READ_BYTES", 1 << 20)
    given = json.loads((GRIDS / "switch.json").read_text())
    given["models"] = [
        {
            "name": "small",
            "layers": 2,
            "quick_layers": 2,
            "rank": [4],
            "targets": [[64, 64], [16, 64]],
            "copied": [[16, 64]],
        }
    ]
    given["request"] |= {"context": 20, "quick_rounds": 2}
    given["drift"] |= {"switches": [1, 20], "hidden": 32}
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    grid.write_text(json.dumps(given))
    arguments = ["switch", "--quick", "--threads", "1", "--grid", str(grid), "--json", str(out)]
    arguments += ["--plot", str(tmp_path)]
    done = CliRunner().invoke(
        bench_app, [*arguments, "--root", str(tmp_path)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    summary = json.loads(out.read_text())["summary"]
    assert 0 < summary["unmerge_us"] < 100
    for suffix in ("", "_bf16"):
        assert summary["merge_vs_limit" + suffix] > 0
        assert 0 < summary["switch_p50_ms" + suffix] <= summary["switch_p99_ms" + suffix]
        assert 0 < summary["in_place_drift" + suffix] < 0.1
    for phase in ("decode", "prefill"):
        for starved in (2, 4, 6):
            assert summary[f"delora_{phase}_{starved}_of_16"] > 0
        assert summary[f"delora_error_{phase}"] >= 0
        assert summary[f"delora_error_{phase}_by_peak"] >= 0
    assert (tmp_path / "figure-20-delora.png").is_file()


def test_what_a_merge_copies_counts_in_its_limit() -> None:
    model = Model("m", 2, ((8, 4),), 2, "bf16", ((4, 4),))
    assert model.elements == 2 * (32 + 16)
    assert model.flops == 2 * 2 * 2 * 32
    assert model.moved_bytes == 2 * 2 * 96 + 2 * 2 * 4 * 12


def test_wrong_lists_are_refused() -> None:
    for arguments in (["--threads", "0"], ["--threads", "x"], ["--dtypes", "int8"]):
        assert CliRunner().invoke(bench_app, ["kernels", *arguments]).exit_code == 2


def test_a_cell_is_slower_only_beyond_the_noise() -> None:
    result = made_up({"atmm": (10.0, 10.0, 10.0), "slice_loop": (9.0, 9.5, 10.0)})
    assert result.fastest == "slice_loop"
    assert result.against_fastest == pytest.approx(0.95)
    assert result.noise == pytest.approx(0.5 / 9.5)
    assert not result.slower
    assert made_up({"atmm": (10.0, 10.0, 10.0), "slice_loop": (9.0, 9.0, 9.0)}).slower


def test_the_best_static_tile_is_one_for_all_cells() -> None:
    results = [
        made_up({"atmm": (1.0,), "slice_loop": (2.0,), "static:a": (1.0,), "static:b": (1.5,)}),
        made_up({"atmm": (1.0,), "slice_loop": (2.0,), "static:a": (4.0,), "static:b": (1.5,)}),
    ]
    summary = kernels.summarize(results)
    assert summary["best_static"] == "b"
    assert summary["adaptive_vs_best_static"] == 1.5
    assert summary["worst_cell_vs_best_baseline"] == 2.0


def test_a_merge_counts_what_it_reads_and_writes() -> None:
    model = Model("m", 2, ((8, 4), (4, 4)), 2, "bf16")
    assert model.elements == 2 * (32 + 16)
    assert model.flops == 2 * 2 * 96
    assert model.moved_bytes == 2 * 2 * 96 + 2 * 2 * (4 * 12 + 4 * 8)


def made_up(samples: dict[str, tuple[float, ...]]) -> Result:
    cell = Cell("decode", 1, 1, 8, 8, "distinct", False, "fp32")
    limits = Limits(lambda dtype, seconds: 1.0, lambda size, seconds: 1.0)
    return Result(cell, 1, limits, {name: Timing(s) for name, s in samples.items()}, {})
