"""Tests of products with quantized matrices against double precision, in every implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.atmm_problems import BF16, compiled
from tests.support.drawing import cases_of
from vlora import backends, native
from vlora.atmm import tiles
from vlora.backends import Backend
from vlora.kernels import formats, quantized
from vlora.kernels.formats import Format
from vlora.kernels.quantized import (
    ZERO_STEPS,
    QuantizedMatrix,
    QuantizedWeight,
    allocate,
    arrange,
    dequantize,
    fine_product,
    in_rows,
    preferred_rows,
    unpack,
)
from vlora.model.decoder_config import load_config
from vlora.model.loader import load_weights

FORMATS = [
    Format(8, None),
    Format(8, 32),
    Format(8, 128),
    *(Format(4, group, zeros) for group, zeros in ((32, True), (64, False), (128, True))),
]
INT4 = [form for form in FORMATS if form.bits == 4]
TYPES = (torch.float32, torch.bfloat16)
BAD = (math.nan, math.inf, -math.inf)
each_form = pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.zeros}")
each_type = pytest.mark.parametrize("dtype", TYPES)
SHAPES = ((1, 1), (50, 100), (131, 257), (8, 31), (48, 832))


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


def arranged(weight: QuantizedWeight, backend: Backend) -> QuantizedWeight:
    """Return a copy of a matrix in the layout of the backend's kernels."""
    copy = replace(
        weight,
        values=weight.values.clone(),
        scales=weight.scales.clone(),
        zeros=None if weight.zeros is None else weight.zeros.clone(),
    )
    return copy if backend == "reference" else arrange(copy)


def check(
    weight: QuantizedWeight,
    all_rows: Sequence[int],
    backend: Backend,
    bias: torch.Tensor | None = None,
) -> None:
    """Compare products with those of the dequantized matrix in double precision."""
    matrix, copy = dequantize(weight).double(), arranged(weight, backend)
    panel_rows = 0 if backend == "reference" or weight.format.bits == 8 else preferred_rows()
    assert copy.panel_rows == (panel_rows if panel_rows and len(matrix) % panel_rows == 0 else 0)
    multiplied = QuantizedMatrix(copy, bias)
    for rows in all_rows:
        x = torch.randn(rows, weight.depth)
        product = multiplied(x, backend=backend)
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


@each_type
@each_form
def test_a_product_equals_that_of_the_dequantized_matrix(
    backend: Backend, form: Format, dtype: torch.dtype
) -> None:
    for width, depth in SHAPES:
        bias = torch.randn(width) if width % 2 else None
        check(random_weight(form, width, depth, dtype), (0, 1, 2, 5, 8, 9, 70), backend, bias)


@pytest.mark.parametrize(
    ("width", "depth", "all_rows", "forms"),
    [
        # Several pieces, and several blocks of widened rows.
        (700, 1100, (1, 6, 20, 66), [(Format(8, None), BF16), (Format(4, 64), BF16)]),
        (40, 5000, (1, 6, 20, 66), [(Format(8, None), BF16), (Format(4, 64), BF16)]),
        # Larger than L2: written past the caches, since the rows are whole cache lines.
        (1040, 64, (513,), [(Format(4, 32, zeros=True), dtype) for dtype in TYPES]),
        # The depth is cut, because many rows do not fit the cache.
        (33, 4993, (257,), [(form, dtype) for form in FORMATS for dtype in TYPES]),
    ],
)
def test_products_larger_than_caches_are_computed_in_parts(
    backend: Backend, width: int, depth: int, all_rows: Sequence[int], forms: Any
) -> None:
    for form, dtype in forms:
        check(random_weight(form, width, depth, dtype), all_rows, backend)


@each_form
def test_rows_may_be_strided_and_inputs_reordered(backend: Backend, form: Format) -> None:
    wide = torch.randn(20, 300)
    for rows in (3, 20):
        weight = random_weight(form, 32, 100)
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
        for each in (weight, arranged(weight, backend), ordered):
            product = QuantizedMatrix(each)(x, backend=backend)
            torch.testing.assert_close(product, x @ dequantize(each).T, rtol=0, atol=1e-4)


