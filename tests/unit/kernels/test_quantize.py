"""Tests of the quantization of float matrices to int8 and int4."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.drawing import cases_of
from vlora.backends import Backend
from vlora.kernels import quantize as quantize_module
from vlora.kernels.formats import Format
from vlora.kernels.quantize import CONVERTED_AT_ONCE, quantize
from vlora.kernels.quantized import (
    SYMMETRIC_ZERO,
    ZERO_STEPS,
    QuantizedWeight,
    allocate,
    dequantize,
    unpack,
)

FORMATS = [
    Format(8, None),
    Format(8, 32),
    Format(8, 128),
    *(Format(4, group, zeros=True) for group in (32, 64, 128)),
    *(Format(4, group) for group in (32, 64, 128)),
]
INT8, INT4 = FORMATS[:3], FORMATS[3:6]
each_form = pytest.mark.parametrize(
    "form", FORMATS, ids=lambda form: form.name + ", zeros" * form.zeros
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEPTHS = (1, 30, 64, 90, 100, 192, 576, 2100)


def quantized(
    matrix: torch.Tensor, form: Format, backend: Backend, whole_zeros: bool = False
) -> QuantizedWeight:
    """Return the quantized matrix, in memory that had other content."""
    rows, depth = matrix.shape
    memory = torch.full((form.matrix_bytes(rows, depth),), 0xA5, dtype=torch.uint8)
    weight = allocate(form, rows, depth, torch.float32, memory)
    quantize(matrix, weight, whole_zeros=whole_zeros, backend=backend)
    return weight


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    zeros = a.zeros is None or (b.zeros is not None and torch.equal(a.zeros, b.zeros))
    return zeros and torch.equal(a.values, b.values) and torch.equal(a.scales, b.scales)


@each_form
def test_each_instruction_set_quantizes_as_the_reference(backend: Backend, form: Format) -> None:
    for dtype, depth, shift, whole in cases_of(
        dtype=DTYPES, depth=DEPTHS, shift=(0.0, 0.5, -3.0), whole_zeros=(False, True)
    ):
        matrix = torch.randn(100, depth) + shift
        matrix[3], matrix[4] = 0, 1.5
        few = dtype == torch.float16
        for row, size in ((5, 1e3 if few else 1e30), (6, 1e-3 if few else 1e-30)):
            matrix[row] *= size
        matrix = matrix.to(dtype)
        weight, expected = (quantized(matrix, form, b, whole) for b in (backend, "reference"))
        assert same(weight, expected)


@pytest.mark.parametrize(("form", "limit"), list(zip(INT4, (1.15, 1.08, 1.04), strict=True)))
def test_whole_zeros_of_int4_cost_little(backend: Backend, form: Format, limit: float) -> None:
    matrix = torch.randn(64, 576)
    matrix[:8] += 3  # Zeros of positive groups are 0.
    errors = []
    for whole in (False, True):
        weight = quantized(matrix, form, backend, whole)
        errors.append(float((dequantize(weight) - matrix)[8:].square().sum()))
    assert weight.zeros is not None
    zeros = SYMMETRIC_ZERO + weight.zeros[:, : 576 // (form.group or 1)] / ZERO_STEPS
    assert torch.equal(zeros, zeros.round().clamp(0, 15))
    assert 1 < errors[1] / errors[0] <= limit


@each_form
def test_a_matrix_is_quantized_alike_by_any_number_of_threads_and_in_any_layout(
    backend: Backend, form: Format
) -> None:
    matrix = torch.randn(300, 1000)
    weights = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        weights.append(quantized(matrix, form, backend))
    strided = torch.zeros(300, 1024)
    strided[:, :1000] = matrix
    weights.append(quantized(strided[:, :1000], form, backend))
    weights.append(quantized(matrix.T.contiguous().T, form, backend))
    weights.append(quantized(matrix.double(), form, backend))
    assert all(same(weight, weights[0]) for weight in weights)


@each_form
def test_the_first_row_with_a_value_that_is_not_finite_is_named(
    backend: Backend, form: Format
) -> None:
    for dtype, bad, (row, column) in cases_of(
        dtype=DTYPES,
        bad=(math.nan, math.inf, -math.inf),
        place=((0, 0), (17, 999), (39, 500)),
    ):
        matrix = torch.ones(40, 1000, dtype=dtype)
        matrix[row, column] = matrix[39, 3] = bad
        with pytest.raises(ValueError, match=f"^row {row} has a value that is not finite"):
            quantized(matrix, form, backend)


def test_matrices_of_other_types_are_converted_in_parts(backend: Backend) -> None:
    rows = 2 * CONVERTED_AT_ONCE // 1000 + 50
    matrix = torch.randn(rows, 1000).half()
    form = Format(8, None)
    assert same(quantized(matrix, form, backend), quantized(matrix.float(), form, backend))
    matrix[rows - 3] = float("inf")
    with pytest.raises(ValueError, match=f"^row {rows - 3} has"):
        quantized(matrix, form, backend)


@pytest.mark.parametrize("form", INT4, ids=lambda form: form.name)
def test_weights_whose_sums_overflow_are_refused_as_int4(backend: Backend, form: Format) -> None:
    large = torch.full((4, 256), 3e38)
    alternating = large * (-1) ** torch.arange(256)
    for matrix in (large, alternating):
        with pytest.raises(ValueError, match=r"^row 0 .* too large to be quantized"):
            quantized(matrix, form, backend)


@each_form
def test_tiny_weights_are_quantized_to_finite_ones(backend: Backend, form: Format) -> None:
    for size in (1e-20, 1e-36, 1e-39, 1e-45):
        matrix = torch.randn(8, 256) * size
        error = dequantize(quantized(matrix, form, backend)) - matrix
        assert (error.abs() <= 0.5 * matrix.abs().max() + 1e-36).all()


def test_a_matrix_of_another_shape_is_refused(backend: Backend) -> None:
    weight = allocate(Format(8, None), 4, 64, torch.float32)
    with pytest.raises(ValueError, match=r"weight \(4, 63\) must be \(4, 64\)"):
        quantize(torch.zeros(4, 63), weight, backend=backend)


@pytest.mark.parametrize("form", INT8, ids=lambda form: form.name)
def test_no_group_of_int8_has_a_larger_error_than_by_its_largest_value(
    backend: Backend, form: Format
) -> None:
    for depth in (30, 64, 100, 576):
        matrix = torch.randn(20, depth)
        matrix[3] = 0
        restored = dequantize(quantized(matrix, form, backend))
        assert (restored[3] == 0).all()
        group = form.group or depth
        for start in range(0, depth, group):
            part = matrix[:, start : start + group]
            step = part.abs().amax(dim=1, keepdim=True).clamp_min(1e-9) / 127
            plain = (part / step).round() * step - part
            error = restored[:, start : start + group] - part
            assert (error.norm(dim=1) <= 1.0001 * plain.norm(dim=1)).all()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_has_a_smaller_error_than_rounding_between_the_extremes(
    backend: Backend, group: int
) -> None:
    """Each group of a matrix that is quantized in several parts, compared in double precision."""
    rows, depth = 300, 5 * 128
    for shift in (0.0, 0.5, -3.0):
        matrix = torch.randn(rows, depth) + shift
        weight = quantized(matrix, Format(4, group, zeros=True), backend)
        grouped = matrix.double().view(rows, -1, group)
        low = grouped.amin(dim=2, keepdim=True).clamp_max(0)
        step = (grouped.amax(dim=2, keepdim=True).clamp_min(0) - low) / 15
        plain = ((grouped - low) / step).round() * step + low - grouped
        error = dequantize(weight).double().view(rows, -1, group) - grouped
        assert (error.norm(dim=2) <= 1.1 * plain.norm(dim=2)).all()
        assert error.norm() <= 0.99 * plain.norm()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_group_of_int4_has_a_larger_error_than_fitted_from_its_extremes(
    backend: Backend, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(200, 4 * group, generator=torch.Generator().manual_seed(2))
    form = Format(4, group, zeros=True)

    def errors(backend: Backend) -> torch.Tensor:
        error = dequantize(quantized(matrix, form, backend)) - matrix
        norms: torch.Tensor = error.view(-1, group).norm(dim=1)
        return norms

    best = errors(backend)
    monkeypatch.setattr(quantize_module, "RANGES", (1.0,))
    from_extremes = errors("reference")
    assert (best <= 1.0001 * from_extremes).all()
    assert best.norm() < 0.99 * from_extremes.norm()


@pytest.mark.parametrize("group", [32, 128])
def test_int4_represents_groups_of_zeros_and_of_one_value(backend: Backend, group: int) -> None:
    matrix = torch.tensor([0.0, 0.25, -7.0, 1e-30])[:, None].expand(4, 200)
    weight = quantized(matrix, Format(4, group, zeros=True), backend)
    torch.testing.assert_close(dequantize(weight), matrix, rtol=1e-6, atol=0)


def test_quantizing_int4_again_changes_nothing(backend: Backend) -> None:
    weight = allocate(Format(4, 64, zeros=True), 16, 128, torch.float32)
    values = torch.randint(0, 16, (16, 128), dtype=torch.int32)
    values[:, (0, 64)], values[:, (1, 65)] = 0, 15
    scales = torch.rand(16, 2) + 0.5
    zeros = torch.randint(0, 15 * ZERO_STEPS, (16, 2)) / ZERO_STEPS
    weight.fill(values, scales, zeros)
    again = quantized(dequantize(weight), weight.format, backend)
    assert torch.equal(unpack(again), values)
    assert weight.zeros is not None
    assert again.zeros is not None
    assert torch.equal(again.zeros, weight.zeros)
    torch.testing.assert_close(again.scales, weight.scales, rtol=1e-5, atol=0)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_without_zeros_has_a_smaller_error_than_by_its_largest_values(
    backend: Backend, group: int
) -> None:
    matrix = torch.randn(300, 5 * 128, generator=torch.Generator().manual_seed(1))
    matrix[:20] = matrix[:20].abs()
    grouped = matrix.view(300, -1, group)
    step = grouped.abs().amax(dim=2, keepdim=True) / 7.5
    plain = (grouped / step).round().clamp(-8, 7) * step - grouped
    error = dequantize(quantized(matrix, Format(4, group), backend)).view(grouped.shape) - grouped
    assert (error.norm(dim=2) <= 1.001 * plain.norm(dim=2)).all()
    assert error.norm() <= 0.98 * plain.norm()
