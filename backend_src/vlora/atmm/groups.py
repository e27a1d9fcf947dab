"""Groups of LoRA weights. Each call of the operator applies one group.

A group contains the projections that share an input (q, k, v or gate, up), so that one call reads
the rows once. An adapter has a number in it, its slot. The CPU core packs the weights of a slot
once (csrc/atmm/README.md). The reference implementation reads the unpacked pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from vlora import backends, native
from vlora.atmm.cuda.library import padded_rank
from vlora.atmm.cuda.tables import require_in_place
from vlora.atmm.types import (
    DTYPES,
    ON_GPU,
    CapturedSegments,
    HeadMatrix,
    LoraPair,
    Segment,
    Segments,
)

_versions = itertools.count(1)
_latest = 0


def latest_version() -> int:
    """Return the version number of the most recent change of any group."""
    return _latest


def _publish(version: int) -> None:
    """Set the latest version.

    The changed group must have this version already. A thread that sees a new latest version looks
    for changed groups immediately, and would not look again for a change that it missed.
    """
    global _latest
    _latest = version


# Function that makes the device wait for a copy before it starts work that the calling thread
# launches later. The function itself returns immediately.
Wait = Callable[[], object]


class PendingCopies:
    """Copies of weights to a device that may still be under way, by slot.

    A thread that loads adapters adds copies. The engine's thread waits for them.
    """

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}

    def set(self, slot: int, wait: Wait | None) -> None:
        """Set the function that waits for the slot's weights; None if they are complete."""
        if wait is None:
            self._waits.pop(slot, None)
        else:
            self._waits[slot] = wait

    def wait_for(self, segments: Sequence[Segment]) -> None:
        """Make the calling thread's later work wait for the weights that these segments use."""
        if self._waits:
            for slot in Segments.of(segments).slots:
                if (wait := self._waits.pop(slot, None)) is not None:
                    wait()


