"""Tests of the division of work among threads, by blocks of rows and within segments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.support.atmm_problems import check, compiled, each_form, expected, group_of
from vlora.atmm import tiles
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segment
from vlora.backends import Backend


class Problem(NamedTuple):
    """A problem of few rows with wide adapters, and its result in float64."""

    group: LoraGroup
    segments: list[Segment]
    x: torch.Tensor
    y: torch.Tensor
    desired: torch.Tensor


@cache
def wide_problem(
    ranks: tuple[int | None, ...],
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    rows_dtype: torch.dtype,
) -> Problem:
    """Return a random problem, which all implementations and numbers of threads share."""
    d_in, d_outs = 6001, [4030, 2513]
    group = group_of(d_in, d_outs, ranks, dtype)
    segments, row = [], 1
    for slot, length in enumerate(lengths):
        segments.append(Segment(row, length, slot, 1 if slot % 2 else -1))
        row += length
    x, y = torch.randn(row, d_in).to(rows_dtype), torch.randn(row, sum(d_outs)).to(rows_dtype)
    return Problem(group, segments, x, y, expected(y, x, segments, group))


@pytest.fixture(scope="module", autouse=True)
def _free_problems() -> Iterator[None]:
    yield
    wide_problem.cache_clear()


@each_form
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [
        ((8,), (1,)),
        ((16,), (16,)),
        ((64,), (3,)),
        ((128,), (1,)),
        ((260,), (4,)),
        ((24, 7), (1, 17)),
        ((8, 128, None, 16), (2, 1, 4, 9)),
    ],
)
def test_threads_divide_few_rows_within_their_segments(
    ranks: tuple[int | None, ...],
    lengths: tuple[int, ...],
    threads: int,
    backend: Backend,
    dtype: torch.dtype,
    rows_dtype: torch.dtype,
) -> None:
    problem = wide_problem(ranks, lengths, dtype, rows_dtype)
    # A group of its own is packed for the implementation.
    group = LoraGroup(problem.group.d_in, problem.group.d_outs, dtype)
    for pairs in zip(*problem.group.pairs, strict=True):
        group.append(pairs)
    check(
        problem.y,
        problem.x,
        problem.segments,
        group,
        backend,
        threads=threads,
        desired=problem.desired,
    )


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
