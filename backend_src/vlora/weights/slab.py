"""Weight slab: the target matrices of all layers in one contiguous tensor.

The base slab is written once, at load, and then sealed, so that a write to it faults (decision 39).
Projections with the same input are adjacent, so that one gemm reads them as one matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vlora.device.device import HOST, Device
from vlora.kernels.formats import Format

# Targets in the order of the slab, grouped by their input.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)

# Targets in `self_attn` of a layer. The others are in `mlp`.
ATTENTION: tuple[str, ...] = (*GROUPS[0], *GROUPS[1])

TARGETS: tuple[str, ...] = tuple(target for group in GROUPS for target in group)


@dataclass(frozen=True)
class Region:
    """Location of a matrix or fused group in the slab. `offset`: number of elements before it."""

    offset: int
    rows: int
    columns: int

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """Return a view [rows, columns] without a copy."""
        end = self.offset + self.rows * self.columns
        return slab[self.offset : end].view(self.rows, self.columns)


class WeightSlab:
    """Owner of the base weights.

    shapes: target → (d_out, d_in), the same in every layer.
    elements: number of elements of the slab.
    regions: locations of the fused groups, by layer and then in the order of GROUPS.
    """

    # Format of quantized weights; always None here (see `QuantizedSlab.format`).
    format: Format | None = None

    def __init__(
        self,
        layers: int,
        shapes: Mapping[str, tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        device: Device = HOST,
    ) -> None:
        self.layers = layers
        self.shapes = dict(shapes)
        self.dtype = dtype
        self.device = device
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
        """Return the location of one target, or of adjacent ones with the same input."""
        first = self._regions[layer, targets[0]]
        rows = sum(self._regions[layer, target].rows for target in targets)
        return Region(first.offset, rows, first.columns)

    def target(self, layer: int, target: str) -> torch.Tensor:
        """Return one base matrix, to which the caller may write before `seal`."""
        return self.region(layer, target).view(self.base)

    def reserve(self) -> torch.Tensor:
        """Return another slab of zeros. The system provides its memory when it is written."""
        return self.device.zeros(self.elements, dtype=self.dtype)

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """Base weights of the fused groups, in the order of `regions`."""
        return tuple(region.view(self.base) for region in self.regions)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def seal(self) -> None:
        """Make the base slab read-only: writing to it faults. Raise OSError if that fails."""
        self.device.seal(self.base)

    def digest(self) -> str:
        """Return the SHA-256 of the base weights, with which tests show that nothing changes."""
        return digest(self.base)


def digest(memory: torch.Tensor) -> str:
    return hashlib.sha256(memory.cpu().view(torch.uint8).numpy().data).hexdigest()
