"""Tests of the attention benchmark: its arithmetic, and a run of a tiny grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import attention
from benchmarks.frame import GRIDS, command_line
from vlora import native


def _cell(phase: str, rows: int, context: int) -> attention.AttentionCell:
    return attention.AttentionCell(phase, "grouped", 16, 4, 64, 16, rows, context, "bf16")


def test_bytes_and_flops_count_the_pairs_that_the_causal_mask_lets_through() -> None:
    decode = _cell("decode", 3, 10)
    assert decode.kv_bytes == 2 * 3 * 11 * 4 * 64 * 2
    assert decode.flops == 4 * 3 * 11 * 16 * 64
    assert _cell("prefill", 5, 0).flops == 4 * (1 + 2 + 3 + 4 + 5) * 16 * 64
    assert len(_cell("mixed", 5, 7).chunks) == 1 + attention.MIXED_DECODES


def test_the_quick_grid_is_a_part_of_the_full_grid() -> None:
    grid = json.loads((GRIDS / "attention.json").read_text())
    full, quick = (attention.grid_cells(grid, ["fp32"], quick=quick) for quick in (False, True))
    assert set(quick) < set(full)


def test_a_tiny_grid_produces_rows_and_all_summary_keys(tmp_path: Path) -> None:
    try:
        native.kernels()
    except ImportError as error:
        pytest.skip(str(error))
    grid = tmp_path / "tiny.json"
    groups = [
        {"phase": phase, "heads": ["few"], "rows": [3], "contexts": [start], "quick": {}}
        for phase, start in (("decode", 500), ("prefill", 0), ("mixed", 600))
    ]
    sizes = {"heads": {"few": [4, 2]}, "dim": 256, "block": 16}
    grid.write_text(json.dumps(sizes | {"groups": groups}))
    options = {"--dtypes": "fp32", "--threads": "1", "--grid": str(grid)}
    options["--json"] = str(tmp_path / "out.json")
    words = [word for pair in options.items() for word in pair]
    result = CliRunner().invoke(command_line("attention"), ["--quick", *words])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["phase"] for row in written["rows"]] == ["decode", "prefill", "mixed"]
    keys = {"vs_twin_worst", "vs_twin_worst_cell", "roofline_decode"}
    assert keys | {"roofline_prefill", "roofline_mixed"} == set(written["summary"])
