"""Operands that the kernels read from device memory: segments in waves, and each adapter's
addresses.

This module knows addresses and padding, but no libraries or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlora.atmm.cuda.library import RANK_STEP
from vlora.atmm.types import HeadMatrix, LoraPair


@dataclass(frozen=True)
class DeviceSegments:
    """Segments in waves, on the device. ends: the end of each wave among them."""

    tensor: torch.Tensor
    ends: tuple[int, ...]
    shortest: int
    longest: int

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0


class DeviceGroup:
    """Adapters of the projections that share an input, as the kernels read them.

    `tables[output]` is [slots, 3] int64 of (address of A, address of B, rank). Ranks are padded to
    a multiple of RANK_STEP with zero rows. Matrices that are padded, not contiguous or on another
    device are copied; the others are used in place.
    """

    def __init__(
        self, d_in: int, d_outs: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.d_in, self.d_outs, self.dtype, self.device = d_in, tuple(d_outs), dtype, device
        self.max_rank = RANK_STEP
        self.slots = 0
        self.tables: list[torch.Tensor] = []
        self._rows: list[list[tuple[int, int, int]]] = [[] for _ in self.d_outs]
        self._keep: list[torch.Tensor] = []

    def append(self, pairs: Sequence[LoraPair | None]) -> None:
        for rows, pair in zip(self._rows, pairs, strict=True):
            rows.append((0, 0, 0) if pair is None else self._store(*_padded(pair)))
        self.slots += 1

    def append_head(self, head: HeadMatrix | None) -> None:
        """Add a head: its weight takes the part of A and its bias that of B; classes are not
        padded."""
        self._rows[0].append((0, 0, 0) if head is None else self._store(*head))
        self.slots += 1

    def ready(self) -> None:
        """Bring the tables up to date, before a call or a capture."""
        if self.tables and self.tables[0].shape[0] == self.slots:
            return
        self._keep += self.tables  # A captured graph may still read the old ones.
        self.tables = [
            torch.tensor(rows, dtype=torch.int64, device=self.device).view(-1, 3)
            for rows in self._rows
        ]

    def _store(self, a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
        a, b = a.to(self.device).contiguous(), b.to(self.device).contiguous()
        self._keep += [a, b]
        self.max_rank = max(self.max_rank, -(-a.shape[0] // RANK_STEP) * RANK_STEP)
        return a.data_ptr(), b.data_ptr(), a.shape[0]


def _padded(pair: LoraPair) -> LoraPair:
    missing = -pair.rank % RANK_STEP
    if missing == 0:
        return pair
    pad = torch.nn.functional.pad
    return LoraPair(pad(pair.a, (0, 0, 0, missing)), pad(pair.b, (0, missing)))
