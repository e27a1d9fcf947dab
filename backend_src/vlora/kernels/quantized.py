"""Matrices of int8 or int4 weights: memory layout, and products with them.

A weight is scale · (value − zero). Adjacent inputs of one output form a group with one scale (fp32)
and one zero (a multiple of 1/8). x keeps the accuracy of fp32 or bf16, and results are fp32. With a
dynamic format, x is quantized to int8, too, in groups of `Format.activation_group` inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vlora import backends, native
from vlora.kernels import reference
from vlora.kernels.formats import ACTIVATION_GROUP, BLOCK, Format
from vlora.kernels.ops import Matrix

SYMMETRIC_ZERO = 8  # Zero of all groups of an int4 matrix that stores no zeros.
SMALLEST_MAXIMUM = 1e-27  # Groups of smaller activations are quantized as if this were the largest.
# Zeros are stored in units of 1 / ZERO_STEPS of the distance between two quantized values.
ZERO_STEPS = 8
# Number of bytes that are rearranged together. Their intermediate results stay in the caches.
COPIED_AT_ONCE = 1 << 19


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized matrix [d_out, d_in].

    values: [d_out, row_bytes] uint8, packed, contiguous.
    scales: [d_out, groups] fp32, contiguous.
    zeros: [d_out, groups] int8, contiguous, distances from SYMMETRIC_ZERO in 1/ZERO_STEPS; or None.
    depth: d_in.
    dtype: type in which products with many rows are computed, fp32 or bf16.
    order: [d_in] int64, input to which each stored value belongs; None if in the order of the
        inputs.
    panel_rows: number of rows in a panel if the matrix is stored in panels, else 0. Panels change
        the order of the tensors' elements, not their shapes. Rows that fill no panel stay in rows,
        which is possible for dynamic formats only.
    """

    format: Format
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    depth: int
    dtype: torch.dtype
    order: torch.Tensor | None = None
    panel_rows: int = 0

    def __post_init__(self) -> None:
        rows, groups = len(self.values), self.format.groups(self.depth)
        expected: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = {
            "values": (self.values, (rows, self.format.row_bytes(self.depth)), torch.uint8),
            "scales": (self.scales, (rows, groups), torch.float32),
        }
        if self.format.zeros != (self.zeros is not None):
            needed = "needs zeros" if self.format.zeros else "must have no zeros"
            raise ValueError(f"a matrix of {self.format} {needed}")
        if self.zeros is not None:
            expected["zeros"] = (self.zeros, (rows, groups), torch.int8)
        if self.order is not None:
            expected["order"] = (self.order, (self.depth,), torch.int64)
        for name, (tensor, shape, dtype) in expected.items():
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} {tensor.dtype} must be contiguous"
                    f" {shape} {dtype}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (d_out, d_in) of the matrix."""
        return len(self.values), self.depth

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values, scales and zeros."""
        return self.format.matrix_bytes(*self.shape)

    def rows(self, first: int, count: int) -> QuantizedWeight:
        """Return a view of adjacent rows. The matrix must not be in panels."""
        assert not self.panel_rows
        part = slice(first, first + count)
        zeros = None if self.zeros is None else self.zeros[part]
        return replace(self, values=self.values[part], scales=self.scales[part], zeros=zeros)

    def copy_values(self, packed: torch.Tensor) -> None:
        """Write the values of a matrix that is not in panels yet.

        packed: [d_out, d_in · bits / 8] uint8, values in stored order; those of int4 are unsigned,
            two in a byte, the first in its low bits. Padding may be missing.

        Raises ValueError for another type or shape.
        """
        assert not self.panel_rows
        rows, row_bytes = self.values.shape
        if packed.dtype != torch.uint8 or len(packed) != rows or packed.shape[1] > row_bytes:
            raise ValueError(
                f"packed {tuple(packed.shape)} {packed.dtype} must be uint8 with {rows} rows of at"
                f" most {row_bytes}"
            )
        if self.format.bits == 4 and backends.backend_of("kernels") != "reference":
            packed = packed if packed.stride(1) == 1 else packed.contiguous()
            source = (packed.data_ptr(), packed.stride(0), packed.shape[1])
            target = (self.values.data_ptr(), *self.values.shape)
            native.kernels().quantized.pack_int4(*source, *target, torch.get_num_threads())
        elif self.format.bits == 4:
            values = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
            self.values.copy_(pack(values, 4))
        else:
            self.values[:, : packed.shape[1]].copy_(packed)
            self.values[:, packed.shape[1] :].zero_()

    def fill(
        self, values: torch.Tensor | None, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> None:
        """Write a matrix that is not in panels yet.

        values: [d_out, d_in] integers in stored order, −128 … 127 for int8 and 0 … 15 for int4.
            None after `copy_values`.
        scales, zeros: [d_out, at most `groups`]. Only groups of padding may be missing. Zeros are
            multiples of 1/ZERO_STEPS from −8 to 23.
        """
        assert not self.panel_rows
        if values is not None:
            self.values.copy_(pack(values, self.format.bits))
        self.scales.zero_()[:, : scales.shape[1]].copy_(scales)
        if self.zeros is not None:
            assert zeros is not None
            self.zeros.zero_()[:, : zeros.shape[1]].copy_((zeros - SYMMETRIC_ZERO) * ZERO_STEPS)


def allocate(
    form: Format, rows: int, depth: int, dtype: torch.dtype, memory: torch.Tensor | None = None
) -> QuantizedWeight:
    """Return a matrix [rows, depth] with uninitialized content.

    memory: uint8, at least `matrix_bytes` long and aligned to 4 bytes; allocated if None.
    """
    size, groups = form.matrix_bytes(rows, depth), form.groups(depth)
    memory = torch.empty(size, dtype=torch.uint8) if memory is None else memory[:size]
    first_scale = rows * form.row_bytes(depth)
    first_zero = first_scale + rows * groups * 4
    values, scales, zeros = memory.tensor_split((first_scale, first_zero))
    return QuantizedWeight(
        form,
        values.view(rows, -1),
        scales.view(torch.float32).view(rows, groups),
        zeros.view(torch.int8).view(rows, groups) if form.zeros else None,
        depth,
        dtype,
    )


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return integers [rows, depth] as packed rows of whole blocks."""
    rows, depth = values.shape
    padded = torch.nn.functional.pad(values, (0, -depth % BLOCK))
    if bits == 8:
        return padded.to(torch.int8).view(torch.uint8)
    nibbles = padded.to(torch.uint8).view(rows, -1, 4, 16)
    # Word i of a block holds values i, 16 + i, 32 + i and 48 + i, from its lowest bits on.
    low = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    high = nibbles[:, :, 2] | nibbles[:, :, 3] << 4
    return torch.stack((low, high), dim=-1).view(rows, -1)


