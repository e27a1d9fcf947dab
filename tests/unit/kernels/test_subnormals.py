"""Tests that every kernel treats subnormal numbers as zeros, on every path and thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.atmm_problems import CUDA, EMULATED, compiled, group_of, implementations
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


NOT_ON_THE_CPU = ("reference", EMULATED, CUDA)


@pytest.fixture(autouse=True, params=[i for i in implementations() if i not in NOT_ON_THE_CPU])
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with tiles.isa(request.param):
        yield


@pytest.fixture(autouse=True, params=[1, 3], ids=["one thread", "three threads"])
def _threads(request: pytest.FixtureRequest, _restore_threads: None) -> None:
    torch.set_num_threads(request.param)


def _tiny(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, TINY, dtype=dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_between_products_are_flushed(rows: int) -> None:
    hidden = _tiny(rows, 96)
    assert not ops.add_norm(hidden, _tiny(rows, 96), torch.ones(96), 1e-6, backend="cpu").any()
    assert not hidden.any()
    gates = torch.cat((_tiny(rows, 48), torch.ones(rows, 48)), dim=1)
    assert not ops.gate(gates, backend="cpu").any()
    scores = torch.zeros(rows, 2000)
    scores[:, 7:] = TINY
    assert not ops.argmax(scores, backend="cpu")[0].any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_factors_and_biases_of_products_are_flushed(rows: int, dtype: torch.dtype) -> None:
    ones, tiny = torch.ones(70, 96, dtype=dtype), _tiny(70, 96, dtype=dtype)
    for weight, x in ((ones, _tiny(rows, 96)), (tiny, torch.ones(rows, 96))):
        assert not ops.Matrix(weight, _tiny(70))(x, backend="cpu").any()
        assert not ops.Matrix(weight).gated(x, backend="cpu").any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_adapters_and_heads_are_flushed(rows: int, dtype: torch.dtype) -> None:
    group, y = group_of(96, [70], [8], dtype), _tiny(rows, 70)
    op.apply(y, torch.zeros(rows, 96), [Segment(0, rows, 0)], group, backend="cpu")
    assert not y.any()
    head = HeadGroup(96)
    head.append(HeadMatrix(torch.ones(20, 96), _tiny(20)))
    assert not op.heads(_tiny(rows, 96), [Segment(0, rows, 0)], head, backend="cpu").any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rank", [8, 40])
def test_merged_weights_are_flushed(rank: int, dtype: torch.dtype) -> None:
    base = _tiny(200 * 128, dtype=dtype)
    merges = Merges([MergeUpdate(0, LoraPair(torch.zeros(rank, 128), torch.ones(200, rank)))], [])
    op.merge(base, base, merges, 1, threads=torch.get_num_threads(), backend="cpu")
    assert not base.any()
