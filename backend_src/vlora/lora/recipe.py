"""How one adapter's weights come out of its file: one read, one cast, one look for NaN, one digest.

A thread that gives up the interpreter's lock beside a busy engine waits for it again, so a load is
a few calls over all of the file, not some for each matrix (decision 50). The recipe is made when
the file is described and checked; knows nothing of names, configs or patterns.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from vlora.atmm.types import LoraPair
from vlora.lora.peft_config import Refusal

if TYPE_CHECKING:
    from vlora.lora.adapter import Place

FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
"""Stored types that are served; 8-bit ones mean nothing without scales."""


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

    def read(self, path: Path, refuse: Refusal) -> list[torch.Tensor]:
        """All tensors, each [elements] as stored. Refused where the file is not the one that was
        described, or cannot be read."""
        runs = [
            (FLOATS[kind], [size for _, size in run])
            for kind, run in groupby(
                zip(self.types, self.sizes, strict=True), key=lambda one: one[0]
            )
        ]
        size = sum(kind.itemsize * sum(sizes) for kind, sizes in runs)
        header, data = bytearray(self.start), torch.empty(size, dtype=torch.uint8)
        try:
            _read_into(path, [memoryview(header), data.numpy().data])
        except (OSError, EOFError) as error:
            raise refuse(f"cannot be read: {error}") from error
        if hash(bytes(header)) != self.header:
            raise refuse("has changed since it was described")
        tensors: list[torch.Tensor] = []
        at = 0
        for kind, sizes in runs:
            end = at + kind.itemsize * sum(sizes)
            part = data[at:end]
            if at % kind.itemsize:
                part = part.clone()  # odd sizes of a smaller type lie before it
            tensors += part.view(kind).split_with_sizes(sizes)
            at = end
        return tensors


def _read_into(path: Path, parts: Sequence[memoryview]) -> None:
    """The file's beginning into these, all of them. Not mapped: a file cut short under a mapping
    ends the process."""
    left = [part for part in parts if part.nbytes]
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = 0
        while left:
            count = os.preadv(opened, left, at)
            if count == 0:
                raise EOFError("it ends early")
            at += count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if count:
                left[0] = left[0][count:]
    finally:
        os.close(opened)


def cast(pairs: Mapping[Place, LoraPair], dtype: torch.dtype) -> dict[Place, LoraPair]:
    """All of an adapter's pairs in this type: views of one tensor."""
    factors = [*(pair.a for pair in pairs.values()), *(pair.b for pair in pairs.values())]
    flat = torch.cat([factor.flatten() for factor in factors]).to(dtype)
    return _cut(flat, pairs, [tuple(factor.shape) for factor in factors])


def _cut(
    flat: torch.Tensor, places: Iterable[Place], shapes: Sequence[tuple[int, ...]]
) -> dict[Place, LoraPair]:
    """flat: [elements], A of all places, then B of all; shapes in that order."""
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    matrices = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    half = len(matrices) // 2
    return {
        place: LoraPair(a, b)
        for place, a, b in zip(places, matrices[:half], matrices[half:], strict=True)
    }


@dataclass(frozen=True)
class Recipe:
    """ranks, scales: by place, in the places' order. order, shapes: of the layout's tensors, A of
    all places, then B of all."""

    layout: Layout
    ranks: Mapping[Place, int]
    scales: tuple[float, ...]
    order: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]

    def shared(self) -> Recipe:
        """One that is equal to it: thousands of adapters of one kind need one."""
        key = (self.layout.start, self.layout.header, tuple(self.ranks.items()), self.scales)
        return _KNOWN.setdefault(key, self)

    def read(self, path: Path, refuse: Refusal) -> tuple[dict[Place, LoraPair], str]:
        """The pairs in fp32, the scale folded into B, and their digest: SHA-256 over places,
        shapes and values. Refused where the file cannot be read, or holds NaN or Inf."""
        stored = self.layout.read(path, refuse)
        tensors = [stored[index] for index in self.order]
        sizes = [self.layout.sizes[index] for index in self.order]
        flat = torch.empty(sum(sizes), dtype=torch.float32)
        torch.cat(tensors, out=flat)
        places = len(self.ranks)
        at = sum(sizes[:places])
        for scale, run in groupby(
            zip(self.scales, sizes[places:], strict=True), key=lambda one: one[0]
        ):
            size = sum(size for _, size in run)
            if scale != 1.0:
                flat[at : at + size].mul_(scale)
            at += size
        if not all(map(math.isfinite, torch.aminmax(flat))):
            raise refuse(next(self._not_finite(tensors)))
        state = hashlib.sha256(repr((tuple(self.ranks), self.shapes)).encode())
        state.update(flat.numpy().data)
        return _cut(flat, self.ranks, self.shapes), state.hexdigest()

    def _not_finite(self, tensors: Sequence[torch.Tensor]) -> Iterator[str]:
        """What is wrong with the first tensor that is not finite in fp32 once it is scaled."""
        scales = (1.0,) * len(self.ranks) + self.scales
        for index, tensor, scale in zip(self.order, tensors, scales, strict=True):
            key, values = self.layout.keys[index], tensor.to(torch.float32)
            if not bool(torch.isfinite(values).all()):
                yield f"has NaN or Inf in '{key}'"
            elif not bool(torch.isfinite(values * scale).all()):
                yield f"has '{key}', which overflows {values.dtype} once scaled by {scale:g}"


_KNOWN: WeakValueDictionary[tuple[object, ...], Recipe] = WeakValueDictionary()
