"""Weight slab: the target matrices of all layers in one contiguous tensor.

The base slab is written once, at load, and then sealed: a write to its pages faults, since base
weights are never modified (decision 39). q, k and v are adjacent, and so are gate and up, so a
fused gemm uses a view. The switcher decides which slab a forward pass reads.
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
    """Location of one matrix, or of one fused group, in the slab; offset in elements."""

    offset: int
    rows: int
    columns: int

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """Return a view [rows, columns] without a copy."""
        return slab[self.offset : self.offset + self.rows * self.columns].view(
            self.rows, self.columns
        )


class WeightSlab:
    """Owner of the base weights.

    shapes: target → (d_out, d_in), the same in every layer.
    dtype: of the stored weights.
    regions: of the fused groups of all layers, in the order of GROUPS within a layer.
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
        self._regions: dict[tuple[int, str], Region] = {}
        offset = 0
        for layer in range(layers):
            for target in TARGETS:
                rows, columns = shapes[target]
                self._regions[layer, target] = Region(offset, rows, columns)
                offset += rows * columns
        self.elements = offset
        self.base = self.reserve()
        self.regions = tuple(
            self.region(layer, *group) for layer in range(layers) for group in GROUPS
        )

    def region(self, layer: int, *targets: str) -> Region:
        """Return the location of one target, or of adjacent targets that share their input,
        fused."""
        first = self._regions[layer, targets[0]]
        rows = sum(self._regions[layer, target].rows for target in targets)
        return Region(first.offset, rows, first.columns)

    def reserve(self) -> torch.Tensor:
        """Return another slab of this layout; it takes memory only where it is written."""
        return hugepages.hugepage_zeros(self.elements, dtype=self.dtype)

    def seal(self) -> None:
        """Make the base slab read-only: writing to it faults from now on. Raise OSError if that
        fails."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.base.data_ptr())
        if libc.mprotect(address, ctypes.c_size_t(self.base.nbytes), mmap.PROT_READ):
            error = ctypes.get_errno()
            raise OSError(error, f"mprotect: {os.strerror(error)}")

    def digest(self) -> str:
        """Return the SHA-256 of the base weights, which must never change."""
        return hashlib.sha256(self.base.view(torch.uint8).numpy().data).hexdigest()
