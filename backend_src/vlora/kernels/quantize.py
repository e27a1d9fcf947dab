"""Quantization of float matrices to int8 and int4.

The integers, scales and zeros are chosen by the weights alone. No data is run through the model.
"""

from __future__ import annotations

import torch

from vlora import backends, native
from vlora.backends import Backend
from vlora.kernels import quantize_reference
from vlora.kernels.quantized import QuantizedWeight

# Number of weights that are converted to fp32 together if the kernel does not read their type.
CONVERTED_AT_ONCE = 1 << 20


def quantize(
    weight: torch.Tensor, into: QuantizedWeight, *, backend: Backend | None = None
) -> None:
    """Quantize a matrix [d_out, d_in], and write it to `into`, which must not be in panels.

    For int8, the largest absolute value of a group becomes 127. For int4, which must have zeros,
    the range of a group is divided into 15 steps. Then the zero and the scale with the smallest
    squared error are computed, and the values are rounded again. The better result of this and of a
    narrower range is used. Magnitudes below 1e-36 may become 0.

    weight: of any float type, on the CPU.

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
    some = rows if direct else max(1, CONVERTED_AT_ONCE // max(1, depth))
    for first in range(0, rows, max(1, some)):
        target = into.rows(first, min(some, rows - first))
        part = weight[first : first + some]
        part = part if direct else part.float()
        if chosen == "reference":
            bad = quantize_reference.quantize(part, target)
        else:
            bad = _quantize_compiled(part, target)
        if bad is not None:
            raise ValueError(
                f"row {first + bad} has a value that is not finite or is too large to be quantized"
            )


def _quantize_compiled(weight: torch.Tensor, into: QuantizedWeight) -> int | None:
    bad: int = native.kernels().quantized.quantize(
        weight.data_ptr(),
        weight.dtype == torch.bfloat16,
        weight.stride(0),
        into.format.bits,
        into.values.data_ptr(),
        into.scales.data_ptr(),
        0 if into.zeros is None else into.zeros.data_ptr(),
        *into.shape,
        into.format.group_shift,
        torch.get_num_threads(),
    )
    return None if bad < 0 else bad
