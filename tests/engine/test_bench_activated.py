"""Tests of the activated benchmark on a small grid."""

from __future__ import annotations

from contextlib import closing

from benchmarks.activated import Activated


def test_activated_adapters_share_the_image_and_ordinary_ones_do_not() -> None:
    with closing(Activated(quick=True)) as benchmark:
        benchmark.prepare()
        benchmark.values |= {"adapters": [3], "repeats": 1, "image_tokens": 64}
        assert benchmark.cells() == [(3, 0)]
        benchmark.rows += benchmark.measure((3, 0))
        activated, ordinary = sorted(benchmark.rows, key=lambda row: str(row["kind"]))
        assert ordinary["computed_tokens"] > 3 * 64
        assert activated["computed_tokens"] < ordinary["computed_tokens"] - 64
        assert benchmark.summarize()["computed_token_ratio"] < 1
        assert list(benchmark.tables())
