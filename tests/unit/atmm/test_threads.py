"""Tests of the division of work among threads, by blocks of rows and within segments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch

from tests.support.atmm_problems import FORMS, Form, check, compiled, each_form, group_of
from tests.support.drawing import drawn
from vlora.atmm import tiles
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segment
from vlora.backends import Backend


@cache
def wide_group(ranks: tuple[int | None, ...], dtype: torch.dtype) -> LoraGroup:
    """Return a group of wide adapters, whose matrices all implementations share."""
    return group_of(6001, [4030, 2513], ranks, dtype)


@pytest.fixture(scope="module", autouse=True)
def _free_groups() -> Iterator[None]:
    yield
    wide_group.cache_clear()


@drawn(
    sizes=[
        ((8,), (1,)),
        ((16,), (16,)),
        ((64,), (3,)),
        ((128,), (1,)),
        ((260,), (4,)),
        ((24, 7), (1, 17)),
        ((8, 128, None, 16), (2, 1, 4, 9)),
    ],
    form=FORMS,
    threads=[2, 3, 5],
)
def test_threads_divide_few_rows_within_their_segments(
    sizes: tuple[tuple[int | None, ...], tuple[int, ...]],
    form: Form,
    threads: int,
    backend: Backend,
) -> None:
    ranks, lengths = sizes
    wide = wide_group(ranks, form.dtype)
    group = LoraGroup(wide.d_in, wide.d_outs, form.dtype)  # It is packed for the implementation.
    for pairs in zip(*wide.pairs, strict=True):
        group.append(pairs)
    segments, row = [], 1
    for slot, length in enumerate(lengths):
        segments.append(Segment(row, length, slot, 1 if slot % 2 else -1))
        row += length
    x, y = form.randn(row, wide.d_in), form.randn(row, sum(wide.d_outs))
    check(y, x, segments, group, backend, threads=threads)


@each_form
def test_threads_divide_uneven_adapters_by_rows(form: Form, backend: Backend) -> None:
    group = group_of(512, [300], [8, 128, 16, 32], form.dtype)
    segments = [Segment(0, 50, 0), Segment(50, 97, 1), Segment(147, 3, 2), Segment(150, 200, 3)]
    for threads in (2, 4):
        x, y = form.randn(350, 512), form.randn(350, 300)
        check(y, x, segments, group, backend, threads=threads)


@compiled
@each_form
@pytest.mark.parametrize("rank", [8, 20, 64, 100])
def test_a_group_serves_any_instruction_set_whichever_it_was_packed_for(
    rank: int, form: Form
) -> None:
    for packed_for in tiles.isas():
        with tiles.isa(packed_for):
            group = group_of(257, [130], [rank], form.dtype)
            assert group.native is not None
        for isa, rows in product(tiles.isas(), (1, 7, 8, 30)):
            with tiles.isa(isa):
                x, y = form.randn(rows, 257), form.randn(rows, 130)
                check(y, x, [Segment(0, rows, 0)], group, "cpu")
