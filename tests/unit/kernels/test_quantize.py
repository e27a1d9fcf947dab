"""Tests of the quantization of float matrices to int8 and int4."""

from __future__ import annotations

import pytest
import torch

from vlora.kernels import quantize as quantize_module
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import ZERO_STEPS, Format, allocate, dequantize, unpack


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same matrices in every run."""
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "form", [Format(8, None), Format(8, 32), Format(8, 128)], ids=lambda form: form.name
)
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
    weight = allocate(Format(4, 64, zeros=True), 16, 128, torch.float32)
    values = torch.randint(0, 16, (16, 128), dtype=torch.int32)
    values[:, (0, 64)], values[:, (1, 65)] = 0, 15
    scales = torch.rand(16, 2) + 0.5
    zeros = torch.randint(0, 15 * ZERO_STEPS, (16, 2)) / ZERO_STEPS
    weight.fill(values, scales, zeros)
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
