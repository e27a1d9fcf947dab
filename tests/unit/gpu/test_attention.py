"""Tests of the GPU kernels of paged attention, interpreted, against double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.drawing import drawn
from tests.support.gpu_kernels import DTYPES, ON_GPU

SHAPES = [(4, 2, 16, 16), (2, 2, 24, 3), (5, 1, 80, 16), (2, 2, 8, 3), (15, 3, 98, 20)]
"""Query heads, heads of keys and values, their width, and positions of a page."""
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """Random queries, and contexts over random pages with slots that hold NaN.

    ends: number of positions of each sequence. distinct: number of pages that they share; long
    contexts repeat pages, which keeps them small.
    """

    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype
    ends: list[int]
    distinct: int = 12
    cache: torch.Tensor = field(init=False)
    tables: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.distinct + 1, 2, self.kv_heads, self.page, self.dim + 4
        self.cache = torch.randn(shape).to(self.dtype)
        self.cache[-1] = torch.nan  # A page that no sequence has.
        self.cache[..., self.dim :] = torch.nan
        pages = [-(-end // self.page) for end in self.ends]
        self.tables = torch.full((len(self.ends), max(pages) + 2), self.distinct)
        for line, count in zip(self.tables, pages, strict=True):
            line[:count] = torch.randint(0, self.distinct, (count,))
        self.tables = self.tables.to(torch.int32)

    @property
    def keys(self) -> torch.Tensor:
        return self.cache[:, 0]

    @property
    def values(self) -> torch.Tensor:
        return self.cache[:, 1]

    def rows(self, count: int) -> torch.Tensor:
        """Return random rows of queries, keys and values; only the queries are read."""
        qkv = torch.randn(count, (self.heads + 2 * self.kv_heads) * self.dim)
        qkv[:, self.heads * self.dim :] = torch.nan
        return qkv.to(self.dtype)

    def expected(self, sequence: int, start: int, qkv: torch.Tensor) -> torch.Tensor:
        """Return the attention of a sequence's rows from position `start`, [rows, …] fp64."""
        end = start + len(qkv)
        positions = torch.arange(end)
        pages = self.tables[sequence].long()[positions // self.page]
        keys, values = (
            part[pages, :, positions % self.page, : self.dim].transpose(0, 1).double()
            for part in (self.keys, self.values)
        )
        query = qkv[:, : self.heads * self.dim].unflatten(1, (self.heads, self.dim))
        mask = positions[None] <= torch.arange(start, end)[:, None]
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).double(), keys, values, attn_mask=mask, enable_gqa=True
        )
        return attended.transpose(0, 1).flatten(1)

    def decode(
        self, launch: ModuleType, qkv: torch.Tensor, splits: int, rotation: Any = None
    ) -> torch.Tensor:
        """Return the attention of one row of each sequence; the rows are in reverse order."""
        count = len(self.ends)
        rows = torch.arange(count - 1, -1, -1, dtype=torch.int32)
        ends = torch.tensor(self.ends, dtype=torch.int32)
        out = torch.full((count, self.heads * self.dim), torch.nan, dtype=self.dtype)
        counters = torch.zeros(count * self.kv_heads, dtype=torch.int32)
        contexts = launch.DecodeRows(rows, ends, self.tables, counters, splits)
        sizes = self.heads, self.dim
        launch.decode(out, qkv, self.keys, self.values, contexts, *sizes, rotation)
        assert not counters.any(), "the next launch starts from zeros"
        return out.flip(0)

    def prefill(
        self, launch: ModuleType, qkv: torch.Tensor, ranges: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        """Return the attention of the chunks (sequence, start, rows), one after another."""
        tiles, row = [], 0
        tile = launch.PREFILL_ROWS[self.dtype.itemsize]
        for sequence, start, rows in ranges:
            for first in range(0, rows, tile):
                count = min(rows - first, tile)
                tiles.append((row + first, count, start + first, sequence))
            row += rows
        out = torch.full((row, self.heads * self.dim), torch.nan, dtype=self.dtype)
        table = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 4)
        launch.prefill(out, qkv, self.keys, self.values, table, self.tables, self.heads, self.dim)
        return out


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[actual.dtype])


