"""Quantization of float matrices to int8 and int4.

The integers, scales and zeros are chosen by the weights alone. No data is run through the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.kernels.quantized import SYMMETRIC_ZERO, ZERO_STEPS, QuantizedWeight

# Number of weights that are converted to fp32 together if the kernel does not read their type.
CONVERTED_AT_ONCE = 1 << 20
# Factors of a group's extremes. The fit of int4 starts from the extremes times each factor, and the
# best result is used.
RANGES = (1.0, 0.9)
# Number of times that the scales and zeros of int4 are fitted again to the rounded values.
REFITS = 2
# Number of weights that are quantized together. Their intermediate results stay in the caches.
QUANTIZED_AT_ONCE = 1 << 17
# Values 0 … 15, [rows, groups, group], and scales and zeros, [rows, groups].
Int4Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Function that rounds the zeros of groups to values that can be stored.
Storable = Callable[[torch.Tensor], torch.Tensor]


def quantize(
    weight: torch.Tensor,
    into: QuantizedWeight,
    *,
    whole_zeros: bool = False,
    backend: Backend | None = None,
) -> None:
    """Quantize a matrix [d_out, d_in], and write it to `into`, which must not be in panels.

    For int8, the largest absolute value of a group becomes 127. For int4, the range of a group (or
    without zeros the one around 0 that contains it) is divided into 15 steps. Then the zero and the
    scale with the smallest squared error are computed, and the values are rounded again. The better
    result of this and of a narrower range is used. Magnitudes below 1e-36 may become 0.

    weight: of any float type, on the CPU.
    whole_zeros: whether the zeros of int4 must be integers from 0 to 15, as files can store them.
        The squared error is larger: for normal weights by 13 % in groups of 32, by 2.5 % in groups
        of 128.

    Raises ValueError for another shape than that of `into`, and for weights that are not finite or
    are too large. `into` is then undefined.
    """
    if weight.shape != into.shape:
        raise ValueError(f"weight {tuple(weight.shape)} must be {into.shape}")
    assert not into.panel_rows
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    chosen = backend or backends.backend_of("kernels")
    rows, depth = weight.shape
    direct = weight.dtype in (torch.float32, torch.bfloat16)
    # A converted copy of the whole matrix would double the memory that it needs.
    step = max(1, rows if direct else CONVERTED_AT_ONCE // max(1, depth))
    for first in range(0, rows, step):
        target = into.rows(first, min(step, rows - first))
        part = weight[first : first + step]
        part = part if direct else part.float()
        if chosen == "reference":
            bad = quantize_reference(part, target, whole_zeros)
        else:
            bad = _quantize_compiled(part, target, whole_zeros)
        if bad is not None:
            raise ValueError(
                f"row {first + bad} has a value that is not finite or is too large to be quantized"
            )


def _quantize_compiled(
    weight: torch.Tensor, into: QuantizedWeight, whole_zeros: bool
) -> int | None:
    source = (weight.data_ptr(), weight.dtype == torch.bfloat16, weight.stride(0))
    zeros = 0 if into.zeros is None else into.zeros.data_ptr()
    target = (into.format.bits, into.values.data_ptr(), into.scales.data_ptr(), zeros)
    form = (*into.shape, into.format.group_shift, whole_zeros)
    bad: int = native.kernels().quantized.quantize(*source, *target, *form, torch.get_num_threads())
    return None if bad < 0 else bad


def quantize_reference(
    weight: torch.Tensor, into: QuantizedWeight, whole_zeros: bool = False
) -> int | None:
    """Compute `quantize` in plain torch. Return the first row with a bad value, if any."""
    rows, depth = weight.shape
    group = into.format.group or depth
    some = max(1, QUANTIZED_AT_ONCE // depth)
    for first in range(0, rows, some):
        target = into.rows(first, min(some, rows - first))
        part = weight[first : first + some].float()
        grouped = torch.nn.functional.pad(part, (0, -depth % group)).view(len(part), -1, group)
        if into.format.bits == 8:
            scales, zeros = grouped.abs().amax(dim=2) / 127, None
            values = (grouped / _divisor(scales)[..., None]).round_()
        else:
            storable = (_whole if whole_zeros else _storable) if into.format.zeros else _symmetric
            values, scales, zeros = _best_int4(grouped, storable)
        ranges = grouped.amax(dim=2) - grouped.amin(dim=2)
        if into.format.bits == 4 and not into.format.zeros:
            ranges = 2 * grouped.abs().amax(dim=2)
        good = part.isfinite().all(dim=1) & (scales + ranges).isfinite().all(dim=1)
        bad = torch.nonzero(~good)
        if len(bad):
            return first + int(bad[0])
        target.fill(values.view(len(part), -1)[:, :depth], scales, zeros)
    return None


def _best_int4(grouped: torch.Tensor, storable: Storable) -> Int4Groups:
    """Return the better fit of each group, with the operations of the kernel in the same order."""
    columns = grouped.permute(2, 0, 1).contiguous()
    high, low = columns.amax(dim=0).clamp_min_(0), columns.amin(dim=0).clamp_max_(0)
    if storable is _symmetric:
        high = torch.maximum(high, -low)
        low = -high
    mean = _total(columns) / len(columns)
    columns -= mean
    rest = _total(columns)
    fits = [_fitted_int4(columns, low * r, high * r, mean, rest, storable) for r in RANGES]
    unit = 1 / _divisor(high - low)
    (*best, products), *others = fits
    gain = products * unit * (best[1] * unit)
    for *fit, products in others:
        better = products * unit * (fit[1] * unit) > gain
        best = [torch.where(better, new, old) for new, old in zip(fit, best, strict=True)]
    values, scales, zeros = best
    return values.permute(1, 2, 0).contiguous(), scales, zeros


def _fitted_int4(
    columns: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    mean: torch.Tensor,
    rest: torch.Tensor,
    storable: Storable,
) -> tuple[torch.Tensor, ...]:
    """Return values, scales and zeros of groups whose fit starts from a range. The last result
    times the scales is the sum of the squared weights less that of the squared errors.

    columns: [group, rows, groups], weights less `mean`, the mean of their group. So are the values.
    rest: sums of `columns`, which rounding leaves.
    """
    count = len(columns)
    scales = (high - low) / 15
    zeros = storable(-low / _divisor(scales))
    for refit in range(REFITS + 1):
        inverse = 1 / _divisor(scales)
        values = (columns * inverse).add_(zeros + mean * inverse).clamp_(0, 15).round_()
        # Sums of integers are exact in any order.
        total, squares = values.sum(dim=0), values.square().sum(dim=0)
        products = _total(values * columns)
        if refit < REFITS:
            middle = total / count
            slopes = (products - middle * rest) / _divisor(squares - total * middle)
            fitted = storable(middle - (mean + rest / count) / _divisor(slopes))
            zeros = torch.where(slopes > 0, fitted, zeros)
        squares = squares - zeros * (total + total - count * zeros)
        products = products - zeros * rest + mean * (total - count * zeros)
        scales = products / _divisor(squares)
    return values, scales, zeros, products


def _total(columns: torch.Tensor) -> torch.Tensor:
    """Return the sum along the first axis, added in its order as in the kernel."""
    return sum(columns[1:], start=columns[0])


def _storable(zeros: torch.Tensor) -> torch.Tensor:
    return (zeros * ZERO_STEPS).round_().clamp_(-64, 191) / ZERO_STEPS


def _whole(zeros: torch.Tensor) -> torch.Tensor:
    return zeros.round().clamp_(0, 15)


def _symmetric(zeros: torch.Tensor) -> torch.Tensor:
    return torch.full_like(zeros, SYMMETRIC_ZERO)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales as divisors, with 1 in place of those that are not positive.

    The kernel takes numbers below the smallest normal one as 0.
    """
    return torch.where(scales >= torch.finfo(torch.float32).tiny, scales, 1.0)
