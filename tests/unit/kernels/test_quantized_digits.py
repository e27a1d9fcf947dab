"""Tests of products of few rows with int8 weights and `dtype: bfloat16`.

No kernel rounds such rows to bf16 if a few signed bytes represent them more exactly. Instruction
sets with products of bf16 pairs multiply bytes instead, and the others multiply in fp32.
"""

from __future__ import annotations

import pytest
import torch

from vlora.backends import Backend
from vlora.kernels.formats import Format
from vlora.kernels.quantized import QuantizedMatrix, QuantizedWeight, allocate, dequantize

SHAPES = ((3, 40), (40, 608), (131, 257), (66, 1100))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same matrices in every run."""
    torch.manual_seed(0)


def positive_weight(width: int, depth: int) -> QuantizedWeight:
    """Return a matrix without negative weights, so that rounding errors of x add up in a product.

    The even outputs have the weight 0 for every sixteenth input, from the first on.
    """
    weight = allocate(Format(8, None), width, depth, torch.bfloat16)
    values = torch.randint(1, 128, (width, depth))
    values[::2, ::16] = 0
    weight.fill(values, (torch.rand(width, 1) + 0.5) / 128, None)
    return weight


def rows_between_bf16_values(rows: int, depth: int) -> torch.Tensor:
    """Return values that are all rounded down to bf16, with an error of 0.9 · 2⁻⁹."""
    return (1 + 0.9 * 2**-9) * 2.0 ** torch.randint(-2, 3, (rows, depth))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("large", [1.0, 1e3], ids=["two digits", "three digits"])
@pytest.mark.usefixtures("_restore_threads")
def test_few_rows_are_multiplied_more_exactly_than_in_bf16(
    backend: Backend, large: float, threads: int
) -> None:
    torch.set_num_threads(threads)
    for width, depth in SHAPES:
        weight, bias = positive_weight(width, depth), torch.randn(width)
        exact, matrix = dequantize(weight).double(), QuantizedMatrix(weight, bias)
        for rows in (*range(1, 9), 11, 13, 16):
            x = torch.zeros(rows, depth + 5)[:, 2 : depth + 2]
            x.copy_(rows_between_bf16_values(rows, depth))
            x[:, ::16] *= large
            expected = x.double() @ exact.T
            error = (matrix(x, backend=backend) - bias - expected).abs()
            assert (error <= 2**-12 * expected + 1e-6).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_beside_one_that_is_not_finite_are_as_exact(backend: Backend, bad: float) -> None:
    weight = positive_weight(34, 300)
    exact, matrix = dequantize(weight).double(), QuantizedMatrix(weight)
    for rows in (2, 7, 16):
        x = rows_between_bf16_values(rows, 300)
        x[1, 299] = bad
        product = matrix(x, backend=backend)
        assert not product[1].isfinite().any()
        others = torch.arange(rows) != 1
        expected = x[others].double() @ exact.T
        assert ((product[others] - expected).abs() <= 2**-12 * expected).all()


def test_sums_of_the_largest_weights_and_values_do_not_overflow(backend: Backend) -> None:
    """The depth is the largest for which digits are used, and all weights are -128."""
    depth = 1 << 16
    weight = allocate(Format(8, None), 8, depth, torch.bfloat16)
    weight.fill(torch.full((8, depth), -128), torch.full((8, 1), 2.0**-7), None)
    matrix = QuantizedMatrix(weight)
    for value in (1.0, -1.0):
        for rows in (1, 3):
            product = matrix(torch.full((rows, depth), value), backend=backend)
            torch.testing.assert_close(
                product, torch.full((rows, 8), -value * depth), rtol=1e-5, atol=0
            )
