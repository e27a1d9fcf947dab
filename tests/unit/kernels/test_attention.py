"""Tests of paged attention against double precision, in every implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.atmm_problems import compiled
from tests.support.drawing import drawn
from vlora.backends import Backend
from vlora.kernels import reference
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.inputs import text_prompt
from vlora.model.rotary import Rotary

LAYERS = 2
TYPES = (torch.float32, torch.bfloat16)
MIXED = ((5, 100), (1, 700), (130, 33), (1, 0), (1, 15), (1, 16))
"""(rows, positions before them) of each sequence of a step."""


def _chunk(index: int, row: int, start: int, end: int, pages: tuple[int, ...]) -> Chunk:
    tokens = (0,) * (end - start)
    return Chunk(str(index), 0, row, start, tokens, text_prompt(tokens), pages, True)


@dataclass
class Case:
    """Random sequences, their pages in random order, and the expected attention."""

    heads: int
    kv_heads: int
    dim: int
    block: int
    dtype: torch.dtype
    lengths: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        counts = [-(-sum(length) // self.block) for length in self.lengths]
        self.store = KVCache(
            sum(counts) + 2, LAYERS, self.block, self.kv_heads, self.dim, self.dtype
        )
        pages = torch.randperm(sum(counts) + 2).tolist()
        self.pages = [tuple(pages.pop() for _ in range(count)) for count in counts]
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.rows = [torch.randn(sum(length), width) for length in self.lengths]

    def step(
        self, ranges: Sequence[tuple[int, int, int]], backend: Backend, *, fixed_order: bool = False
    ) -> torch.Tensor:
        """Return the attention of the chunks (sequence, start, end), in layer 1."""
        chunks, row = [], 0
        for index, start, end in ranges:
            chunks.append(_chunk(index, row, start, end, self.pages[index]))
            row += end - start
        plan = AttentionPlan(
            chunks, self.store, self.heads, fixed_order=fixed_order, backend=backend
        )
        qkv = torch.cat([self.rows[index][start:end] for index, start, end in ranges])
        return plan.attend(1, qkv, self.rotary(plan.positions))

    def rotary(self, positions: torch.Tensor) -> Rotary:
        frequencies = 10.0 ** -torch.linspace(0, 3, self.dim // 2)
        return Rotary.from_angles(positions[:, None] * frequencies, 1.0)

    def expected(self, index: int, start: int) -> torch.Tensor:
        """Return the attention of a sequence's rows from `start`, in double precision."""
        rows = self.rows[index]
        rotary = self.rotary(torch.arange(len(rows)))
        query, key, value = rows.unflatten(1, (-1, self.dim)).split(
            [self.heads, self.kv_heads, self.kv_heads], dim=1
        )
        query = reference.rotate(query, rotary.cosines, rotary.sines)[start:]
        key = reference.rotate(key, rotary.cosines, rotary.sines)
        mask = torch.arange(len(rows))[None] <= torch.arange(start, len(rows))[:, None]
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).double(),
            key.to(self.dtype).transpose(0, 1).double(),
            value.to(self.dtype).transpose(0, 1).double(),
            attn_mask=mask,
            enable_gqa=True,
        )
        return attended.transpose(0, 1).flatten(1)

    def check(self, backend: Backend) -> None:
        """Compute the earlier positions in one step and compare those of the next."""
        before = [(i, 0, start) for i, (_, start) in enumerate(self.lengths) if start]
        if before:
            self.step(before, backend)
        now = [(i, start, start + rows) for i, (rows, start) in enumerate(self.lengths)]
        attended = self.step(now, backend)
        expected = torch.cat([self.expected(i, start) for i, start, _ in now])
        torch.testing.assert_close(attended.double(), expected, rtol=0, atol=3e-5)


