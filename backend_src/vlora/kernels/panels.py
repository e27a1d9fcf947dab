"""Int4 matrices in panels, the layout that is fastest with AVX2 (csrc/quantized/quantized.h).

A panel has PANEL_ROWS adjacent rows, whose values, scales and zeros are interleaved. The functions
here only move data. They do not know what it means.
"""

from __future__ import annotations

import torch

from vlora import native

PANEL_ROWS = 8
"""Number of rows in a panel."""

HALF_BLOCK = 16
"""Number of bytes that hold the first 32 values of a block. The last 32 values have as many."""


def are_preferred() -> bool:
    """Return whether the kernels of the instruction set in use read int4 in panels."""
    try:
        return bool(native.kernels().quantized.prefers_panels())
    except ImportError:
        return False


def interleave(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    """Rearrange the rows of a matrix into panels, in place. The kernels must be compiled.

    values: [rows, row_bytes] uint8. The number of rows is a multiple of PANEL_ROWS.
    scales, zeros: [rows, groups]; `zeros` may be None.
    """
    native.kernels().quantized.interleave(
        values.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        *values.shape,
        scales.shape[1],
        torch.get_num_threads(),
    )


def separate(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return copies in rows of what `interleave` has rearranged."""
    halves = _separated(values.view(torch.int32)).view(torch.uint8)
    return (
        halves.view(-1, 2, HALF_BLOCK).mT.contiguous().view(values.shape),
        _separated(scales),
        None if zeros is None else _separated(zeros),
    )


def _separated(panels: torch.Tensor) -> torch.Tensor:
    return panels.view(-1, panels.shape[1], PANEL_ROWS).mT.contiguous().view(panels.shape)