@drawn(shape=SHAPES, splits=[1, 3, 8], dtype=DTYPES)
def test_decoding_rows_and_chunks_of_a_prefill_equal_double_precision(
    launch: ModuleType, shape: tuple[int, int, int, int], splits: int, dtype: torch.dtype
) -> None:
    ends = [1, 64, 130, 70, 30]
    case = Case(*shape, dtype, ends)
    qkv = case.rows(len(ends))
    attended = case.decode(launch, qkv, splits)
    for i, end in enumerate(ends):
        _close(attended[[i]], case.expected(i, end - 1, qkv[[len(ends) - 1 - i]]))
    ranges = [(3, 0, 70), (2, 121, 9), (1, 63, 1), (4, 5, 25), (0, 0, 1)]
    qkv = case.rows(106)
    attended, row = case.prefill(launch, qkv, ranges), 0
    for sequence, start, rows in ranges:
        part = slice(row, row + rows)
        _close(attended[part], case.expected(sequence, start, qkv[part]))
        row += rows


@drawn(shape=SHAPES, splits=[1, 3, 8], normed=[False, True], dtype=DTYPES)
def test_one_launch_equals_separate_launches_of_norms_rotation_and_decode(
    launch: ModuleType,
    shape: tuple[int, int, int, int],
    splits: int,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    heads, kv_heads, dim, page = shape
    # The last positions begin a page, end one, and are alone in a context; the last row is padding.
    ends = [4 * page + 1, 3 * page, 1, 130, 0]
    case, count, lines = Case(*shape, dtype, ends), len(ends), range(4)
    case.tables = torch.randint(count, case.distinct, case.tables.shape, dtype=torch.int32)
    for line in lines:
        case.tables[line, (ends[line] - 1) // page] = line  # No other sequence has the page.
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim).to(dtype)
    angles, weights = torch.randn(count, dim // 2), 1 + torch.rand(2, dim)
    cosines, sines = angles.cos(), angles.sin()
    untouched = case.cache.clone()

    norms = (*weights, 1e-6) if normed else None
    rotation = launch.Rotation(cosines, sines, norms)
    attended = case.decode(launch, given := qkv.clone(), splits, rotation)
    assert torch.equal(given, qkv), "the rows are only read"
    written = case.cache.clone()

    case.cache.copy_(untouched)
    if normed:
        launch.head_norm(qkv, *weights, heads, kv_heads, 1e-6)
    slots = torch.full((count,), -1, dtype=torch.int32)
    for line in lines:
        slots[count - 1 - line] = line * page + (ends[line] - 1) % page
    launch.rotate(qkv, case.keys, case.values, cosines, sines, slots, heads, dim)
    expected = case.decode(launch, qkv, splits)
    torch.testing.assert_close(attended, expected, rtol=0, atol=TOLERANCE[dtype])
    # Only the single launches round the normed values before they rotate them.
    rounding = torch.finfo(dtype).eps * float(qkv.abs().max())
    torch.testing.assert_close(
        written, case.cache, rtol=1e-3, atol=max(1e-6, rounding), equal_nan=True
    )
    assert not torch.equal(written.nan_to_num(), untouched.nan_to_num())


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_of_padding_gets_zeros(launch: ModuleType, splits: int) -> None:
    case = Case(4, 2, 16, 16, torch.float32, [0, 40])
    qkv = case.rows(2)
    attended = case.decode(launch, qkv, splits)
    assert torch.equal(attended[0], torch.zeros(64))
    _close(attended[[1]], case.expected(1, 39, qkv[[0]]))


@pytest.fixture
def large_tiles(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use large tiles: the interpreter takes about as long for a large one as for a small one."""
    if not ON_GPU:
        monkeypatch.setattr(launch, "DECODE_TILE", {2: 4096, 4: 4096})
        monkeypatch.setattr(launch, "PREFILL_TILE", {2: 4096, 4: 4096})
        monkeypatch.setattr(launch, "MASKED_TILE", {2: 4096, 4: 4096})


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_of_a_hundred_thousand_positions(launch: ModuleType, dtype: torch.dtype) -> None:
    """Decode a row, compute a chunk, and compare one launch with a rotation, which writes to the
    last page, and a decode."""
    end = 100_003
    case = Case(2, 1, 16, 16, dtype, [end], distinct=40)
    qkv = case.rows(19)
    _close(case.decode(launch, qkv[:1], 7), case.expected(0, end - 1, qkv[:1]))
    attended = case.prefill(launch, qkv, [(0, end - 19, 19)])
    _close(attended, case.expected(0, end - 19, qkv))
    case.tables[0, : end // 16] %= 39
    case.tables[0, end // 16] = 39  # No other position is in this page.
    qkv, angles = torch.randn(1, 4 * 16).to(dtype), torch.randn(1, 8)
    untouched = case.cache.clone()
    attended = case.decode(launch, qkv.clone(), 7, launch.Rotation(angles.cos(), angles.sin()))
    written = case.cache.clone()
    case.cache.copy_(untouched)
    slots = torch.tensor([39 * 16 + (end - 1) % 16], dtype=torch.int32)
    launch.rotate(qkv, case.keys, case.values, angles.cos(), angles.sin(), slots, 2, 16)
    torch.testing.assert_close(written, case.cache, rtol=0, atol=2e-3, equal_nan=True)
    _close(attended, case.expected(0, end - 1, qkv))


def test_pages_whose_offsets_exceed_32_bits(launch: ModuleType) -> None:
    """Compare pages that are 2³⁰ elements apart with adjacent copies of them."""
    dtype = torch.float16
    case = Case(4, 2, 16, 16, dtype, [40], distinct=2)
    case.cache[-1] = 0.5
    case.tables = torch.tensor([[0, 2, 1]], dtype=torch.int32)
    near, strides = case.cache, case.cache.stride()
    # The system provides only those parts of this memory that are written.
    memory = torch.empty(2**31 + near[0].numel(), dtype=dtype)
    far = memory.as_strided(near.shape, (2**30, *strides[1:])).copy_(near)
    qkv, angles = torch.randn(9, 8 * 16).to(dtype), torch.randn(9, 8)
    slots = torch.arange(9, dtype=torch.int32) + 16 * 2  # In the last page.
    turned = launch.Rotation(angles[:1].cos(), angles[:1].sin())

    def results() -> list[torch.Tensor]:
        decoded = case.decode(launch, qkv[:1].clone(), 1, turned)
        launch.rotate(
            rows := qkv.clone(), case.keys, case.values, angles.cos(), angles.sin(), slots, 4, 16
        )
        return [decoded, rows, case.prefill(launch, rows, [(0, 31, 9)]), case.cache.clone()]

    expected = results()
    case.cache = far
    for actual, near_result in zip(results(), expected, strict=True):
        assert torch.equal(actual.nan_to_num(), near_result.nan_to_num())


def test_no_chunk_and_no_row_launch_nothing(launch: ModuleType) -> None:
    case = Case(4, 2, 16, 16, torch.float32, [5])
    case.prefill(launch, case.rows(0), [])
    case.ends = []
    assert case.decode(launch, case.rows(0), 1).shape == (0, 64)


def test_scores_may_grow_and_fall_along_a_context(launch: ModuleType) -> None:
    case = Case(4, 2, 16, 16, torch.float32, [90])
    case.keys.mul_(torch.linspace(0.1, 30, 13)[:, None, None, None])
    qkv = case.rows(90)
    _close(case.decode(launch, qkv[:1], 3), case.expected(0, 89, qkv[:1]))
    _close(case.prefill(launch, qkv, [(0, 0, 90)]), case.expected(0, 0, qkv))


@pytest.mark.parametrize("fault", [(1, math.nan), (1, -math.inf), (0, math.inf), (0, -math.inf)])
@pytest.mark.parametrize("position", [3, 36])
def test_a_number_that_is_not_finite_changes_no_bit_of_rows_that_do_not_see_it(
    launch: ModuleType, fault: tuple[int, float], position: int
) -> None:
    part, number = fault
    case = Case(4, 2, 16, 16, torch.float32, [60])
    case.tables[0, :4] = torch.arange(4)
    qkv = case.rows(60)
    rows, single = [(0, 0, 60)], qkv[:1]
    healthy = case.prefill(launch, qkv, rows)
    case.cache[position // 16, part, 1, position % 16, 7] = number
    attended = case.prefill(launch, qkv, rows)
    assert torch.equal(attended[:position], healthy[:position])
    assert torch.equal(attended[:, :32], healthy[:, :32]), "heads of other keys"
    assert not attended[position:, 32:].isfinite().any(1).all()
    for head in attended[position:, 32:].split(16, 1):
        assert not head.isfinite().all(1).any()
    for splits in (1, 3):
        decoded = case.decode(launch, single, splits)
        assert decoded[0, :32].isfinite().all()
        assert not decoded[0, 32:48].isfinite().all()
        assert not decoded[0, 48:].isfinite().all()
