"""Tests of the step's kernels against double precision, in every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.atmm_problems import MULTIPLY_PAIRS, compiled
from tests.support.drawing import drawn
from tools.demo.__main__ import CHECKPOINT
from vlora import backends
from vlora.atmm import tiles
from vlora.backends import Backend
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument
from vlora.kernels import ops
from vlora.vision.encoder import VisionEncoder

TYPES = (torch.float32, torch.bfloat16)
ROWS = (0, 1, 2, 3, 4, 7, 12, 13, 16, 17, 24, 40, 64, 65, 130, 270)


def _tolerance(dtype: torch.dtype, backend: Backend) -> float:
    """Return the absolute tolerance for values of about 1."""
    rounded = dtype == torch.bfloat16 and backend == "cpu"
    return 2e-2 if rounded and tiles.current_isa("bf16") in MULTIPLY_PAIRS else 5e-5


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("width", "depth", "all_rows"),
    [
        *((*shape, ROWS) for shape in ((1, 1), (5, 3), (48, 64), (50, 100), (131, 257))),
        (158, 600, ROWS),
        # Larger than a cache: depth and rows are split, and the result bypasses the caches.
        *((70, 3330, [250]), (1040, 65, [600]), (1040, 96, [530]), (33, 6000, [135])),
    ],
)
def test_a_product_equals_the_double_precision_one(
    backend: Backend, width: int, depth: int, all_rows: Sequence[int], dtype: torch.dtype
) -> None:
    weight = (torch.randn(width, depth) / depth**0.5).to(dtype)
    bias = torch.randn(width) if width % 2 or width > 1000 else None
    for rows in all_rows:
        x = torch.randn(rows, depth)
        product = ops.linear(x, weight, bias, backend=backend)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert product.dtype == torch.float32
        allowed = torch.full_like(expected, _tolerance(dtype, backend))
        if dtype == torch.bfloat16 and depth < 32:
            # The rounding errors of a few terms do not average out: 6 terms may be off by 0.02.
            allowed += 2**-8 * (x.abs().double() @ weight.abs().double().T)
        assert ((product - expected).abs() <= allowed).all(), rows


@pytest.mark.parametrize(("width", "depth"), [(64, 1), (50, 32), (130, 100)])
def test_a_product_of_fp32_uses_all_bits_of_both_operands(
    backend: Backend, width: int, depth: int
) -> None:
    """Some instruction sets split fp32 into bf16 parts and compute six products of them.

    Without any one of these the error would be 2^-16 of the largest terms.
    """
    for rows in (1, 7, 13, 40, 64, 100, 300):
        x, weight = (
            torch.randn(size, depth) * torch.randn(size, depth).exp() for size in (rows, width)
        )
        product = ops.linear(x, weight, backend=backend).double()
        x, weight = x.double(), weight.double()
        # 2^-21 of each term is omitted; the roundings of fp32 sums mostly average out.
        allowed = (2**3 + 1 + 2 * depth**0.5) * 2**-24 * (x.abs() @ weight.abs().T)
        assert ((product - x @ weight.T).abs() <= allowed).all()


def test_a_product_of_the_largest_values_of_fp32_is_finite(backend: Backend) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.zeros(70, 64)
    x[:, 5] = largest
    weight = torch.full((40, 64), 0.5)
    product = ops.linear(x, weight, backend=backend)
    torch.testing.assert_close(product, torch.full((70, 40), largest / 2), rtol=1e-6, atol=0)


def test_rows_of_a_product_may_be_strided(backend: Backend) -> None:
    wide, weight = torch.randn(20, 100), torch.randn(33, 40)
    for rows in (3, 20):
        x = wide[:rows, 17:57]
        torch.testing.assert_close(
            ops.linear(x, weight, backend=backend), x.contiguous() @ weight.T, rtol=0, atol=1e-4
        )


def test_no_memory_after_a_matrix_is_read(backend: Backend) -> None:
    """The memory after it holds NaN, one of which would make a sum NaN."""
    for dtype, depth, rows in (
        (torch.float32, 37, 2),
        (torch.bfloat16, 37, 2),
        (torch.bfloat16, 37, 20),
        (torch.float32, 37, 20),
        (torch.float32, 37, 70),
    ):
        memory = torch.full((11 * depth + 64,), float("nan"), dtype=dtype)
        weight = memory[: 11 * depth].view(11, depth)
        weight.copy_(torch.randn(11, depth))
        x = torch.full((rows * depth + 64,), float("nan"))
        x[: rows * depth] = torch.randn(rows * depth)
        product = ops.linear(x[: rows * depth].view(rows, depth), weight, backend=backend)
        assert product.isfinite().all()


def test_a_nan_affects_only_its_row(backend: Backend) -> None:
    for rows in (5, 40):
        x = torch.randn(rows, 64)
        x[2, 10] = float("nan")
        product = ops.linear(x, torch.randn(50, 64), backend=backend)
        nan_rows = product.isnan().any(dim=1)
        assert nan_rows.nonzero().flatten().tolist() == [2]


def test_argmax_is_the_first_largest_value_and_rows_with_nan_or_infinity_are_reported(
    backend: Backend,
) -> None:
    for width in (1, 7, 64, 1000, 5003):
        x = torch.randn(40, width)
        x[1] = x[1, 0]
        x[2, -1] = x[3, 0] = x[4, width // 2] = 9.0
        not_finite = {5: float("nan"), 6: float("inf"), 7: -float("inf")}
        for row, value in not_finite.items():
            x[row, row * 131 % width] = value
        indices, finite = ops.argmax(x, backend=backend)
        assert finite.tolist() == [row not in not_finite for row in range(40)]
        assert indices[finite].tolist() == x.argmax(dim=1)[finite].tolist()


@pytest.mark.parametrize(
    ("x", "weight", "bias", "reason"),
    [
        (torch.zeros(3, 4), torch.zeros(5, 6), None, r"x \(3, 4\) does not fit weight \(5, 6\)"),
        (torch.zeros(3, 4), torch.zeros(5, 4).half(), None, "float16"),
        (torch.zeros(3, 4), torch.zeros(4, 5).T, None, "must be contiguous"),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(4), r"bias \(4,\)"),
    ],
)
def test_wrong_operands_of_a_product_are_refused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ops.linear(x, weight, bias, backend="cpu")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 5, 64, 1000])
def test_a_row_is_its_tokens_embedding_or_an_image_feature(
    backend: Backend, width: int, dtype: torch.dtype
) -> None:
    """Rows are equal bitwise. A token that an image feature replaces may lie outside the table."""
    table, features = torch.randn(37, width).to(dtype), torch.randn(9, width)
    for rows in (0, 1, 70):
        tokens = torch.randint(0, 37, (rows,))
        expected = table[tokens].float()
        assert torch.equal(ops.embed(tokens, table, backend=backend), expected)
        if rows < 70:
            continue
        tokens[[6, 8]] = 37
        images = [
            (5, torch.tensor([-1, 3, 4, 5, -1, 0]), features),
            (64, torch.tensor([8, -1, 7, 7, -1, 1]), features),
        ]
        for first_row, feature_rows, _ in images:
            for index, feature_row in enumerate(feature_rows.tolist()):
                if feature_row >= 0:
                    expected[first_row + index] = features[feature_row]
        out = torch.full((rows, width), torch.nan)
        assert ops.embed(tokens, table, images, out=out, backend=backend) is out
        assert torch.equal(out, expected)


def test_a_token_or_feature_row_out_of_range_is_refused(backend: Backend) -> None:
    table, features = torch.randn(37, 8), torch.randn(9, 8)
    tokens = torch.randint(0, 37, (6,))
    for token in (37, -1):
        with pytest.raises(IndexError):
            ops.embed(torch.tensor([1, token, 2]), table, backend=backend)
    with pytest.raises(IndexError):
        ops.embed(tokens, table, [(0, torch.tensor([0, 9]), features)], backend=backend)


def test_wrong_arguments_of_embed_are_refused() -> None:
    table, tokens = torch.randn(37, 8), torch.zeros(6, dtype=torch.int64)
    rows = torch.tensor([0, 1])
    for images, match in (
        ([(0, rows, torch.randn(9, 7))], r"features \(9, 7\)"),
        ([(0, rows, torch.randn(9, 8).bfloat16())], "bfloat16 for 2 rows"),
        ([(5, rows, torch.randn(9, 8))], "2 rows from 5"),
    ):
        with pytest.raises(ValueError, match=match):
            ops.embed(tokens, table, images, backend="cpu")
    with pytest.raises(ValueError, match="float16"):
        ops.embed(tokens, table.half(), backend="cpu")
    with pytest.raises(ValueError, match="int32"):
        ops.embed(tokens.int(), table, backend="cpu")


@drawn(width=[1, 5, 64, 1000], rows=[0, 1, 70], with_delta=[True, False])
def test_add_and_norm_equal_those_of_double_precision(
    backend: Backend, width: int, rows: int, with_delta: bool
) -> None:
    hidden, weight = torch.randn(rows, width), torch.randn(width)
    delta = torch.randn(rows, width) if with_delta else None
    expected = hidden.double() + (0 if delta is None else delta.double())
    out = ops.add_norm(hidden, delta, weight, 1e-5, backend=backend)
    torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=1e-6)
    mean = expected.square().mean(1, keepdim=True)
    expected = expected / (mean + 1e-5).sqrt() * weight
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rows"),
    [(1, 1, 1, 70), (4, 2, 20, 70), (6, 3, 128, 70), (4, 2, 20, 1), (4, 2, 20, 0)],
)
def test_the_norms_of_heads_equal_those_of_double_precision(
    backend: Backend, heads: int, kv_heads: int, dim: int, rows: int
) -> None:
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    weights = torch.randn(2, dim)
    counts = [heads, kv_heads, kv_heads]
    queries, keys, values = qkv.double().view(rows, sum(counts), dim).split(counts, dim=1)
    normed = [
        (part / (part.square().mean(2, keepdim=True) + 1e-5).sqrt() * weight).flatten(1)
        for part, weight in ((queries, weights[0]), (keys, weights[1]))
    ]
    expected = torch.cat([*normed, values.flatten(1)], dim=1)
    ops.head_norm(qkv, weights[0], weights[1], heads, 1e-5, backend=backend)
    torch.testing.assert_close(qkv.double(), expected, rtol=1e-5, atol=1e-5)


def test_norms_of_heads_that_do_not_fit_are_refused(backend: Backend) -> None:
    weight = torch.ones(8)
    for width in (8 * 4, 8 * 6 - 1, 8 * 5):
        with pytest.raises(ValueError, match="query heads of 8 values"):
            ops.head_norm(torch.randn(3, width), weight, weight, 4, 1e-5, backend=backend)
    for other in (weight[:4], weight.double()):
        with pytest.raises(ValueError, match=r"must both be \[8\] of fp32"):
            ops.head_norm(torch.randn(3, 48), weight, other, 4, 1e-5, backend=backend)


def test_the_gate_equals_that_of_double_precision(backend: Backend) -> None:
    for rows, width in ((1, 1), (3, 37), (90, 700)):
        x = 20 * torch.randn(rows, 2 * width)
        x[0, 0], x[-1, width - 1] = 100, -100  # exp(100) overflows fp32
        gates, ups = x.double().chunk(2, dim=1)
        expected = gates * torch.sigmoid(gates) * ups
        torch.testing.assert_close(
            ops.gate(x, backend=backend).double(), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("inner", "depth"), [(1, 1), (5, 32), (16, 64), (37, 100), (100, 128), (150, 600)]
)
def test_a_gated_product_equals_the_gate_of_the_product(
    backend: Backend, inner: int, depth: int, dtype: torch.dtype
) -> None:
    weight = (torch.randn(2 * inner, depth) / depth**0.5).to(dtype)
    bias = torch.randn(2 * inner) if inner % 2 else None
    matrix = ops.Matrix(weight, bias)
    for rows in (0, 1, 3, 4, 16, 17, 33, 70, 270, 530):
        x = torch.randn(rows, depth)
        product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        gates, ups = product.chunk(2, dim=1)
        expected = gates * torch.sigmoid(gates) * ups
        gated = matrix.gated(x, backend=backend)
        tolerance = _tolerance(dtype, backend)
        # Both factors have rounding errors, so that of their product grows with its size.
        torch.testing.assert_close(gated.double(), expected, rtol=tolerance, atol=4 * tolerance)
        scratch, out = torch.empty(rows, 2 * inner), torch.empty(rows, inner)
        assert matrix.gated(x, scratch=scratch, out=out, backend=backend) is out
        assert torch.equal(out, gated)


def test_a_matrix_with_an_odd_number_of_rows_cannot_be_gated(backend: Backend) -> None:
    with pytest.raises(ValueError, match="even number of rows"):
        ops.Matrix(torch.randn(3, 4)).gated(torch.randn(2, 4), backend=backend)


def test_the_gate_and_norm_of_nan_are_nan(backend: Backend) -> None:
    x = torch.randn(2, 64)
    x[1, 3] = float("nan")
    assert ops.gate(x, backend=backend).isnan().sum() == 1
    normed = ops.add_norm(x.clone(), None, torch.ones(64), 1e-5, backend=backend)
    assert normed[1].isnan().all()
    assert normed[0].isfinite().all()


def test_an_unknown_backend_fails_at_the_start_and_not_in_each_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLORA_KERNELS", "fast")
    with backends.override("kernels", None):
        with pytest.raises(InvalidArgument, match="it must be"):
            Engine(Options(model=CHECKPOINT))
        with pytest.raises(InvalidArgument, match="it must be"):
            VisionEncoder(tmp_path, threads=1)


@compiled
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize("depth", [64, 65, 90])
def test_a_tile_unit_multiplies_bf16_from_two_rows_on(rows: int, depth: int) -> None:
    """The unit rounds x to bf16, which plain C++ does not; an odd depth is padded."""
    x, weight = torch.randn(rows, depth), torch.randn(40, depth).bfloat16()
    rounded = x.bfloat16() if rows >= 2 else x
    with tiles.isa("twin"):
        product = ops.linear(x, weight)
    expected = rounded.double() @ weight.double().T
    torch.testing.assert_close(product.double(), expected, rtol=0, atol=1e-4)


def test_subnormal_numbers_are_flushed_to_zero_only_inside_a_kernel(threads: int) -> None:
    tiny = torch.full((40, 64), 1e-40)
    assert (tiny * 0.5 > 0).all()
    assert (ops.linear(tiny, torch.randn(300, 64)) == 0).all()
    assert (tiny * 0.5 > 0).all()
