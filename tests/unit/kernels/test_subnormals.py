"""Tests that every kernel treats subnormal numbers as zeros, on every path and thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.atmm_problems import compiled, group_of, isas
from vlora.atmm import op, tiles
from vlora.atmm.groups import HeadGroup
from vlora.atmm.types import HeadMatrix, LoraPair, Merges, MergeUpdate, Segment
from vlora.kernels import ops

pytestmark = compiled

TINY = 1e-40
"""A subnormal number in fp32 and in bf16."""
ROWS = (1, 2, 30, 600)
"""Numbers of rows from one that runs on its caller alone to one that is shared among threads."""
TYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, params=isas())
def _isa(request: pytest.FixtureRequest, threads: int) -> Iterator[None]:
    with tiles.isa(request.param):
        yield


def _tiny(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, TINY, dtype=dtype)


def test_rows_between_products_are_flushed() -> None:
    for rows in ROWS:
        hidden = _tiny(rows, 96)
        assert not ops.add_norm(hidden, _tiny(rows, 96), torch.ones(96), 1e-6, backend="cpu").any()
        assert not hidden.any()
        gates = torch.cat((_tiny(rows, 48), torch.ones(rows, 48)), dim=1)
        assert not ops.gate(gates, backend="cpu").any()
        scores = torch.zeros(rows, 2000)
        scores[:, 7:] = TINY
        assert not ops.argmax(scores, backend="cpu")[0].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_products_adapters_heads_and_merged_weights_are_flushed(dtype: torch.dtype) -> None:
    ones, tiny = torch.ones(70, 96, dtype=dtype), _tiny(70, 96, dtype=dtype)
    group, head = group_of(96, [70], [8], dtype), HeadGroup(96)
    head.append(HeadMatrix(torch.ones(20, 96), _tiny(20)))
    for rows in ROWS:
        for weight, x in ((ones, _tiny(rows, 96)), (tiny, torch.ones(rows, 96))):
            assert not ops.Matrix(weight, _tiny(70))(x, backend="cpu").any()
            assert not ops.Matrix(weight).gated(x, backend="cpu").any()
        y, segments = _tiny(rows, 70), [Segment(0, rows, 0)]
        op.apply(y, torch.zeros(rows, 96), segments, group, backend="cpu")
        assert not y.any()
        assert not op.heads(_tiny(rows, 96), segments, head, backend="cpu").any()
    for rank in (8, 40):
        base = _tiny(200 * 128, dtype=dtype)
        pair = LoraPair(torch.zeros(rank, 128), torch.ones(200, rank))
        merges = Merges([MergeUpdate(0, pair)], [])
        op.merge(base, base, merges, 1, threads=torch.get_num_threads(), backend="cpu")
        assert not base.any()
