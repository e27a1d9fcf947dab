"""Tests of the GPU kernels over rows, interpreted, against their twins in plain torch."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.support.drawing import drawn
from tests.support.gpu_kernels import DTYPES
from vlora.kernels import reference

ROWS = [0, 1, 5]
WIDTHS = [1, 20, 128, 1030, 2477]
SHAPES = [(4, 2, 16), (3, 1, 80), (7, 7, 24), (12, 3, 138)]
"""Query heads, heads of keys and values, and their width."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@drawn(rows=ROWS, width=WIDTHS, dtype=DTYPES, has_delta=[True, False])
def test_norm_and_residual_equal_their_twin(
    launch: ModuleType, rows: int, width: int, dtype: torch.dtype, has_delta: bool
) -> None:
    hidden, weight = torch.randn(rows, width), torch.randn(width)
    delta = torch.randn(rows, width).to(dtype) if has_delta else None
    residual, out = hidden.clone(), torch.full((rows, width), torch.nan, dtype=dtype)
    launch.add_norm(out, residual, delta, weight, 1e-5)
    added = None if delta is None else delta.float()
    _close(out, reference.add_norm(hidden, added, weight, 1e-5))
    assert torch.equal(residual, hidden)


@drawn(rows=ROWS, shape=SHAPES, dtype=DTYPES)
def test_norms_of_heads_equal_their_twin(
    launch: ModuleType, rows: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    weights = torch.randn(2, dim)
    expected = qkv.float()
    reference.head_norm(expected, *weights, heads, kv_heads, 1e-6)
    launch.head_norm(qkv, *weights, heads, kv_heads, 1e-6)
    _close(qkv, expected)


@drawn(rows=ROWS, width=WIDTHS, dtype=DTYPES)
def test_the_gate_equals_its_twin(
    launch: ModuleType, rows: int, width: int, dtype: torch.dtype
) -> None:
    x = (3 * torch.randn(rows, 2 * width)).to(dtype)
    out = torch.full((rows, width), torch.nan, dtype=dtype)
    launch.gate(out, x)
    _close(out, reference.gate(x.float()))


def test_a_gate_far_below_zero_is_zero(launch: ModuleType) -> None:
    x, out = torch.tensor([[-200.0, -90.0, 2.0, 3.0]]), torch.empty(1, 2)
    launch.gate(out, x)
    assert torch.equal(out.abs(), torch.zeros(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 1030])
def test_rows_show_tokens_or_image_features(
    launch: ModuleType, width: int, dtype: torch.dtype
) -> None:
    table, features = torch.randn(50, width).to(dtype), torch.randn(7, width)
    # Tokens under images may lie outside the table.
    tokens = torch.tensor([3, 49, 1000, 7, 2000, 0], dtype=torch.int32)
    feature_rows = torch.tensor([-1, -1, 6, -3, 0, -1], dtype=torch.int32)
    out = torch.full((6, width), torch.nan)
    launch.embed(out, tokens, table, feature_rows, features)
    images = [(2, torch.tensor([6]), features), (3, torch.tensor([-1, 0]), features)]
    assert torch.equal(out, reference.embed(tokens.long(), table, images))
    for rows in (2, 1):
        launch.embed(out[:rows].fill_(torch.nan), tokens[:rows], table, None, None)
        assert torch.equal(out[:rows], table[[3, 49][:rows]].float())
    launch.embed(out[:0], tokens[:0], table, None, None)


@drawn(rows=ROWS, shape=SHAPES, page=[3, 20], dtype=DTYPES)
def test_queries_are_rotated_and_keys_and_values_written_to_their_pages(
    launch: ModuleType, rows: int, shape: tuple[int, int, int], page: int, dtype: torch.dtype
) -> None:
    """Compare the rows and all pages with their twin. The third row is padding."""
    (heads, kv_heads, dim), slots = shape, [7, 0, -1, 11, 4][:rows]
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.randn(rows, dim // 2)
    cache = torch.full((4, 2, kv_heads, page, dim + 8), 9.0, dtype=dtype)
    expected, parts = cache.clone(), qkv.float().view(rows, heads + 2 * kv_heads, dim)
    query, key, value = parts.split([heads, kv_heads, kv_heads], 1)
    rotated = reference.rotate(torch.cat((query, key), 1), angles.cos(), angles.sin())
    for row, slot in enumerate(slots):
        if slot >= 0:
            at = divmod(slot, page)
            expected[at[0], 0, :, at[1], :dim] = rotated[row, heads:].to(dtype)
            expected[at[0], 1, :, at[1], :dim] = value[row].to(dtype)
    placed = torch.tensor(slots, dtype=torch.int32)
    launch.rotate(qkv, cache[:, 0], cache[:, 1], angles.cos(), angles.sin(), placed, heads, dim)
    _close(qkv[:, : heads * dim], rotated[:, :heads].flatten(1))
    _close(cache, expected)
    assert torch.equal(qkv.unflatten(1, (-1, dim))[:, heads + kv_heads :], value.to(dtype))


@pytest.mark.parametrize("width", [1, 100, 4096, 9000, 19_997, 152_064])
def test_the_first_largest_value_and_finiteness_of_rows(draws: ModuleType, width: int) -> None:
    """Draw few distinct values, so that the first of several largest ones must be found.

    The last width is the vocabulary of Qwen2-VL.
    """
    x = torch.randint(-50, 50, (6, width)).float()
    for row, number in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[row, (-1, width // 3, 0)[row]] = number
    indices, finite = draws.argmax(x)
    assert finite.tolist() == [False] * 3 + [True] * 3
    assert torch.equal(indices[3:], reference.argmax(x)[0][3:])
    (index,), (is_finite,) = draws.argmax(x[4:5])
    assert index == indices[4]
    assert is_finite
    assert draws.argmax(x[:0])[0].shape == (0,)
