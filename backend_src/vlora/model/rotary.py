"""Rotary positions: how far each pair of a head's values is turned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FIRST = 1024
"""Positions of a new table."""


@dataclass(frozen=True)
class Rotary:
    """cosines, sines: [T, dim / 2] fp32 of every row's angles, the same in every layer."""

    cosines: torch.Tensor
    sines: torch.Tensor

    @staticmethod
    def of(angles: torch.Tensor, scale: float) -> Rotary:
        """angles: [T, dim / 2]; scale: of both."""
        return Rotary(angles.cos() * scale, angles.sin() * scale)


class RotaryTable:
    """The angles of all positions met so far and of some more, in steps that double: cosines of a
    few rows cost a step more than a layer's norms do."""

    def __init__(self, frequencies: torch.Tensor, scale: float) -> None:
        """frequencies: [dim / 2] fp32, radians a position."""
        self._frequencies = frequencies
        self._scale = scale
        self._known = self._of(FIRST)

    def at(self, positions: torch.Tensor) -> Rotary:
        """positions: [T] int64, none negative."""
        if len(positions) and (last := int(positions.max())) >= len(self._known.cosines):
            self._known = self._of(1 << last.bit_length())
        return Rotary(self._known.cosines[positions], self._known.sines[positions])

    def _of(self, count: int) -> Rotary:
        return Rotary.of(torch.arange(count)[:, None] * self._frequencies, self._scale)
