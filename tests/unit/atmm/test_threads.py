"""Tests of the division of work among threads, by blocks of rows and within segments."""

from __future__ import annotations

import pytest
import torch

from tests.support.atmm_problems import check, compiled, each_form, group_of
from vlora.atmm import tiles
from vlora.atmm.types import Segment
from vlora.backends import Backend


@each_form
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [
        ([8], [1]),
        ([16], [16]),
        ([64], [3]),
        ([128], [1]),
        ([260], [4]),
        ([24, 7], [1, 17]),
        ([8, 128, None, 16], [2, 1, 4, 9]),
    ],
)
def test_threads_divide_few_rows_within_their_segments(
    ranks: list[int | None],
    lengths: list[int],
    threads: int,
    backend: Backend,
    dtype: torch.dtype,
    rows_dtype: torch.dtype,
) -> None:
    d_in, d_outs = 6001, [4030, 2513]
    group = group_of(d_in, d_outs, ranks, dtype)
    segments, row = [], 1
    for slot, length in enumerate(lengths):
        segments.append(Segment(row, length, slot, 1 if slot % 2 else -1))
        row += length
    x, y = torch.randn(row, d_in).to(rows_dtype), torch.randn(row, sum(d_outs)).to(rows_dtype)
    check(y, x, segments, group, backend, threads=threads)


@each_form
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_divide_uneven_adapters_by_rows(
    threads: int, backend: Backend, dtype: torch.dtype, rows_dtype: torch.dtype
) -> None:
    group = group_of(512, [300], [8, 128, 16, 32], dtype)
    lengths = (50, 97, 3, 200)
    starts = [sum(lengths[:i]) for i in range(4)]
    segments = [Segment(starts[i], lengths[i], i) for i in range(4)]
    rows = sum(lengths)
    x, y = torch.randn(rows, 512).to(rows_dtype), torch.randn(rows, 300).to(rows_dtype)
    check(y, x, segments, group, backend, threads=threads)


@compiled
@each_form
@pytest.mark.parametrize("rank", [8, 20, 64, 100])
def test_a_group_serves_any_instruction_set_whichever_it_was_packed_for(
    rank: int, dtype: torch.dtype, rows_dtype: torch.dtype
) -> None:
    for packed_for in tiles.isas():
        with tiles.isa(packed_for):
            group = group_of(257, [130], [rank], dtype)
            assert group.native is not None
        for isa in tiles.isas():
            with tiles.isa(isa):
                for rows in (1, 7, 8, 30):
                    x, y = torch.randn(rows, 257), torch.randn(rows, 130)
                    x, y = x.to(rows_dtype), y.to(rows_dtype)
                    check(y, x, [Segment(0, rows, 0)], group, "cpu")