class _Slots:
    """Slots of a group. A slot may be set and cleared while calls run: each call uses the weights
    that were set when it started.

    device_type: torch's type of the device whose rows the group is applied to. The compiled core
        packs the weights only for "cpu".
    versions: version number of each slot's content. Every change sets a new number.
    version: the number of the latest change.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.versions: list[int] = []
        self.version = 0
        self.pending = PendingCopies()

    def __len__(self) -> int:
        return len(self.versions)

    @property
    def _is_packed(self) -> bool:
        return self._device_type == "cpu" and backends.backend_of("atmm") == "cpu"

    def _is_packed_now(self, on_cpu: bool) -> bool:
        """Return whether new weights are packed at once instead of by the first forward pass."""
        return "native" in self.__dict__ or (on_cpu and self._is_packed)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot <= len(self):
            raise ValueError(f"slot {slot} is neither one of the {len(self)} slots nor the next")

    def _changed(self, slot: int) -> None:
        self.versions[slot : slot + 1] = [next(_versions)]
        self.version = self.versions[slot]
        _publish(self.version)


class LoraGroup(_Slots):
    """Projections [d_out, d_in] that share an input, with one pair (A, B) per projection and slot.

    `pairs[output][slot]` is None if the slot's adapter does not target the projection. The group
    keeps the pairs alive. The compiled core packs copies of them.

    dtype: dtype of rows, weights and outputs. Pairs may also be fp32. They are then rounded each
        time they are used, so their owner needs no second copy.
    """

    def __init__(
        self,
        d_in: int,
        d_outs: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device_type: str = "cpu",
    ) -> None:
        super().__init__(device_type)
        if dtype not in DTYPES and (self._is_packed or dtype not in ON_GPU):
            raise ValueError(
                f"dtype {dtype} is not supported; ATMM serves {', '.join(DTYPES.values())}, and"
                " fp16 on a GPU"
            )
        self.d_in = d_in
        self.d_outs = tuple(d_outs)
        self.width = sum(d_outs)
        self.dtype = dtype
        self.pairs: tuple[list[LoraPair | None], ...] = tuple([] for _ in self.d_outs)
        self.ever_used = False  # True once any slot has had a pair in this group.
        self._idle: set[int] = set()  # Slots without any pair in this group.

    @classmethod
    def of(cls, d_in: int, *columns: Sequence[LoraPair]) -> LoraGroup:
        """Return a group whose adapters target all its projections.

        columns: for each projection, its pairs by slot.
        """
        group = cls(d_in, [pairs[0].b.shape[0] for pairs in columns], columns[0][0].a.dtype)
        for row in zip(*columns, strict=True):
            group.append(row)
        return group

    def append(self, pairs: Sequence[LoraPair | None]) -> int:
        """Add an adapter, with a pair or None for each output, and return its slot."""
        slot = len(self)
        self.put(slot, pairs)
        return slot

    def slot_bytes(self, ranks: Sequence[int]) -> int:
        """Return the bytes of one adapter's packed copies in this group, a multiple of 64.

        ranks: rank for each output, 0 for a projection that the adapter does not target.
        """
        if self._is_packed:
            return int(self.native.slot_bytes(list(ranks)))
        stored = ranks if self._device_type == "cpu" else [padded_rank(rank) for rank in ranks]
        needed = sum((self.d_in + d_out) * r for d_out, r in zip(self.d_outs, stored, strict=True))
        return -(-needed * self.dtype.itemsize // 64) * 64

    def put(
        self,
        slot: int,
        pairs: Sequence[LoraPair | None],
        into: tuple[int, int] | None = None,
        wait: Wait | None = None,
    ) -> None:
        """Set an adapter's pairs, in an existing slot or the next one.

        pairs: pair for each output; None for a projection that the adapter does not target.
        into: (address, bytes) of the caller's memory for the packed copies, aligned to 64 bytes,
            which lives until the slot is cleared. If None, the compiled core allocates memory.
        wait: see `PendingCopies`; None if the pairs are complete.

        Raises ValueError for a slot after the next one, for a pair that does not fit its
        projection, and for one that is still being copied and that `require_in_place` rejects.
        """
        self._check_slot(slot)
        for output, (pair, d_out) in enumerate(zip(pairs, self.d_outs, strict=True)):
            if pair is not None:
                self._check(slot, output, pair, d_out)
        if wait is not None:
            require_in_place(slot, pairs, self.dtype)
        if self._is_packed_now(any(pair is not None and pair.a.is_cpu for pair in pairs)):
            _set_slot(self.native, slot, map(self.rounded, pairs), into)
        self.pending.set(slot, wait)
        for column, pair in zip(self.pairs, pairs, strict=True):
            column[slot : slot + 1] = [pair]
        if all(pair is None for pair in pairs):
            self._idle.add(slot)
        else:
            self._idle.discard(slot)
            self.ever_used = True
        self._changed(slot)

    def rounded(self, pair: LoraPair | None) -> LoraPair | None:
        """Return a pair in the group's dtype, without a copy if it already has this dtype."""
        return None if pair is None else LoraPair(*(factor.to(self.dtype) for factor in pair))

    def has(self, segments: Segments) -> bool:
        """Return whether any of the segments uses a pair in this group.

        A captured graph can be replayed with other slots, so captured segments use each group that
        had a pair when the capture was prepared.
        """
        if isinstance(segments, CapturedSegments):
            return self in segments.groups
        return not segments.slots <= self._idle

    def clear(self, slot: int) -> None:
        """Empty a slot. Calls that are running finish with its previous weights."""
        self.put(slot, [None] * len(self.d_outs))

    def _check(self, slot: int, output: int, pair: LoraPair, d_out: int) -> None:
        a, b = tuple(pair.a.shape), tuple(pair.b.shape)
        if len(a) != 2 or a[1] != self.d_in or b != (d_out, a[0]) or a[0] < 1:
            raise ValueError(
                f"slot {slot}, output {output}: A {a} and B {b} do not fit a projection"
                f" [{d_out}, {self.d_in}]"
            )
        if pair.a.dtype != pair.b.dtype or pair.a.dtype not in (self.dtype, torch.float32):
            raise ValueError(
                f"slot {slot}, output {output}: A is {pair.a.dtype} and B {pair.b.dtype},"
                f" the group is {self.dtype}; both must be of that type or torch.float32"
            )

    @cached_property
    def native(self) -> Any:
        """The group as the compiled core stores it, made on first use.

        Raises ValueError for pairs that are not in CPU memory.
        """
        group = native.kernels().atmm.Group(self.d_in, list(self.d_outs), DTYPES[self.dtype])
        for slot, pairs in enumerate(zip(*self.pairs, strict=True)):
            _set_slot(group, slot, map(self.rounded, pairs))
        return group

    def fix_order(self) -> None:
        """Make the sums of a row independent of the other rows of a call from now on."""
        if self._is_packed:
            self.native.fix_order()