@each_type
@pytest.mark.parametrize("form", INT4, ids=lambda form: form.name)
def test_any_few_rows_are_multiplied_in_either_layout(
    backend: Backend, form: Format, dtype: torch.dtype
) -> None:
    """Numbers of outputs that fill panels, and one that does not; depths that end in any group."""
    for width, depth in ((32, 95), (72, 600), (48, 2100), (27, 600)):
        weight = random_weight(form, width, depth, dtype)
        check(weight, (*range(1, 18), 33, 49), backend, torch.randn(width))


def with_large_inputs(
    form: Format, width: int, dtype: torch.dtype = torch.float32
) -> tuple[QuantizedWeight, torch.Tensor]:
    """Return a matrix, and inputs that have the weight 0 in its first 8 outputs.

    Values of x that are far larger than the others of their group may be there.
    """
    weight = random_weight(form, width, 608, dtype)
    values, large = unpack(weight), torch.arange(5, 608, 32)
    values[:8, large] = values[:8, large + 3] = 8 if form.bits == 4 else 0
    zeros = torch.randint(-64, 192, weight.scales.shape) / ZERO_STEPS
    zeros[:8] = 8
    weight.fill(values, weight.scales.clone(), zeros if form.zeros else None)
    return weight, large


@each_form
def test_a_product_is_as_exact_as_a_sum_in_fp32(backend: Backend, form: Format) -> None:
    """Errors are relative to the sum of absolute products, for values of mixed magnitudes."""
    weight, large = with_large_inputs(form, 32)
    matrix, exact = QuantizedMatrix(arranged(weight, backend)), dequantize(weight).double()
    for rows in (1, 2, 3, 4, 7, 16, 17, 40):
        x = torch.randn(rows, 608)
        mixed = x * 10 ** torch.linspace(-8, 8, 608)[torch.randperm(608)]
        outliers = x.clone()
        outliers[:, large] *= 1e4
        two_outliers = outliers.clone()
        two_outliers[:, large + 3] *= 1e7
        for each in (x, mixed, outliers, two_outliers, x * 1e-18, outliers * 1e18):
            expected = each.double() @ exact.T
            sizes = each.abs().double() @ exact.abs().T
            error = (matrix(each.float(), backend=backend) - expected).abs()
            assert (error <= 2**-19 * sizes).all()


@pytest.mark.parametrize("form", [Format(8, None), Format(4, 32)], ids=lambda form: form.name)
def test_a_product_in_bf16_is_as_exact_as_its_rounding(backend: Backend, form: Format) -> None:
    weight, columns = with_large_inputs(form, 48, torch.bfloat16)
    matrix, exact = QuantizedMatrix(arranged(weight, backend)), dequantize(weight).double()
    for rows, large in product((1, 2, 5, 16, 17, 64, 65), (1.0, 1e2, 1e4, 1e11)):
        x = torch.randn(rows, 608)
        x[:, columns] *= large
        error = (matrix(x, backend=backend) - x.double() @ exact.T).abs()
        # Both factors may be rounded.
        assert (error <= 2**-7 * (x.abs().double() @ exact.abs().T)).all()


@each_form
def test_a_value_that_is_not_finite_spoils_its_row_only(backend: Backend, form: Format) -> None:
    """Matrices of three panels of 8 outputs, or of 16."""
    for dtype, bad, rows, width in cases_of(dtype=TYPES, bad=BAD, rows=(5, 21), width=(24, 48)):
        matrix = QuantizedMatrix(arranged(random_weight(form, width, 300, dtype), backend))
        x = torch.randn(rows, 300)
        expected = matrix(x, backend=backend)
        x[3, 290] = bad
        result = matrix(x, backend=backend)
        assert not result[3].isfinite().any()
        others = [row for row in range(rows) if row != 3]
        assert torch.equal(result[others], expected[others])


@each_type
@each_form
def test_rows_of_zeros_and_of_tiny_and_huge_values_are_multiplied(
    backend: Backend, form: Format, dtype: torch.dtype
) -> None:
    weight = random_weight(form, 16, 100, dtype)
    matrix = QuantizedMatrix(arranged(weight, backend))
    # Panels of AVX2 divide x, so that smaller values become subnormal.
    tiny = 1e-30 if form.bits == 8 else 1e-28
    each = torch.tensor([0.0, 1e-20, tiny, 1e-38, 1e-42, 1e20, 1e35])
    x = each[:, None].expand(7, 100).contiguous()
    exact = dequantize(weight).double()
    # In bf16, weights may be rounded before their zeros are subtracted.
    relative = 1e-6 if dtype == torch.float32 else 2**-7 * (4 if form.zeros else 1)
    for rows in (x, x[2:3].expand(2, 100).contiguous()):
        error = (matrix(rows, backend=backend) - rows.double() @ exact.T).abs()
        assert (error <= relative * (rows.abs().double() @ exact.abs().T) + 1e-33).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("depth", [1, 2, 31, 64, 100, 128, 4129])
