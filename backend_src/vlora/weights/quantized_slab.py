"""Slab of quantized base weights: the target matrices of all layers, contiguous and read-only.

Adapters are never merged into it: merged weights would have to be quantized again, with an error
that differs from adapter to adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from vlora.device.device import HOST
from vlora.kernels.formats import Format
from vlora.kernels.quantized import QuantizedWeight, allocate, arrange
from vlora.weights.slab import GROUPS, digest

ALIGNMENT = 64


class QuantizedSlab:
    """Owner of the quantized base weights.

    shapes: target → (d_out, d_in), the same in every layer.
    dtype: type in which products with many rows are computed, fp32 or bf16.
    views: quantized matrices of the fused groups, by layer and then in the order of GROUPS.
    """

    device = HOST  # Device that stores the weights.

    def __init__(
        self, layers: int, shapes: Mapping[str, tuple[int, int]], form: Format, dtype: torch.dtype
    ) -> None:
        self.layers = layers
        self.shapes = dict(shapes)
        self.format = form
        self.dtype = dtype
        sizes = [padded_bytes(form, group, shapes) for group in GROUPS]
        self.memory = self.device.zeros(layers * sum(sizes), dtype=torch.uint8)
        self.views: list[QuantizedWeight] = []
        start = 0
        for size, group in zip(sizes * layers, GROUPS * layers, strict=True):
            shape = group_shape(group, shapes)
            self.views.append(allocate(form, *shape, dtype, self.memory[start:]))
            start += size

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def elements(self) -> int:
        return sum(rows * depth for rows, depth in (view.shape for view in self.views))

    def target(self, layer: int, target: str) -> QuantizedWeight:
        """Return one matrix, to which the caller may write before `seal`."""
        number = next(i for i, group in enumerate(GROUPS) if target in group)
        before = GROUPS[number][: GROUPS[number].index(target)]
        first = sum(self.shapes[other][0] for other in before)
        return self.views[layer * len(GROUPS) + number].rows(first, self.shapes[target][0])

    def set_order(self, layer: int, group: int, order: torch.Tensor) -> None:
        """Set the order of the stored columns of a group (index in GROUPS), as in
        `QuantizedWeight.order`.
        """
        index = layer * len(GROUPS) + group
        self.views[index] = replace(self.views[index], order=order)

    def arrange(self) -> None:
        """Rearrange the matrices, which must be complete, for the kernels that read them. Earlier
        views are then invalid, and `target` cannot be called.
        """
        self.views = [arrange(view) for view in self.views]

    def seal(self) -> None:
        """Make the slab read-only. Raise OSError if that fails."""
        self.device.seal(self.memory)

    def digest(self) -> str:
        """Return the SHA-256 of the weights. Tests use it to show that nothing changes them."""
        return digest(self.memory)


def group_shape(group: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the shape (d_out, d_in) of the fused matrix of a group of targets."""
    return sum(shapes[target][0] for target in group), shapes[group[0]][1]


def padded_bytes(
    form: Format, group: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]
) -> int:
    """Return the number of bytes of a fused group in the slab, a multiple of ALIGNMENT."""
    return -(-form.matrix_bytes(*group_shape(group, shapes)) // ALIGNMENT) * ALIGNMENT