def in_order(blocks: torch.Tensor) -> torch.Tensor:
    """Return whole blocks of int4 in order, as `QuantizedWeight.copy_values` takes them."""
    packed, low = torch.empty_like(blocks), np.int64(0x0F0F0F0F0F0F0F0F)
    step = max(1, COPIED_AT_ONCE // blocks.shape[1])
    for first in range(0, len(blocks), step):
        stored = blocks[first : first + step].view(-1, 4).numpy()
        quarters = packed[first : first + step].view(torch.int64).view(-1, 4).numpy()
        for byte in range(2):
            even, odd = (stored[:, i].copy().view(np.int64) for i in (byte, 2 + byte))
            quarters[:, 2 * byte] = even & low | (odd & low) << 4
            quarters[:, 2 * byte + 1] = even >> 4 & low | odd & ~low
    return packed


# The next functions only move data. A panel of int4 has 8 (AVX2) or 16 (AMX, VNNI) adjacent rows,
# whose values, scales and zeros are interleaved (csrc/quantized/quantized.h). Panels of a dynamic
# format have 16 rows for every CPU (csrc/quantized/dynamic.h).

TILE_PANEL_ROWS = 16  # Number of rows in a panel for AMX and AVX-512 VNNI.
# Number of bytes that hold the first 32 values of a block. The last 32 values have as many.
HALF_BLOCK = 16


def preferred_rows(*, dynamic: bool = False) -> int:
    """Return the rows per panel that the kernels of int4, or of a dynamic format, read best; 0
    without panels or kernels.
    """
    try:
        preferred = int(native.kernels().quantized.preferred_panel_rows())
    except ImportError:
        return 0
    return TILE_PANEL_ROWS if dynamic else preferred


def why_dynamic_is_slower(form: Format, dtype: torch.dtype) -> str | None:
    """Return why products of a dynamic format are slower on this CPU than those with the same
    weights without quantized activations; None if they are not. dtype: type of those.
    """
    try:
        kernels = native.kernels()
    except ImportError:
        return None
    if dtype == torch.bfloat16 and kernels.runtime.isa("bf16") == "amx":
        return "attention and LoRA use AMX only without quantized activations"
    # Without VNNI, the kernels of int8 multiply integers of 16 bits by AVX2. That is 1.5 times as
    # fast as floats by AVX2, but slower than floats by AVX-512. Those of int4 multiply bytes.
    slow = form.bits == 8 and not kernels.quantized.multiplies_bytes()
    return "it has no AVX-512 VNNI" if slow and kernels.runtime.isa("bf16") != "avx2" else None


def interleave(
    bits: int,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    panel_rows: int,
) -> None:
    """Rearrange the rows of a matrix into panels of `panel_rows` rows, in place. Rows that fill no
    panel are not changed.

    values: [rows, row_bytes] uint8.
    scales, zeros: [rows, groups]; `zeros` may be None.
    """
    addresses = (values.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
    sizes = (*values.shape, scales.shape[1], panel_rows)
    native.kernels().quantized.interleave(bits, *addresses, *sizes, torch.get_num_threads())


def separate(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, panel_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return copies in rows of int4 that `interleave` has rearranged."""
    in_panels = len(values) - len(values) % panel_rows
    halves = _separated(values[:in_panels].view(torch.int32), panel_rows).view(torch.uint8)
    if panel_rows == TILE_PANEL_ROWS:
        halves = _in_halves(halves)
    in_blocks = halves.view(-1, 2, HALF_BLOCK).mT.reshape(in_panels, values.shape[1])
    return (
        torch.cat((in_blocks, values[in_panels:])),
        _separated(scales, panel_rows),
        None if zeros is None else _separated(zeros, panel_rows),
    )


def _in_halves(pairs: torch.Tensor) -> torch.Tensor:
    """Return 32 values of every 16 bytes, with value i in a low and 16 + i in a high nibble.

    Panels of 16 rows have four times 8 values, of which the even ones come first.
    """
    both = pairs.view(-1, 4, 2, 2).mT
    # The axes of `both` after the second are two pairs of bytes and the parity.
    low, high = torch.stack((both & 15, both >> 4), dim=3).view(-1, 2, HALF_BLOCK).unbind(1)
    return low | high << 4


def _separated(stored: torch.Tensor, panel_rows: int) -> torch.Tensor:
    in_panels, columns = len(stored) - len(stored) % panel_rows, stored.shape[1]
    panels = stored[:in_panels].view(-1, columns, panel_rows).mT.reshape(in_panels, columns)
    return torch.cat((panels, stored[in_panels:]))


def arrange(weight: QuantizedWeight) -> QuantizedWeight:
    """Store a matrix in the layout that its kernels read fastest. Return the rearranged matrix.

    The memory is reused. A matrix of a dynamic format goes into panels. So does int4 on CPUs with
    AMX or `avx512_bf16`, or with AVX2 but not AVX-512, unless its number of rows is not a multiple
    of a panel's.
    """
    form = weight.format
    panel_rows = preferred_rows(dynamic=form.dynamic)
    fits = form.dynamic or (form.bits == 4 and panel_rows and len(weight.values) % panel_rows == 0)
    if weight.panel_rows or not panel_rows or not fits:
        return weight
    interleave(form.bits, weight.values, weight.scales, weight.zeros, panel_rows)
    return replace(weight, panel_rows=panel_rows)


def in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """Return `weight` itself if it has no panels, else a copy without panels."""
    if not weight.panel_rows:
        return weight
    if weight.format.bits == 8:
        values = _separated(weight.values.view(torch.int32), weight.panel_rows).view(torch.uint8)
        return replace(weight, values=values, panel_rows=0)
    values, scales, zeros = separate(weight.values, weight.scales, weight.zeros, weight.panel_rows)
    return replace(weight, values=values, scales=scales, zeros=zeros, panel_rows=0)


def unpack(weight: QuantizedWeight) -> torch.Tensor:
    """Return the integers of a matrix, [d_out, d_in] int32, with columns in the stored order."""
    weight = in_rows(weight)
    rows, depth = weight.shape
    if weight.format.bits == 8:
        return weight.values.view(torch.int8)[:, :depth].int()
    low, high = weight.values.view(rows, -1, 16, 2).unbind(-1)
    nibbles = torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=2)
    return nibbles.view(rows, -1)[:, :depth].int()


def zeros_of(weight: QuantizedWeight) -> torch.Tensor:
    """Return the zeros of a matrix in rows, [d_out, groups] fp32."""
    if weight.zeros is not None:
        return SYMMETRIC_ZERO + weight.zeros.float() / ZERO_STEPS
    return torch.full_like(weight.scales, 0 if weight.format.bits == 8 else SYMMETRIC_ZERO)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Return the matrix in fp32, [d_out, d_in], with its columns in the order of the inputs."""
    weight = in_rows(weight)
    rows, depth = weight.shape
    group = weight.format.group or depth
    zeros = zeros_of(weight).repeat_interleave(group, dim=1)[:, :depth]
    stored = (unpack(weight) - zeros) * weight.scales.repeat_interleave(group, dim=1)[:, :depth]
    if weight.order is None:
        return stored
    return torch.empty(rows, depth).index_copy_(1, weight.order, stored)


def multiply_dynamic(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return the product with a weight of a dynamic format as the kernels compute it, bit by bit
    (csrc/quantized/dynamic.h and dynamic_int4.h).
    """
    weight = in_rows(weight)
    group, size = weight.format.group, weight.format.activation_group
    values, zeros = unpack(weight).double(), zeros_of(weight).double()
    totals = torch.zeros(len(x), len(values))
    for first in range(0, weight.depth, size):
        some, stored_group = slice(first, first + size), 0 if group is None else first // group
        integers, units = _quantize_rows(x[:, some])
        less_zero = values[:, some] - zeros[:, stored_group, None]
        scaled = (integers.nan_to_num(0).double() @ less_zero.T).float() * units
        totals += scaled if group is None else scaled * weight.scales[:, stored_group]
    return totals * weight.scales.T if group is None else totals


def _quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers of groups of activations, [..., inputs] fp32, and their units, [..., 1].

    x: [..., inputs] fp32. Units are NaN in groups with a value that is not finite.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    units = largest.clamp_min(SMALLEST_MAXIMUM) / 127
    # The difference is zero, or NaN.
    return (x * (1 / units)).round_(), units + (largest - largest)


def _rounding_errors(x: torch.Tensor) -> torch.Tensor:
    """Return x less the values as which a dynamic format multiplies it.

    x: [rows, depth] fp32.
    """
    rows, depth = x.shape
    groups = torch.nn.functional.pad(x, (0, -depth % ACTIVATION_GROUP))
    groups = groups.view(rows, groups.shape[1] // ACTIVATION_GROUP, ACTIVATION_GROUP)
    integers, units = _quantize_rows(groups)
    return (groups - integers.mul_(units)).flatten(1)[:, :depth]


class QuantizedMatrix(Matrix):
    """A quantized weight with its bias. Both are checked once, for all steps that use them.

    bias: [d_out] fp32, or None.

    Errors in a product of more than a few rows are about those of a `Matrix` of the weight's
    `dtype`.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        rows, depth = weight.shape
        self._check_bias(bias, rows)
        self.weight, self.shape, self._bias = weight, weight.shape, bias
        matrix = (
            weight.format.bits,
            weight.values.data_ptr(),
            weight.scales.data_ptr(),
            0 if weight.zeros is None else weight.zeros.data_ptr(),
            rows,
            depth,
            weight.format.group_shift,
        )
        bias_address = 0 if bias is None else bias.data_ptr()
        self._native: tuple[Any, ...]
        if weight.format.dynamic:
            self._native = (*matrix, bias_address)
        else:
            bf16 = weight.dtype == torch.bfloat16
            self._native = (*matrix, weight.panel_rows, bias_address, bf16)

    def _reference(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.format.dynamic:
            order = self.weight.order
            product = multiply_dynamic(x if order is None else x[:, order], self.weight)
            return product if self._bias is None else product + self._bias
        return reference.linear(x, dequantize(self.weight), self._bias)

    def _multiply(self, y: int, x: torch.Tensor) -> None:
        if self.weight.order is not None:
            native.spoil_recording()
            x = x.index_select(1, self.weight.order)
        kernels = native.kernels().quantized
        if not self.weight.format.dynamic:
            kernels.multiply(y, *self._operands(x))
            return
        if not self.weight.panel_rows:
            raise ValueError("a matrix of a dynamic format must be arranged before its products")
        kernels.multiply_dynamic(y, *self._operands(x))

    def _multiply_gated(self, out: int, scratch: int, x: torch.Tensor) -> None:
        self._multiply(scratch, x)
        width = self.shape[0] // 2
        native.kernels().gemm.gate(out, scratch, len(x), width, torch.get_num_threads())


def matrix_of(weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> Matrix:
    """Return the matrix of a weight, quantized or not."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedMatrix(weight, bias)
    return Matrix(weight, bias)


def fine_product(matrix: Matrix) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that multiplies x, [rows, d_in] fp32, with a matrix without bias, but with
    x in about 15 bits if the matrix has a dynamic format.

    It adds the products with what x is rounded to, and with the rest. Both read the weight once.
    """
    weight = matrix.weight
    if not (isinstance(weight, QuantizedWeight) and weight.format.dynamic):
        return matrix

    def multiply(x: torch.Tensor) -> torch.Tensor:
        both = matrix(torch.cat((x, _rounding_errors(x))))
        return both[: len(x)].add_(both[len(x) :])

    return multiply
