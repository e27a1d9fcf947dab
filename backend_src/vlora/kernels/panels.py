"""Int4 matrices in panels, the layout that is fastest with AMX, AVX-512 VNNI and AVX2
(csrc/quantized/quantized.h).

A panel has 8 (AVX2) or 16 (AMX, VNNI) adjacent rows, whose values, scales and zeros are
interleaved. The functions here only move data. They do not know what it means.
"""

from __future__ import annotations

import torch

from vlora import native

TILE_PANEL_ROWS = 16
"""Number of rows in a panel for AMX and AVX-512 VNNI."""

HALF_BLOCK = 16
"""Number of bytes that hold the first 32 values of a block. The last 32 values have as many."""


def preferred_rows() -> int:
    """Return the number of rows of the panels in which the instruction set in use reads int4.

    It is 0 if the kernels read rows, or are not compiled.
    """
    try:
        return int(native.kernels().quantized.preferred_panel_rows())
    except ImportError:
        return 0


def interleave(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, panel_rows: int
) -> None:
    """Rearrange the rows of a matrix into panels of `panel_rows` rows, in place.

    The kernels must be compiled.

    values: [rows, row_bytes] uint8. The number of rows is a multiple of `panel_rows`.
    scales, zeros: [rows, groups]; `zeros` may be None.
    """
    native.kernels().quantized.interleave(
        values.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        *values.shape,
        scales.shape[1],
        panel_rows,
        torch.get_num_threads(),
    )


def separate(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, panel_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return copies in rows of what `interleave` has rearranged."""
    halves = _separated(values.view(torch.int32), panel_rows).view(torch.uint8)
    if panel_rows == TILE_PANEL_ROWS:
        halves = _in_halves(halves)
    return (
        halves.view(-1, 2, HALF_BLOCK).mT.contiguous().view(values.shape),
        _separated(scales, panel_rows),
        None if zeros is None else _separated(zeros, panel_rows),
    )


def _in_halves(pairs: torch.Tensor) -> torch.Tensor:
    """Return 32 values of every 16 bytes as `separate` needs them, from panels of 16 rows.

    Those panels have four times 8 values, of which the even ones come first. In the result, a byte
    holds value i in its low bits and value 16 + i in its high bits.
    """
    both = pairs.view(-1, 4, 2, 2).mT
    # The axes of `both` after the second are two pairs of bytes and the parity.
    low, high = torch.stack((both & 15, both >> 4), dim=3).view(-1, 2, HALF_BLOCK).unbind(1)
    return low | high << 4


def _separated(stored: torch.Tensor, panel_rows: int) -> torch.Tensor:
    return stored.view(-1, stored.shape[1], panel_rows).mT.contiguous().view(stored.shape)
