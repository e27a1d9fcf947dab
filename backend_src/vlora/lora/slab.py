"""Target matrices of all layers in one contiguous slab.

The base slab is written once, at load, and then sealed: its pages fault on a write (DESIGN: base
weights are never modified). q, k, v lie adjacent, and so do gate and up: a fused GEMM is a view.
Which slab a forward pass reads is the switcher's.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vlora.memory import hugepages

GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
"""Targets that share their input, in slab order."""

ATTENTION: tuple[str, ...] = (*GROUPS[0], *GROUPS[1])
"""Targets in a layer's `self_attn`; the others are in its `mlp`."""

TARGETS: tuple[str, ...] = tuple(target for group in GROUPS for target in group)


@dataclass(frozen=True)
class Region:
    """Where one matrix, or one fused group of them, lies in the slab (in elements)."""

    offset: int
    rows: int
    columns: int

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """[rows, columns] view, no copy."""
        return slab[self.offset : self.offset + self.rows * self.columns].view(
            self.rows, self.columns
        )


class WeightSlab:
    """Owns the base weights.

    shapes: target → (d_out, d_in), the same in every layer. dtype: in which they are stored.
    regions: the fused groups of all layers, GROUPS within a layer.
    """

    def __init__(
        self,
        layers: int,
        shapes: Mapping[str, tuple[int, int]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layers = layers
        self.shapes = dict(shapes)
        self.dtype = dtype
        self._places: dict[tuple[int, str], Region] = {}
        offset = 0
        for layer in range(layers):
            for target in TARGETS:
                rows, columns = shapes[target]
                self._places[layer, target] = Region(offset, rows, columns)
                offset += rows * columns
        self.elements = offset
        self.base = self.reserve()
        self.regions = tuple(
            self.place(layer, *group) for layer in range(layers) for group in GROUPS
        )

    def place(self, layer: int, *targets: str) -> Region:
        """Where one target lies, or of adjacent targets that share their input, fused."""
        first = self._places[layer, targets[0]]
        rows = sum(self._places[layer, target].rows for target in targets)
        return Region(first.offset, rows, first.columns)

    def reserve(self) -> torch.Tensor:
        """Another slab of this layout: addresses, which take memory where they are written."""
        return hugepages.hugepage_zeros(self.elements, dtype=self.dtype)

    def seal(self) -> None:
        """From now on a write to the base slab is a fault of memory. OSError if that is refused."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.base.data_ptr())
        if libc.mprotect(address, ctypes.c_size_t(self.base.nbytes), mmap.PROT_READ):
            error = ctypes.get_errno()
            raise OSError(error, f"mprotect: {os.strerror(error)}")

    def digest(self) -> str:
        """SHA-256 of the base weights: the same before and after any work."""
        return hashlib.sha256(self.base.view(torch.uint8).numpy().data).hexdigest()