@pytest.mark.parametrize("rows", [1, 7, 16, 301])
def test_stored_int4_is_packed_as_its_values(backend: Backend, rows: int, depth: int) -> None:
    values = torch.randint(16, (rows, -(-depth // 2) * 2))
    stored = (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)
    wider = torch.nn.functional.pad(stored, (0, 3), value=255)  # Its rows are not adjacent.
    for packed in (stored, wider[:, :-3], stored.T.contiguous().T):
        weight = allocate(Format(4, 32), rows, depth, torch.float32)
        weight.values.fill_(255)
        with backends.override("kernels", backend):
            weight.copy_values(packed)
        assert torch.equal(weight.values, quantized.pack(values, 4))
    for packed in (stored[1:], wider.expand(rows, -1).repeat(1, 40), stored.char()):
        with pytest.raises(ValueError, match="must be uint8"):
            weight.copy_values(packed)


@compiled
@pytest.mark.parametrize("panel_rows", [8, 16])
@pytest.mark.parametrize("form", INT4, ids=lambda form: form.name)
def test_a_matrix_keeps_its_weights_when_it_is_put_into_panels(
    form: Format, panel_rows: int
) -> None:
    for width, depth in ((panel_rows, 1), (5 * panel_rows, 130), (400, 6000)):
        weight = random_weight(form, width, depth)
        copy = arranged(weight, "reference")
        quantized.interleave(4, copy.values, copy.scales, copy.zeros, panel_rows)
        copy = replace(copy, panel_rows=panel_rows)
        assert not torch.equal(copy.values, weight.values)
        assert torch.equal(unpack(copy), unpack(weight))
        assert torch.equal(dequantize(copy), dequantize(weight))
        assert torch.equal(in_rows(copy).values, weight.values)


@pytest.mark.parametrize(("panel_rows", "isa"), [(8, "avx2"), (16, "amx and avx512_bf16")])
def test_other_instruction_sets_refuse_panels(backend: Backend, panel_rows: int, isa: str) -> None:
    weight = replace(random_weight(Format(4, 32), 16, 64), panel_rows=panel_rows)
    x = torch.zeros(3, 64)
    if backend == "reference" or preferred_rows() == panel_rows:
        assert QuantizedMatrix(weight)(x, backend=backend).isfinite().all()
        return
    with pytest.raises(ValueError, match=rf"panels of {panel_rows} rows, .* only {isa} can"):
        QuantizedMatrix(weight)(x, backend=backend)


def test_a_gated_product_is_the_gate_of_the_product(backend: Backend) -> None:
    weight = random_weight(Format(4, 32), 96, 130)
    matrix = QuantizedMatrix(arranged(weight, backend), torch.randn(96))
    for rows in (1, 4, 11, 70):
        x = torch.randn(rows, 130)
        gates, ups = matrix(x, backend="reference").chunk(2, dim=1)
        expected = torch.nn.functional.silu(gates) * ups
        torch.testing.assert_close(matrix.gated(x, backend=backend), expected, rtol=0, atol=1e-4)


@each_form
def test_no_memory_after_rows_of_x_is_read(backend: Backend, form: Format) -> None:
    for rows in (1, 3, 12):
        memory = torch.full((rows * 37 + 64,), math.nan)
        x = memory[: rows * 37].view(rows, 37)
        x.copy_(torch.randn(rows, 37))
        for width in (8, 11, 16):
            matrix = QuantizedMatrix(arranged(random_weight(form, width, 37), backend))
            assert matrix(x, backend=backend).isfinite().all()


@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, None, False), (4, 16, False), (8, None, True), (3, 32, False)]
)
def test_other_formats_are_refused(bits: int, group: int | None, zeros: bool) -> None:
    with pytest.raises(ValueError, match="int4 needs groups of 32, 64 or 128"):
        Format(bits, group, zeros)


