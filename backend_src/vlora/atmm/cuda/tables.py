"""Tables of adapters that the kernels read from device memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vlora.atmm.cuda.library import ALIGNMENT, RANK_STEP, padded_rank
from vlora.atmm.types import HeadMatrix, LoraPair

MIN_SLOTS = 256  # Number of entries of a new table of adapters.
# Entry of a slot that was never set: an A without a B, which kernels report as a fault.
NO_ADAPTER = (1, 0, 0)


class DeviceGroup:
    """Adapters of projections that share an input, as the kernels read them.

    `tables[output]` is [capacity, 3] int64: address of A, address of B, rank. Matrices are copied
    if their rank must be padded to a multiple of RANK_STEP, if they are not contiguous, or if they
    have another type or device. All others are used in place.

    The tables are reallocated only when the slots exceed their capacity, so a captured graph can
    read them after adapters were loaded or evicted. Kernels report entries that were never set.
    """

    def __init__(
        self,
        d_in: int,
        d_outs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        keep: bool = True,
    ) -> None:
        """Create a group without adapters.

        keep: whether to hold references to matrices that are used in place. If False, the caller
            must.
        """
        self.d_in, self.d_outs, self.dtype, self.device = d_in, tuple(d_outs), dtype, device
        self.max_rank = RANK_STEP
        self.slots = 0
        self.capacity = MIN_SLOTS
        self.version = -1  # `version` of the `LoraGroup` when this group was last compared with it.
        # Version of each copied slot, as in the `versions` of the group that it was copied from.
        self.versions: dict[int, int] = {}
        self.tables: list[torch.Tensor] = []
        # Memory of all tables, [outputs, capacity, 3].
        self._table = torch.empty(0, dtype=torch.int64)
        self._rows: list[list[tuple[int, int, int]]] = [[] for _ in self.d_outs]
        self._keep_all = keep
        # Matrices of each slot, kept alive while the tables contain their addresses.
        self._keep: dict[int, list[torch.Tensor]] = {}
        # Slots that have changed since the tables on the device were last updated.
        self._changed: set[int] = set()

    @property
    def layout(self) -> tuple[int, ...]:
        """Values that a captured call contains: addresses of the tables, and the maximum rank."""
        return *(table.data_ptr() for table in self.tables), self.max_rank

    def append(self, pairs: Sequence[LoraPair | None]) -> None:
        self.put(self.slots, pairs)

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """Set the pairs of an existing slot or of the next one.

        Kernels that are launched before the next `ready` use the previous pairs.
        """
        self._begin(slot)
        for rows, pair in zip(self._rows, pairs, strict=True):
            row = (0, 0, 0) if pair is None else self._store(slot, pair, padded(pair))
            rows[slot : slot + 1] = [row]

    def put_head(self, slot: int, head: HeadMatrix | None) -> None:
        """Set a head, with its weight in place of A and its bias in place of B, not padded."""
        self._begin(slot)
        row = (0, 0, 0) if head is None else self._store(slot, head, head)
        self._rows[0][slot : slot + 1] = [row]

    def _begin(self, slot: int) -> None:
        self._keep[slot] = []
        self._changed.add(slot)
        self.slots = max(self.slots, slot + 1)

    def ready(self) -> None:
        """Update the tables on the device. Call this before a call of the library or a capture."""
        if not self.tables or self.slots > self.capacity:
            while self.capacity < self.slots:
                self.capacity *= 2
            missing = [NO_ADAPTER] * (self.capacity - self.slots)
            # The previous tables are freed only after the kernels that were launched with them.
            self._table = self._copied([[*rows, *missing] for rows in self._rows])
            self.tables = list(self._table.unbind())
        elif changed := sorted(self._changed):
            # Update the tables in place, since a captured graph reads them.
            rows = [[(slot, *rows[slot]) for slot in changed] for rows in self._rows]
            entries = self._copied(rows)
            self._table.index_copy_(1, entries[0, :, 0], entries[:, :, 1:])
        self._changed.clear()

    def _copied(self, values: Sequence[Sequence[tuple[int, ...]]]) -> torch.Tensor:
        """Return numbers as an int64 tensor on the device, which one transfer copies there."""
        pinned = torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return pinned.to(self.device, non_blocking=True)

    def _store(
        self, slot: int, given: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]
    ) -> tuple[int, int, int]:
        a, b = (factor.to(self.device, self.dtype).contiguous() for factor in factors)
        in_place = {id(matrix) for matrix in given}
        self._keep[slot] += [m for m in (a, b) if self._keep_all or id(m) not in in_place]
        self.max_rank = max(self.max_rank, padded_rank(a.shape[0]))
        return a.data_ptr(), b.data_ptr(), a.shape[0]


def padded(pair: LoraPair) -> LoraPair:
    """Return a pair whose rank is padded with zeros to a multiple of RANK_STEP."""
    missing = padded_rank(pair.rank) - pair.rank
    if missing == 0:
        return pair
    pad = torch.nn.functional.pad
    return LoraPair(pad(pair.a, (0, 0, 0, missing)), pad(pair.b, (0, missing)))


def require_in_place(
    slot: int, weights: Iterable[LoraPair | HeadMatrix | None], dtype: torch.dtype
) -> None:
    """Raise ValueError unless kernels read all matrices where they are.

    `DeviceGroup` would copy others again, before their first copy to the device is complete.
    """
    for matrices in weights:
        rank = matrices.rank if isinstance(matrices, LoraPair) else 0
        for matrix in matrices or ():
            if rank % RANK_STEP or matrix.dtype != dtype or not matrix.is_contiguous():
                raise ValueError(
                    f"slot {slot}: a matrix {list(matrix.shape)} of {matrix.dtype} is still being"
                    f" copied; it must be contiguous, of {dtype}, and of a rank that is a multiple"
                    f" of {RANK_STEP}"
                )


def is_aligned(y: torch.Tensor, x: torch.Tensor, d_outs: Sequence[int]) -> bool:
    """Return whether tensor cores can read all rows of x and y, 16 bytes at a time."""
    elements = ALIGNMENT // x.element_size()
    return x.data_ptr() % ALIGNMENT == y.data_ptr() % ALIGNMENT == 0 and all(
        n % elements == 0 for n in (x.stride(0), y.stride(0), x.shape[1], *d_outs)
    )
