"""Tests of products with quantized matrices against double precision, in every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.machine import is_compiled
from vlora import native
from vlora.backends import Backend
from vlora.kernels import quantize as quantize_module
from vlora.kernels import quantized
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import (
    ZERO_STEPS,
    Format,
    QuantizedMatrix,
    QuantizedWeight,
    allocate,
    dequantize,
    unpack,
)

FORMATS = [
    Format(8, None),
    Format(8, 32),
    Format(8, 128),
    *(Format(4, group, zeros) for group, zeros in ((32, True), (64, False), (128, True))),
]
SHAPES = ((1, 1), (50, 100), (131, 257))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same matrices in every run."""
    torch.manual_seed(0)


def random_weight(
    form: Format, width: int, depth: int, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Return a matrix of all possible values whose products are about 1."""
    weight = allocate(form, width, depth, dtype)
    low, high = (0, 16) if form.bits == 4 else (-128, 128)
    groups = form.groups(depth)
    scales = (torch.rand(width, groups) + 0.5) / (high - low) / depth**0.5
    zeros = torch.randint(-64, 192, (width, groups)) / ZERO_STEPS if form.zeros else None
    weight.fill(torch.randint(low, high, (width, depth)), scales, zeros)
    return weight


def check(
    weight: QuantizedWeight,
    all_rows: Sequence[int],
    backend: Backend,
    bias: torch.Tensor | None = None,
) -> None:
    """Compare products with those of the dequantized matrix in double precision."""
    matrix = dequantize(weight).double()
    for rows in all_rows:
        x = torch.randn(rows, weight.depth)
        product = QuantizedMatrix(weight, bias)(x, backend=backend)
        expected = x.double() @ matrix.T + (0 if bias is None else bias.double())
        allowed = torch.full_like(expected, 2e-5)
        if weight.dtype == torch.bfloat16 and backend != "reference":
            # Both factors may be rounded to bf16; the errors of a few terms do not average out.
            # int4 may be rounded before its zeros are subtracted.
            rounded = matrix.abs()
            if weight.zeros is not None:
                middle = replace(weight, format=Format(4, weight.format.group), zeros=None)
                rounded = torch.maximum(rounded, dequantize(middle).abs().double())
            allowed += 2**-7 * (x.abs().double() @ rounded.T)
        assert ((product - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.zeros}")
def test_a_product_equals_that_of_the_dequantized_matrix(
    backend: Backend, form: Format, dtype: torch.dtype
) -> None:
    for width, depth in SHAPES:
        bias = torch.randn(width) if width % 2 else None
        check(random_weight(form, width, depth, dtype), (0, 1, 2, 5, 8, 9, 70), backend, bias)


@pytest.mark.parametrize("form", [Format(8, None), Format(4, 64)], ids=lambda form: form.name)
def test_large_matrices_are_multiplied_in_pieces(backend: Backend, form: Format) -> None:
    """A matrix of several pieces, and of several blocks of widened rows."""
    for width, depth in ((700, 1100), (40, 5000)):
        weight = random_weight(form, width, depth, torch.bfloat16)
        check(weight, (1, 6, 20, 66), backend)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.zeros}")
def test_rows_may_be_strided_and_inputs_reordered(backend: Backend, form: Format) -> None:
    wide = torch.randn(20, 300)
    for rows in (3, 20):
        weight = random_weight(form, 33, 100)
        ordered = QuantizedWeight(
            form,
            weight.values,
            weight.scales,
            weight.zeros,
            100,
            torch.float32,
            order=torch.randperm(100),
        )
        x = wide[:rows, 17:117]
        for each in (weight, ordered):
            product = QuantizedMatrix(each)(x, backend=backend)
            torch.testing.assert_close(product, x @ dequantize(each).T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 11, 70])
def test_a_gated_product_is_the_gate_of_the_product(backend: Backend, rows: int) -> None:
    matrix = QuantizedMatrix(random_weight(Format(4, 32), 96, 130), torch.randn(96))
    x = torch.randn(rows, 130)
    gates, ups = matrix(x, backend="reference").chunk(2, dim=1)
    expected = torch.nn.functional.silu(gates) * ups
    torch.testing.assert_close(matrix.gated(x, backend=backend), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.zeros}")
def test_no_memory_after_rows_of_x_is_read(backend: Backend, form: Format) -> None:
    for rows in (1, 3, 12):
        memory = torch.full((rows * 37 + 64,), float("nan"))
        x = memory[: rows * 37].view(rows, 37)
        x.copy_(torch.randn(rows, 37))
        assert QuantizedMatrix(random_weight(form, 11, 37))(x, backend=backend).isfinite().all()


@pytest.mark.parametrize("form", [f for f in FORMATS if f.bits == 8], ids=lambda form: form.name)
def test_no_group_of_int8_has_a_larger_error_than_by_its_largest_value(form: Format) -> None:
    for depth in (30, 64, 100, 576):
        matrix = torch.randn(20, depth)
        matrix[3] = 0
        weight = allocate(form, 20, depth, torch.float32)
        quantize(matrix, weight)
        restored = dequantize(weight)
        assert (restored[3] == 0).all()
        group = form.group or depth
        for start in range(0, depth, group):
            part = matrix[:, start : start + group]
            step = part.abs().amax(dim=1, keepdim=True).clamp_min(1e-9) / 127
            plain = (part / step).round() * step - part
            error = restored[:, start : start + group] - part
            assert (error.norm(dim=1) <= 1.0001 * plain.norm(dim=1)).all()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shift", [0.0, 0.5, -3.0])
def test_int4_has_a_smaller_error_than_rounding_between_the_extremes(
    group: int, shift: float
) -> None:
    """Each group of a matrix that is quantized in several parts, compared in double precision."""
    rows, depth = 300, 5 * 128
    matrix = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1)) + shift
    weight = allocate(Format(4, group, zeros=True), rows, depth, torch.float32)
    quantize(matrix, weight)
    grouped = matrix.double().view(rows, -1, group)
    low = grouped.amin(dim=2, keepdim=True).clamp_max(0)
    step = (grouped.amax(dim=2, keepdim=True).clamp_min(0) - low) / 15
    plain = ((grouped - low) / step).round() * step + low - grouped
    error = dequantize(weight).double().view(rows, -1, group) - grouped
    assert (error.norm(dim=2) <= 1.1 * plain.norm(dim=2)).all()
    assert error.norm() <= 0.99 * plain.norm()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_group_of_int4_has_a_larger_error_than_fitted_from_its_extremes(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(200, 4 * group, generator=torch.Generator().manual_seed(2))
    errors = []
    for ranges in (quantize_module.RANGES, (1.0,)):
        monkeypatch.setattr(quantize_module, "RANGES", ranges)
        weight = allocate(Format(4, group, zeros=True), *matrix.shape, torch.float32)
        quantize(matrix, weight)
        errors.append((dequantize(weight) - matrix).view(-1, group).norm(dim=1))
    best, from_extremes = errors
    assert (best <= 1.0001 * from_extremes).all()
    assert best.norm() < 0.99 * from_extremes.norm()


@pytest.mark.parametrize("group", [32, 128])
def test_int4_represents_groups_of_zeros_and_of_one_value(group: int) -> None:
    matrix = torch.tensor([0.0, 0.25, -7.0, 1e-30])[:, None].expand(4, 200)
    weight = allocate(Format(4, group, zeros=True), 4, 200, torch.float32)
    quantize(matrix, weight)
    torch.testing.assert_close(dequantize(weight), matrix, rtol=1e-6, atol=0)


def test_quantizing_int4_again_changes_nothing() -> None:
    weight = random_weight(Format(4, 64, zeros=True), 16, 128)
    values = unpack(weight)
    values[:, (0, 64)], values[:, (1, 65)] = 0, 15
    zeros = torch.randint(0, 15 * ZERO_STEPS, weight.scales.shape) / ZERO_STEPS
    weight.fill(values, weight.scales.clone(), zeros)
    again = allocate(weight.format, 16, 128, torch.float32)
    quantize(dequantize(weight), again)
    assert torch.equal(unpack(again), values)
    assert weight.zeros is not None
    assert again.zeros is not None
    assert torch.equal(again.zeros, weight.zeros)
    torch.testing.assert_close(again.scales, weight.scales, rtol=1e-5, atol=0)


def test_int4_without_zeros_is_not_quantized() -> None:
    with pytest.raises(ValueError, match="int4 needs zeros"):
        quantize(torch.ones(4, 64), allocate(Format(4, 32), 4, 64, torch.float32))


@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, None, False), (4, 16, False), (8, None, True), (3, 32, False)]
)
def test_other_formats_are_refused(bits: int, group: int | None, zeros: bool) -> None:
    with pytest.raises(ValueError, match="int4 needs groups of 32, 64 or 128"):
        Format(bits, group, zeros)


def test_parts_of_a_weight_are_checked() -> None:
    weight = random_weight(Format(4, 32), 8, 64)
    with pytest.raises(ValueError, match=r"scales \(8, 1\)"):
        QuantizedWeight(weight.format, weight.values, weight.scales[:, :1], None, 64, torch.float32)
    with pytest.raises(ValueError, match="bias"):
        QuantizedMatrix(weight, torch.zeros(7))
    with pytest.raises(ValueError, match="does not fit weight"):
        QuantizedMatrix(weight)(torch.zeros(2, 63))


def test_the_layout_has_the_same_constants_in_python_and_in_the_kernels() -> None:
    if not is_compiled():
        pytest.skip("the kernels are not compiled")
    module = native.kernels().quantized
    assert (module.BLOCK, module.WHOLE_ROW) == (quantized.BLOCK, quantized.WHOLE_ROW)
    assert module.MIDDLE == quantized.SYMMETRIC_ZERO
    assert module.ZERO_STEP == 1 / ZERO_STEPS
