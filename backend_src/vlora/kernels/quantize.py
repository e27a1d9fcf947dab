"""Quantization of float matrices to int8 and int4.

The integers, scales and zeros are chosen by the weights alone. No data is run through the model.
"""

from __future__ import annotations

import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.kernels.quantized import ZERO_STEPS, QuantizedWeight

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


def quantize(
    weight: torch.Tensor,
    into: QuantizedWeight,
    *,
    whole_zeros: bool = False,
    backend: Backend | None = None,
) -> None:
    """Quantize a matrix [d_out, d_in], and write it to `into`, which must not be in panels.

    For int8, the largest absolute value of a group becomes 127. For int4, which must have zeros,
    the range of a group is divided into 15 steps. Then the zero and the scale with the smallest
    squared error are computed, and the values are rounded again. The better result of this and of a
    narrower range is used. Magnitudes below 1e-36 may become 0.

    weight: of any float type, on the CPU.
    whole_zeros: whether the zeros of int4 must be integers from 0 to 15, as files can store them.
        This is computed in plain torch, and the squared error is larger: for normal weights by 13 %
        in groups of 32, by 2.5 % in groups of 128.

    Raises ValueError for int4 without zeros, for another shape than that of `into`, and for weights
    that are not finite or are too large. `into` is then undefined.
    """
    if into.format.bits == 4 and not into.format.zeros:
        raise ValueError(f"{into.format} cannot be quantized; int4 needs zeros")
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
        if chosen == "reference" or (whole_zeros and into.format.bits == 4):
            bad = quantize_reference(part, target, whole_zeros)
        else:
            bad = _quantize_compiled(part, target)
        if bad is not None:
            raise ValueError(
                f"row {first + bad} has a value that is not finite or is too large to be quantized"
            )


def _quantize_compiled(weight: torch.Tensor, into: QuantizedWeight) -> int | None:
    source = (weight.data_ptr(), weight.dtype == torch.bfloat16, weight.stride(0))
    zeros = 0 if into.zeros is None else into.zeros.data_ptr()
    target = (into.format.bits, into.values.data_ptr(), into.scales.data_ptr(), zeros)
    size = (*into.shape, into.format.group_shift)
    bad: int = native.kernels().quantized.quantize(*source, *target, *size, torch.get_num_threads())
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
            values = (grouped / _divisor(scales)).round_()
        else:
            values, scales, zeros = _best_int4(grouped, whole_zeros)
        ranges = grouped.amax(dim=2) - grouped.amin(dim=2)
        good = part.isfinite().all(dim=1) & (scales + ranges).isfinite().all(dim=1)
        bad = torch.nonzero(~good)
        if len(bad):
            return first + int(bad[0])
        target.fill(values.view(len(part), -1)[:, :depth], scales, zeros)
    return None


def _best_int4(grouped: torch.Tensor, whole_zeros: bool) -> Int4Groups:
    best = _fitted_int4(grouped, RANGES[0], whole_zeros)
    smallest = _squared_error(grouped, *best)
    for part in RANGES[1:]:
        fitted = _fitted_int4(grouped, part, whole_zeros)
        error = _squared_error(grouped, *fitted)
        better = error < smallest
        smallest = torch.where(better, error, smallest)
        best = (
            torch.where(better[..., None], fitted[0], best[0]),
            torch.where(better, fitted[1], best[1]),
            torch.where(better, fitted[2], best[2]),
        )
    return best


def _fitted_int4(grouped: torch.Tensor, part: float, whole_zeros: bool) -> Int4Groups:
    """Return int4 groups whose fit starts from the range of each group times `part`."""
    low = grouped.amin(dim=2).clamp_max_(0) * part
    scales = (grouped.amax(dim=2).clamp_min_(0) * part - low) / 15
    storable = _whole if whole_zeros else _storable
    zeros = storable(-low / _divisor(scales)[..., 0])
    mean = grouped.mean(dim=2)
    for _ in range(REFITS):
        values = _rounded(grouped, scales, zeros)
        middle = values.mean(dim=2)
        slopes = _slopes(values - middle[..., None], grouped)
        zeros = torch.where(slopes == 0, zeros, storable(middle - mean / _divisor(slopes)[..., 0]))
        scales = _slopes(values - zeros[..., None], grouped)
    values = _rounded(grouped, scales, zeros)
    return values, _slopes(values - zeros[..., None], grouped), zeros


def _squared_error(
    grouped: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    return (values - zeros[..., None]).mul_(scales[..., None]).sub_(grouped).square_().sum(dim=2)


def _rounded(grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return (grouped / _divisor(scales)).add_(zeros[..., None]).round_().clamp_(0, 15)


def _slopes(values: torch.Tensor, grouped: torch.Tensor) -> torch.Tensor:
    """Return each group's least-squares scale from `values` to `grouped`; 0 for groups of zeros."""
    squares = values.square().sum(dim=2)
    return (values * grouped).sum(dim=2) / torch.where(squares == 0, 1.0, squares)


def _storable(zeros: torch.Tensor) -> torch.Tensor:
    return (zeros * ZERO_STEPS).round_().clamp_(-64, 191) / ZERO_STEPS


def _whole(zeros: torch.Tensor) -> torch.Tensor:
    return zeros.round().clamp_(0, 15)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales as divisors, [rows, groups, 1], with 1 in place of 0."""
    return torch.where(scales == 0, 1.0, scales)[..., None]