def _set_slot(
    group: Any, slot: int, pairs: Iterable[LoraPair | None], into: tuple[int, int] | None = None
) -> None:
    alive = list(pairs)  # The list keeps the tensors alive until they are packed.
    group.set_slot(slot, [None if pair is None else factors(*pair) for pair in alive], into)


class HeadGroup(_Slots):
    """Vision task heads by slot, fp32, of any number of classes; None without a head."""

    def __init__(self, d_in: int, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.d_in = d_in
        self.heads: list[HeadMatrix | None] = []

    def classes(self, slot: int) -> int:
        """Return the number of classes of the slot's head; 0 without a head."""
        head = self.heads[slot]
        return 0 if head is None else head.weight.shape[0]

    def append(self, head: HeadMatrix | None) -> int:
        """Add an adapter's head and return its slot. Raise ValueError if it does not fit."""
        self.put(len(self), head)
        return len(self) - 1

    def put(self, slot: int, head: HeadMatrix | None, wait: Wait | None = None) -> None:
        """Set the head of an existing slot or the next one; None for an adapter without a head.

        wait: see `PendingCopies`; None if the head is complete.

        Raises ValueError for a slot after the next one, and for a head that does not fit.
        """
        self._check_slot(slot)
        if head is not None and (
            head.weight.dim() != 2
            or head.weight.shape[1] != self.d_in
            or head.bias.shape != (head.weight.shape[0],)
            or head.weight.dtype != torch.float32
        ):
            raise ValueError(
                f"slot {slot}: a head of {tuple(head.weight.shape)} {head.weight.dtype} with"
                f" bias {tuple(head.bias.shape)} does not fit fp32 inputs of {self.d_in}"
            )
        if wait is not None:
            require_in_place(slot, [head], torch.float32)
        if self._is_packed_now(head is not None and head.weight.is_cpu):
            _set_head(self.native, slot, head)
        self.pending.set(slot, wait)
        self.heads[slot : slot + 1] = [head]
        self._changed(slot)

    @cached_property
    def native(self) -> Any:
        """The group as the compiled core stores it, made on first use."""
        group = native.kernels().atmm.Group(self.d_in, [1], DTYPES[torch.float32])
        for slot, head in enumerate(self.heads):
            _set_head(group, slot, head)
        return group


def _set_head(group: Any, slot: int, head: HeadMatrix | None) -> None:
    if head is None:
        group.set_head(slot, None)
        return
    bias = head.bias.float()  # The variable keeps the tensor alive until it is copied.
    group.set_head(slot, factors(head.weight, bias[None]))


def factors(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the addresses, shapes and strides of two matrices, as the compiled core takes them.

    Raises ValueError if one is not in CPU memory.
    """
    core = native.kernels().atmm
    for matrix in (a, b):
        if not matrix.is_cpu:
            raise ValueError(f"weights are on {matrix.device}; the CPU operator cannot read them")
    return core.Factors(*(core.Matrix(m.data_ptr(), m.shape, m.stride()) for m in (a, b)))
