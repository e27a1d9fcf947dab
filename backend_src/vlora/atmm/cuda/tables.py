"""Operands that the kernels read from device memory: segments, and the addresses of adapters.

This module knows addresses and padding, but no libraries or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlora.atmm.cuda.library import ALIGNMENT, RANK_STEP
from vlora.atmm.types import HeadMatrix, LoraPair


@dataclass(frozen=True)
class DeviceSegments:
    """Segments on the device, arranged in waves.

    tensor: [segments, 4] int32: start, length, slot, sign.
    ends: end of each wave among the segments.
    shortest, longest: minimum and maximum length.
    """

    tensor: torch.Tensor
    ends: tuple[int, ...]
    shortest: int
    longest: int

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0


class DeviceGroup:
    """Adapters of projections that share an input, as the kernels read them.

    `tables[output]` is [slots, 3] int64: address of A, address of B, rank. Ranks are padded with
    zero rows to a multiple of RANK_STEP. Matrices that need padding, are not contiguous or are on
    another device are copied. All others are used in place.
    """

    def __init__(
        self, d_in: int, d_outs: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.d_in, self.d_outs, self.dtype, self.device = d_in, tuple(d_outs), dtype, device
        self.max_rank = RANK_STEP
        self.slots = 0
        self.versions: dict[int, int] = {}
        """Number of each slot's content in the group that it was copied from."""
        self.tables: list[torch.Tensor] = []
        self._rows: list[list[tuple[int, int, int]]] = [[] for _ in self.d_outs]
        self._keep: dict[int, list[torch.Tensor]] = {}
        """Matrices of each slot."""
        self._old_tables: list[torch.Tensor] = []
        self._changed: set[int] = set()
        """Slots that the tables on the device do not show yet."""

    def append(self, pairs: Sequence[LoraPair | None]) -> None:
        self.put(self.slots, pairs)

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """Set the pairs of an existing slot or of the next one.

        Kernels that were launched earlier, and those launched before the next `ready`, use the
        previous pairs.
        """
        self._begin(slot)
        for rows, pair in zip(self._rows, pairs, strict=True):
            row = (0, 0, 0) if pair is None else self._store(slot, *_padded(pair))
            rows[slot : slot + 1] = [row]

    def put_head(self, slot: int, head: HeadMatrix | None) -> None:
        """Set a vision task head, with its weight in place of A and its bias in place of B.

        The classes are not padded.
        """
        self._begin(slot)
        row = (0, 0, 0) if head is None else self._store(slot, *head)
        self._rows[0][slot : slot + 1] = [row]

    def _begin(self, slot: int) -> None:
        self._keep[slot] = []
        self._changed.add(slot)
        self.slots = max(self.slots, slot + 1)

    def ready(self) -> None:
        """Update the tables on the device. Call this before a call of the library or a capture."""
        if self.tables and self.tables[0].shape[0] == self.slots:
            # In place, since a captured graph reads these tables.
            for slot in sorted(self._changed):
                for table, rows in zip(self.tables, self._rows, strict=True):
                    table[slot].copy_(torch.tensor(rows[slot], dtype=torch.int64))
            self._changed.clear()
            return
        self._changed.clear()
        self._old_tables += self.tables  # A captured graph may still read the old tables.
        self.tables = [
            torch.tensor(rows, dtype=torch.int64, device=self.device).view(-1, 3)
            for rows in self._rows
        ]

    def _store(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
        a, b = a.to(self.device).contiguous(), b.to(self.device).contiguous()
        self._keep[slot] += [a, b]
        self.max_rank = max(self.max_rank, -(-a.shape[0] // RANK_STEP) * RANK_STEP)
        return a.data_ptr(), b.data_ptr(), a.shape[0]


def _padded(pair: LoraPair) -> LoraPair:
    missing = -pair.rank % RANK_STEP
    if missing == 0:
        return pair
    pad = torch.nn.functional.pad
    return LoraPair(pad(pair.a, (0, 0, 0, missing)), pad(pair.b, (0, missing)))


def is_aligned(y: torch.Tensor, x: torch.Tensor, d_outs: Sequence[int]) -> bool:
    """Return whether tensor cores can read all rows of x and y, 16 bytes at a time."""
    elements = ALIGNMENT // x.element_size()
    return x.data_ptr() % ALIGNMENT == y.data_ptr() % ALIGNMENT == 0 and all(
        n % elements == 0 for n in (x.stride(0), y.stride(0), x.shape[1], *d_outs)
    )
