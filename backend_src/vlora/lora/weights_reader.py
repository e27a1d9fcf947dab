"""How one adapter's weights come out of its file: one read, one cast, one look for NaN, one digest.

A thread that gives up the interpreter's lock beside a busy engine waits for it again, so a load is
a few calls over all of the file, not some for each matrix (decision 50). The recipe is made when
the file is described and checked; knows nothing of names, configs or patterns.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from vlora.atmm.types import LoraPair
from vlora.lora.peft_config import Refusal

if TYPE_CHECKING:
    from vlora.ids import MatrixId

FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
"""Stored types that are served; 8-bit ones mean nothing without scales."""


MOST_PARTS = 1024
"""Of one call (IOV_MAX)."""


@dataclass(frozen=True)
class Layout:
    """A safetensors file's tensors as they lie in it: without holes, one after the other.

    start: bytes before the first. header: a hash of these bytes, in this process. sizes: elements.
    """

    start: int
    header: int
    keys: tuple[str, ...]
    types: tuple[str, ...]
    sizes: tuple[int, ...]

    def read(self, path: Path, lie: ReadPlan, refuse: Refusal) -> torch.Tensor:
        """The tensors that are wanted, in one and in that order, [elements] in fp32. Refused where
        the file is not the one that was described, or cannot be read."""
        size = lie.runs[-1][2]
        header, data = bytearray(self.start), torch.empty(size, dtype=torch.uint8)
        wanted, others = data.numpy().data, memoryview(bytearray(lie.others))
        parts = (
            wanted[start:end] if end <= size else others[start - size : end - size]
            for start, end in lie.parts
        )
        try:
            _read_into(path, [memoryview(header), *parts])
        except (OSError, EOFError) as error:
            raise refuse(f"cannot be read: {error}") from error
        if hash(bytes(header)) != self.header:
            raise refuse("has changed since it was described")
        runs = []
        for kind, start, end in lie.runs:
            part = data[start:end]
            if start % kind.itemsize:
                part = part.clone()  # odd sizes of a smaller type lie before it
            runs.append(part.view(kind).to(torch.float32))
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def lie(self, order: Sequence[int]) -> ReadPlan:
        """In memory: these tensors in this order, then the file's others."""
        wanted = len(order)
        order = [*order, *sorted(set(range(len(self.keys))) - set(order))]
        kinds = [FLOATS[self.types[index]] for index in order]
        ends = list(
            accumulate(self.sizes[i] * k.itemsize for i, k in zip(order, kinds, strict=True))
        )
        places = zip([0, *ends[:-1]], ends, strict=True)
        parts = [place for _, place in sorted(zip(order, places, strict=True))]
        runs = []
        start = 0
        for kind, run in groupby(
            zip(kinds[:wanted], ends[:wanted], strict=True), lambda one: one[0]
        ):
            *_, (_, end) = run
            runs.append((kind, start, end))
            start = end
        return ReadPlan(tuple(parts), tuple(runs), ends[-1] - start)


@dataclass(frozen=True)
class ReadPlan:
    """Where a file's bytes go. parts: (start, end) of each tensor, in the file's order. runs:
    (type, start, end) of neighbours of one type that are wanted. others: bytes after these."""

    parts: tuple[tuple[int, int], ...]
    runs: tuple[tuple[torch.dtype, int, int], ...]
    others: int


def _read_into(path: Path, parts: Sequence[memoryview]) -> None:
    """The file's beginning into these, all of them. Not mapped: a file cut short under a mapping
    ends the process."""
    left = [part for part in parts if part.nbytes]
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = 0
        while left:
            count = os.preadv(opened, left[:MOST_PARTS], at)
            if count == 0:
                raise EOFError("it ends early")
            at += count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if count:
                left[0] = left[0][count:]
    finally:
        os.close(opened)


def cast(pairs: Mapping[MatrixId, LoraPair], dtype: torch.dtype) -> dict[MatrixId, LoraPair]:
    """All of an adapter's pairs in this type: views of one tensor."""
    factors = [*(pair.a for pair in pairs.values()), *(pair.b for pair in pairs.values())]
    flat = torch.cat([factor.flatten() for factor in factors]).to(dtype)
    return _cut(flat, pairs, [tuple(factor.shape) for factor in factors])


def _cut(
    flat: torch.Tensor, places: Iterable[MatrixId], shapes: Sequence[tuple[int, ...]]
) -> dict[MatrixId, LoraPair]:
    """flat: [elements], A of all places, then B of all; shapes in that order."""
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    matrices = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    half = len(matrices) // 2
    return {
        place: LoraPair(a, b)
        for place, a, b in zip(places, matrices[:half], matrices[half:], strict=True)
    }


@dataclass(frozen=True)
class WeightsReader:
    """ranks, scales: by place, in the places' order. order, shapes: of the layout's tensors, A of
    all places, then B of all."""

    layout: Layout
    ranks: Mapping[MatrixId, int]
    scales: tuple[float, ...]
    order: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]

    def shared(self) -> WeightsReader:
        """One that is equal to it: thousands of adapters of one kind need one."""
        key = (self.layout.start, self.layout.header, tuple(self.ranks.items()), self.scales)
        return _KNOWN.setdefault(key, self)

    def read(self, path: Path, refuse: Refusal) -> tuple[dict[MatrixId, LoraPair], str]:
        """The pairs in fp32, the scale folded into B, and their digest: SHA-256 over places,
        shapes and values. Refused where the file cannot be read, or holds NaN or Inf."""
        flat = self._values(path, refuse)
        for scale, start, end in self._scaled:
            flat[start:end].mul_(scale)
        if not all(map(math.isfinite, torch.aminmax(flat))):
            raise refuse(self._not_finite(self._values(path, refuse)))
        state = hashlib.sha256(self._declared)
        state.update(flat.numpy().data)
        return _cut(flat, self.ranks, self.shapes), state.hexdigest()

    def _values(self, path: Path, refuse: Refusal) -> torch.Tensor:
        """As stored, in fp32."""
        return self.layout.read(path, self._lie, refuse)

    def _not_finite(self, flat: torch.Tensor) -> str:
        """What is wrong with the first tensor that is not finite in fp32 once it is scaled."""
        scales = (1.0,) * len(self.ranks) + self.scales
        tensors = flat.split_with_sizes(self._sizes)
        for index, values, scale in zip(self.order, tensors, scales, strict=True):
            key = self.layout.keys[index]
            if not bool(torch.isfinite(values).all()):
                return f"has NaN or Inf in '{key}'"
            if not bool(torch.isfinite(values * scale).all()):
                return f"has '{key}', which overflows {values.dtype} once scaled by {scale:g}"
        return "has changed while it was being loaded"

    @cached_property
    def _lie(self) -> ReadPlan:
        return self.layout.lie(self.order)

    @cached_property
    def _sizes(self) -> list[int]:
        return [self.layout.sizes[index] for index in self.order]

    @cached_property
    def _scaled(self) -> list[tuple[float, int, int]]:
        """(scale, start, end) of neighbours whose scale is not 1."""
        places = len(self.ranks)
        at, found = sum(self._sizes[:places]), []
        of_b = zip(self.scales, self._sizes[places:], strict=True)
        for scale, run in groupby(of_b, key=lambda one: one[0]):
            end = at + sum(size for _, size in run)
            if scale != 1.0:
                found.append((scale, at, end))
            at = end
        return found

    @cached_property
    def _declared(self) -> bytes:
        return repr((tuple(self.ranks), self.shapes)).encode()


_KNOWN: WeakValueDictionary[tuple[object, ...], WeightsReader] = WeakValueDictionary()