def test_int8_in_groups_is_not_multiplied_with_quantized_activations() -> None:
    with pytest.raises(ValueError, match="dynamic needs int4, or int8 without groups"):
        Format(8, 32, dynamic=True)


def test_parts_of_a_weight_are_checked() -> None:
    weight = random_weight(Format(4, 32), 8, 64)
    with pytest.raises(ValueError, match=r"scales \(8, 1\)"):
        QuantizedWeight(weight.format, weight.values, weight.scales[:, :1], None, 64, torch.float32)
    with pytest.raises(ValueError, match="bias"):
        QuantizedMatrix(weight, torch.zeros(7))
    with pytest.raises(ValueError, match="does not fit weight"):
        QuantizedMatrix(weight)(torch.zeros(2, 63))


@compiled
def test_the_layout_has_the_same_constants_in_python_and_in_the_kernels() -> None:
    module = native.kernels().quantized
    assert (module.BLOCK, module.WHOLE_ROW) == (formats.BLOCK, formats.WHOLE_ROW)
    assert module.MIDDLE == quantized.SYMMETRIC_ZERO
    assert module.ZERO_STEP == 1 / ZERO_STEPS
    assert module.DYNAMIC_GROUP == formats.ACTIVATION_GROUP
    assert module.preferred_panel_rows() in (0, 8, quantized.TILE_PANEL_ROWS)


# ---- few rows with int8 weights in bf16 ----------------------------------------------------------
#
# No kernel rounds such rows to bf16 if a few signed bytes represent them more exactly. Instruction
# sets with products of bf16 pairs multiply bytes instead, and the others multiply in fp32.


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


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("large", [1.0, 1e3], ids=["two digits", "three digits"])
def test_few_rows_are_multiplied_more_exactly_than_in_bf16(backend: Backend, large: float) -> None:
    for width, depth in ((3, 40), (40, 608), (131, 257), (66, 1100)):
        weight, bias = positive_weight(width, depth), torch.randn(width)
        exact, matrix = dequantize(weight).double(), QuantizedMatrix(weight, bias)
        for rows in (*range(1, 9), 11, 13, 16):
            x = torch.zeros(rows, depth + 5)[:, 2 : depth + 2]
            x.copy_(rows_between_bf16_values(rows, depth))
            x[:, ::16] *= large
            expected = x.double() @ exact.T
            error = (matrix(x, backend=backend) - bias - expected).abs()
            assert (error <= 2**-12 * expected + 1e-6).all()


@pytest.mark.parametrize("bad", BAD)
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


# ---- weights with quantized activations ----------------------------------------------------------

DYNAMIC = Format(8, None, dynamic=True)
DYNAMIC_FORMATS = (
    DYNAMIC,
    *(Format(4, group, zeros=True, dynamic=True) for group in formats.GROUPS),
    Format(4, 32, dynamic=True),
)
each_dynamic = pytest.mark.parametrize(
    "form", DYNAMIC_FORMATS, ids=lambda form: f"{form.name} {form.zeros}"
)
# Outputs that fill panels or not; depths that end within, or at the end of, a block or a group. 70
# rows of the largest product do not fit into L2.
DYNAMIC_SHAPES = (
    *((1, 1), (16, 64), (50, 100), (131, 257), (8, 31), (48, 832), (66, 1100)),
    (8216, 64),
)


