"""Tests of the quantized benchmark in its quick version."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.frame import command_line
from benchmarks.quantized import matrix_bytes


def test_the_bytes_of_each_type_follow_from_its_format() -> None:
    assert matrix_bytes("bf16", 10, 128) == 2560
    assert matrix_bytes("int8", 10, 128) == 10 * (128 + 4)
    assert matrix_bytes("int4-32 bf16", 10, 128) == 10 * (64 + 4 * 5)


@pytest.mark.usefixtures("_restore_threads")
def test_the_quick_benchmark_measures_each_type_at_each_number_of_rows() -> None:
    result = CliRunner().invoke(command_line("quantized"), ["--quick", "--threads", "1"])
    assert result.exit_code in (0, 1), result.output
    for text in ("int4-32", "int8 bf16", "int8_prefill_vs_float", "int8_prefill_vs_peak"):
        assert text in result.output