@drawn(block=[1, 3, 16, 48], dtype=TYPES, threads=[1, 3])
def test_chunks_of_very_different_lengths_are_attended_in_one_call(
    backend: Backend, block: int, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    case = Case(8, 2, 16, block, dtype, MIXED)
    # Pages hold values of their previous owner until they are written; none may be read.
    case.store.cache.fill_(float("nan"))
    case.check(backend)


@drawn(
    shape=[
        (4, 4, 64, MIXED),
        (6, 6, 8, MIXED),
        (8, 1, 48, MIXED),
        (6, 2, 80, MIXED),
        (8, 4, 24, MIXED),
        (4, 2, 32, ((1, 3000),)),  # a context that is split among threads
        (1, 1, 512, ((60, 104),)),  # rows that must not see later keys of their tile
        (4, 2, 64, ((300, 0), (3, 200), (20, 129))),  # chunks of a long prompt
    ],
    dtype=TYPES,
    threads=[1, 3],
)
def test_heads_of_any_number_and_width_attend_chunks_of_any_length(
    backend: Backend, shape: Any, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    heads, kv_heads, dim, lengths = shape
    Case(heads, kv_heads, dim, 16, dtype, lengths).check(backend)


def test_scores_may_grow_and_fall_along_a_sequence(backend: Backend) -> None:
    case = Case(4, 2, 32, 16, torch.float32, ((1, 400), (1, 37)))
    for rows in case.rows:
        keys = rows.unflatten(1, (-1, 32))[:, 4:6]
        keys *= torch.linspace(0.1, 6, len(rows))[:, None, None].flip(0).roll(len(rows) // 2, 0)
    case.check(backend)


@compiled
@drawn(
    # (query heads, KV heads, rows): heads of their own, small and large groups; several blocks
    shape=[(4, 4, 300), (8, 2, 150), (8, 1, 150), (12, 2, 40), (2, 2, 700)],
    block=[3, 16, 48],
    dtype=TYPES,
)
def test_in_a_fixed_order_rows_have_the_same_bits_in_any_chunks_and_with_any_threads(
    backend: Backend, shape: tuple[int, int, int], block: int, dtype: torch.dtype
) -> None:
    if backend == "reference":
        pytest.skip("only the compiled kernels have a fixed order")
    heads, kv_heads, rows = shape
    case = Case(heads, kv_heads, 32, block, dtype, ((rows, 0), (rows // 2, 0)))
    torch.set_num_threads(1)
    expected = case.step([(0, 0, rows)], backend, fixed_order=True)
    torch.testing.assert_close(expected.double(), case.expected(0, 0), rtol=0, atol=3e-5)
    torch.set_num_threads(3)
    # Chunks of 1, 2, 3 and so on rows, and then single rows, beside those of another sequence.
    start, length, parts = 0, 1, []
    while start < rows:
        end = min(start + length, rows)
        other = (1, 0, rows // 2) if length % 5 == 0 else (1, rows // 2 - 1, rows // 2)
        parts.append(case.step([other, (0, start, end)], backend, fixed_order=True)[start - end :])
        start, length = end, length % 19 + 1
    assert torch.equal(torch.cat(parts), expected)


@drawn(
    shape=[
        (2, 2, 70, 20, 45),  # tiles of queries
        (4, 1, 150, 0, 0),  # several rows in a tile, none before the fault
        (4, 4, 4, 60, 2),  # interleaved panels
        (4, 1, 30, 900, 25),  # keys divided among threads
        (4, 4, 1, 128, 0),  # a decode row that is alone in its block
        (4, 1, 1, 1200, 0),  # and one whose keys are divided
    ],
    fault=[("value", math.nan), ("value", -math.inf), ("key", math.inf), ("value", 1e30)],
    block=[3, 16],
    dtype=TYPES,
)
def test_a_number_that_is_huge_or_not_finite_changes_no_bit_of_earlier_rows(
    backend: Backend, shape: Any, fault: tuple[str, float], block: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(3)
    (heads, kv_heads, rows, start, at), (part, number) = shape, fault
    case = Case(heads, kv_heads, 32, block, dtype, ((rows, start), (1, 30)))
    before = [(0, 0, start), (1, 0, 30)] if start else [(1, 0, 30)]
    now = [(0, start, start + rows), (1, 30, 31)]
    case.step(before, backend)
    healthy = case.step(now, backend)
    # One element of the last head of keys or values.
    case.rows[0][start + at, (heads + kv_heads * (1 + (part == "value"))) * 32 - 5] = number
    attended = case.step(now, backend)
    assert torch.equal(attended[:at], healthy[:at])
    assert torch.equal(attended[rows], healthy[rows]), "another sequence"
    # The query heads that share the head of keys and values see the fault.
    seen = attended[at:rows, (heads - heads // kv_heads) * 32 :]
    if math.isfinite(number):
        assert not torch.equal(attended[at], healthy[at])
    else:
        assert seen.isnan().all()


def test_pages_and_rows_that_do_not_fit_are_refused() -> None:
    case = Case(4, 2, 32, 16, torch.float32, ((1, 40),))
    case.pages[0] = (999,) * 3
    with pytest.raises(ValueError, match="page 999 is not among"):
        case.step([(0, 0, 10)], "cpu")
    plan = AttentionPlan([_chunk(0, 0, 0, 2, (0,))], case.store, 4)
    with pytest.raises(ValueError, match=r"qkv \(3, 256\)"):
        plan.attend(0, torch.zeros(3, 256), case.rotary(plan.positions))