@each_dynamic
@pytest.mark.usefixtures("threads")
def test_products_with_quantized_activations_are_equal_bit_by_bit(
    backend: Backend, form: Format
) -> None:
    for width, depth in DYNAMIC_SHAPES:
        weight = random_weight(form, width, depth)
        matrix = QuantizedMatrix(arranged(weight, backend), torch.randn(width))
        expected = QuantizedMatrix(weight, matrix._bias)
        for rows in (0, 1, 2, 11, 12, 13, 15, 16, 17, 33, 70):
            x = torch.randn(rows, depth + 5)[:, 2 : depth + 2] * 10 ** torch.linspace(-9, 9, depth)
            x[:1] = 0
            product = matrix(x, backend=backend)
            assert torch.equal(product, expected(x, backend="reference"))
            for some in (slice(1), slice(1, 2), slice(rows // 2, rows)):
                assert torch.equal(matrix(x[some], backend=backend), product[some])


@each_dynamic
def test_the_error_of_quantized_activations_is_that_of_their_rounding(
    backend: Backend, form: Format
) -> None:
    """Half a unit of each value: the largest magnitude in its group / 254."""
    weight, size = random_weight(form, 48, 832), form.activation_group
    exact, matrix = dequantize(weight).double(), QuantizedMatrix(arranged(weight, backend))
    x = torch.randn(40, 832) * 10 ** torch.linspace(-3, 3, 832)
    units = x.view(40, -1, size).abs().amax(dim=2) / 127
    halves = units.repeat_interleave(size, dim=1).double() / 2
    error = (matrix(x, backend=backend) - x.double() @ exact.T).abs()
    assert (error <= 1.001 * halves @ exact.abs().T).all()


def test_a_fine_product_keeps_15_bits_and_has_the_same_bits_in_any_batch(backend: Backend) -> None:
    weight = random_weight(DYNAMIC, 50, 832)
    exact = dequantize(weight).double()
    x = torch.randn(17, 832)
    matrix = QuantizedMatrix(arranged(weight, backend))
    with backends.override("kernels", backend):
        product, coarse = fine_product(matrix)(x), matrix(x)
        parts = [fine_product(matrix)(x[some]) for some in (slice(0), slice(8), slice(8, 17))]
    with backends.override("kernels", "reference"):
        expected = fine_product(QuantizedMatrix(weight))(x)
    units = x.abs().amax(dim=1, keepdim=True).double() / 127
    # The first product loses at most half a unit of each value. The second keeps all of that but
    # 1 / 254.
    allowed = units / 2 / 254 * exact.abs().sum(dim=1) + 1e-5 * x.abs().double() @ exact.abs().T
    assert ((product - x.double() @ exact.T).abs() <= allowed).all()
    assert ((coarse - x.double() @ exact.T).abs() > allowed).any()
    assert torch.equal(product, expected)
    assert torch.equal(torch.cat(parts), product)


@each_dynamic
@pytest.mark.parametrize("bad", BAD)
def test_a_quantized_row_that_is_not_finite_spoils_no_other(
    backend: Backend, form: Format, bad: float
) -> None:
    matrix = QuantizedMatrix(arranged(random_weight(form, 50, 300), backend))
    for rows in (5, 37):
        x = torch.randn(rows, 300)
        expected = matrix(x, backend=backend)
        x[3, 290] = bad
        result = matrix(x, backend=backend)
        assert not result[3].isfinite().any()
        assert torch.equal(result[torch.arange(rows) != 3], expected[torch.arange(rows) != 3])


@each_dynamic
def test_groups_of_the_largest_integers_are_exact(backend: Backend, form: Format) -> None:
    weight, groups = allocate(form, 20, 512, torch.float32), form.groups(512)
    # The largest distance of a value from its zero.
    largest, zero = (-128, 0) if form.bits == 8 else (15, -8 if form.zeros else 8)
    zeros = torch.full((20, groups), zero) if form.zeros else None
    weight.fill(torch.full((20, 512), largest), torch.ones(20, groups), zeros)
    matrix = QuantizedMatrix(arranged(weight, backend))
    for rows in (1, 20):
        for value in (127.0, -127.0):
            product = matrix(torch.full((rows, 512), value), backend=backend)
            expected = torch.full((rows, 20), (largest - zero) * value * 512)
            assert torch.equal(product, expected)


@compiled
def test_the_log_says_where_quantized_activations_are_slower(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in {"scalar", "avx2"} & {*tiles.isas("bf16")}:
        caplog.clear()
        with tiles.isa(name):
            load_weights(checkpoint, load_config(checkpoint), quantization=DYNAMIC)
        warned = "'int8' would be faster on this CPU: it has no AVX-512 VNNI" in caplog.text
        assert warned == (name == "scalar")


@compiled
@each_dynamic
def test_a_matrix_for_quantized_activations_must_be_arranged(form: Format) -> None:
    weight = random_weight(form, 37, 200)
    assert torch.equal(unpack(arranged(weight, "cpu")), unpack(weight))
    assert torch.equal(dequantize(arranged(weight, "cpu")), dequantize(weight))
    with pytest.raises(ValueError, match="must be arranged"):
        QuantizedMatrix(weight)(torch.zeros(2, 200), backend="cpu")
