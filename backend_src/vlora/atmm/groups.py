"""Weights by slot, packed once: what a call of the operator goes through.

A group holds the projections that share an input (q, k, v; gate, up), so that one call reads its
rows once. Packing is the CPU core's (csrc/atmm/README.md); the reference reads the plain pairs.
Knows nothing of names, files or pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from vlora import native
from vlora.atmm import backends
from vlora.atmm.types import DTYPES, Head, LoraPair


class LoraGroup:
    """Projections [d_out, d_in] with one input, and each slot's pair for each of them.

    pairs[output][slot] is None where that adapter does not target that projection. A group keeps
    what it is given alive; the packed copies are its own. dtype: of rows, weights and outputs.
    """

    def __init__(
        self, d_in: int, d_outs: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"ATMM serves {', '.join(DTYPES.values())}, not {dtype}")
        self.d_in = d_in
        self.d_outs = tuple(d_outs)
        self.width = sum(d_outs)
        self.dtype = dtype
        self.pairs: tuple[list[LoraPair | None], ...] = tuple([] for _ in self.d_outs)
        self._packed: list[torch.Tensor] = []

    def __len__(self) -> int:
        """Slots so far."""
        return len(self.pairs[0])

    @classmethod
    def of(cls, d_in: int, *columns: Sequence[LoraPair]) -> LoraGroup:
        """A group of whole adapters: columns[output][slot]. For tests and benches."""
        group = cls(d_in, [pairs[0].b.shape[0] for pairs in columns], columns[0][0].a.dtype)
        for row in zip(*columns, strict=True):
            group.append(row)
        return group

    def append(self, pairs: Sequence[LoraPair | None]) -> int:
        """Add one adapter: its pair for each output, or None. Returns its slot.

        Raises ValueError for a pair that does not fit its projection.
        """
        slot = len(self)
        for output, (pair, d_out) in enumerate(zip(pairs, self.d_outs, strict=True)):
            if pair is not None:
                self._check(slot, output, pair, d_out)
        for column, pair in zip(self.pairs, pairs, strict=True):
            column.append(pair)
        if "native" in self.__dict__:
            self._add(self.native, slot)
        elif (
            any(pair is not None and pair.a.is_cpu for pair in pairs)
            and backends.default() == "cpu"
        ):
            _ = self.native  # packs now, at load, and not in the first forward pass
        return slot

    def _check(self, slot: int, output: int, pair: LoraPair, d_out: int) -> None:
        a, b = tuple(pair.a.shape), tuple(pair.b.shape)
        if len(a) != 2 or a[1] != self.d_in or b != (d_out, a[0]) or a[0] < 1:
            raise ValueError(
                f"slot {slot}, output {output}: A {a} and B {b} do not fit a projection"
                f" [{d_out}, {self.d_in}]"
            )
        if pair.a.dtype != self.dtype or pair.b.dtype != self.dtype:
            raise ValueError(
                f"slot {slot}, output {output}: A is {pair.a.dtype} and B {pair.b.dtype},"
                f" the group is {self.dtype}"
            )

    @cached_property
    def native(self) -> Any:
        """The core's view of this group, made when it is first used."""
        core = native.kernels().atmm
        group = core.Group(self.d_in, list(self.d_outs), DTYPES[self.dtype])
        for slot in range(len(self)):
            self._add(group, slot)
        return group

    def _add(self, group: Any, slot: int) -> None:
        # One store in the order of use, all A, then all B: what lies ahead is what comes next.
        pairs = [column[slot] for column in self.pairs]
        present = [pair for pair in pairs if pair is not None]
        store, places = pack(group, [p.a for p in present], [p.b for p in present])
        self._packed.append(store)
        addresses = iter(zip(places[: len(present)], places[len(present) :], strict=True))
        group.add_slot([None if p is None else (p.rank, *next(addresses)) for p in pairs])


class HeadGroup:
    """Heads by slot, None where an adapter has none; fp32, any number of classes each."""

    def __init__(self, d_in: int) -> None:
        self.d_in = d_in
        self.heads: list[Head | None] = []
        self._packed: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.heads)

    def classes(self, slot: int) -> int:
        """Scores that the head of `slot` gives, 0 for none."""
        head = self.heads[slot]
        return 0 if head is None else head.weight.shape[0]

    def append(self, head: Head | None) -> int:
        """Add one adapter's head. Returns its slot; ValueError if it does not fit."""
        if head is not None and (
            head.weight.dim() != 2
            or head.weight.shape[1] != self.d_in
            or head.bias.shape != (head.weight.shape[0],)
            or head.weight.dtype != torch.float32
        ):
            raise ValueError(
                f"slot {len(self)}: a head of {tuple(head.weight.shape)} {head.weight.dtype} with"
                f" bias {tuple(head.bias.shape)} does not fit fp32 inputs of {self.d_in}"
            )
        self.heads.append(head)
        if "native" in self.__dict__:
            self._add(self.native, head)
        elif head is not None and head.weight.is_cpu and backends.default() == "cpu":
            _ = self.native
        return len(self) - 1

    @cached_property
    def native(self) -> Any:
        group = native.kernels().atmm.Group(self.d_in, [1], DTYPES[torch.float32])
        for head in self.heads:
            self._add(group, head)
        return group

    def _add(self, group: Any, head: Head | None) -> None:
        if head is None:
            group.add_slot([None])
            return
        store, (weight,) = pack(group, [head.weight], [])
        bias = head.bias.float().contiguous()
        self._packed += [store, bias]
        group.add_slot([(head.weight.shape[0], weight, bias.data_ptr())])


def pack(
    group: Any, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[int]]:
    """Matrices [n, k], any strides, of the first product (x Aᵀ) and the second → the panels that
    the kernels read (csrc/atmm/README.md): one store, and the address of each in it, on 64 bytes.
    """
    matrices = [(matrix, True) for matrix in first] + [(matrix, False) for matrix in second]
    sizes = [group.packed_bytes(*matrix.shape, is_first) for matrix, is_first in matrices]
    store = torch.empty(sum(sizes) + 64, dtype=torch.uint8)
    places, at = [], store.data_ptr() + -store.data_ptr() % 64
    for (matrix, is_first), size in zip(matrices, sizes, strict=True):
        group.pack(at, matrix.data_ptr(), *matrix.shape, *matrix.stride(), is_first)
        places.append(at)
        at += size
    return store, places
