"""Tests of the step's operations and plans for a GPU, on CPU tensors, against those in torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch

from vlora.backends import Backend
from vlora.device.device import HOST
from vlora.kernels import on_gpu, reference
from vlora.kernels.ops import HeadNorms
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.attention_gpu import GpuPlan
from vlora.model.chunk import Chunk
from vlora.model.inputs import text_prompt
from vlora.model.rotary import Rotary

pytestmark = pytest.mark.usefixtures("launch")

HALF, SINGLE = torch.float16, torch.float32
TOLERANCE = {SINGLE: 2e-5, HALF: 1e-2}


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with the tolerance of the type in which `actual` was computed."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_products_have_the_type_of_their_rows_or_are_written_to_out(
    rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = torch.randn(6, 20).to(dtype), torch.randn(6) if has_bias else None
    for rows_dtype in (SINGLE, HALF):
        x = torch.randn(rows, 20).to(rows_dtype)
        expected = x.to(dtype).float() @ weight.float().T
        expected += 0.0 if bias is None else bias
        product = on_gpu.linear(x, weight, bias, None)
        assert product.dtype == rows_dtype
        _close(product, expected, HALF if rows_dtype == HALF else dtype)
        for out_dtype in (SINGLE, HALF):
            out = torch.full((rows, 6), torch.nan, dtype=out_dtype)
            assert on_gpu.linear(x, weight, bias, out) is out
            _close(out, expected, HALF if out_dtype == HALF else dtype)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_results_without_out_have_the_type_of_the_rows(dtype: torch.dtype) -> None:
    x = torch.randn(3, 14).to(dtype)
    gated = on_gpu.gate(x, None)
    assert gated.dtype == dtype
    _close(gated, reference.gate(x.float()), dtype)
    hidden, weight = torch.randn(3, 14), torch.randn(14)
    expected = reference.add_norm(hidden.clone(), x.float(), weight, 1e-5)
    normed = on_gpu.add_norm(hidden.clone(), x, weight, 1e-5, None)
    assert normed.dtype == dtype
    _close(normed, expected, dtype)
    assert on_gpu.add_norm(hidden, None, weight, 1e-5, None).dtype == SINGLE
    embedded = on_gpu.embed(torch.tensor([2, 0, 1]), x, (), None)
    assert torch.equal(embedded, x[[2, 0, 1]].float())


def test_image_features_of_a_step_are_one_range_of_all_rows() -> None:
    tokens, table, features = torch.tensor([0, 1, 0]), torch.randn(2, 8), torch.randn(2, 8)
    rows = torch.tensor([-1, 1, -1], dtype=torch.int32)
    embedded = on_gpu.embed(tokens, table, [(0, rows, features)], None)
    assert torch.equal(embedded, torch.stack([table[0], features[1], table[0]]))
    for images in (
        [(0, rows, features), (0, rows, features)],
        [(1, rows, features)],
        [(0, rows[:2], features)],
    ):
        with pytest.raises(ValueError, match="on a GPU, it must be one range of all rows"):
            on_gpu.embed(tokens, table, images, None)


HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2


def _cache(block: int, backend: Backend) -> KVCache:
    device = Mock(wraps=HOST, page_layout="rows" if backend == "gpu" else "panels")
    return KVCache(60, LAYERS, block, KV_HEADS, DIM, SINGLE, device)


def _chunk(row: int, start: int, end: int, pages: Sequence[int]) -> Chunk:
    tokens = (0,) * (end - start)
    return Chunk(str(row), 0, row, start, tokens, text_prompt(tokens), tuple(pages), True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("normed", [True, False])
def test_plans_of_random_chunks_equal_the_reference(normed: bool, seed: int) -> None:
    """Compute prompts, steps with rows of both kinds, and steps whose rows all decode."""
    draw = random.Random(seed)
    block, sequences = draw.randint(3, 16), draw.randint(1, 3)
    pages = draw.sample(range(60), 20 * sequences)
    caches: dict[Backend, KVCache] = {name: _cache(block, name) for name in ("gpu", "reference")}
    norms = HeadNorms(torch.rand(DIM), torch.rand(DIM), 1e-6) if normed else None
    ends = [0] * sequences
    for step in range(5):
        lengths = [draw.randint(1, 18) if step < 3 else 1 for _ in ends]
        chunks, row = [], 0
        for index, (start, length) in enumerate(zip(ends, lengths, strict=True)):
            chunks.append(_chunk(row, start, start + length, pages[20 * index :][:20]))
            row += length
        ends = [chunk.end for chunk in chunks]
        qkv = torch.randn(row, (HEADS + 2 * KV_HEADS) * DIM)
        attended = {}
        for name, cache in caches.items():
            plan = AttentionPlan(chunks, cache, HEADS, backend=name)
            angles = plan.positions[:, None] * 10.0 ** -torch.linspace(0, 3, DIM // 2)
            rotary = Rotary.from_angles(angles, 1.0)
            attended[name] = plan.attend(1, qkv.clone(), rotary, head_norms=norms)
        _close(attended["gpu"], attended["reference"], SINGLE)


def test_chunks_whose_pages_do_not_cover_them_are_refused() -> None:
    cache = _cache(4, "gpu")
    with pytest.raises(ValueError, match="2 pages of 4 positions do not cover 9"):
        GpuPlan([_chunk(0, 0, 9, (0, 1))], cache)
    for page in (60, -1):
        with pytest.raises(ValueError, match=f"page {page} is not among the 60 pages of the cache"):
            GpuPlan([_chunk(0, 8, 9, (0, 1, page))], cache)
