"""Shape of the served model, as far as adapters have to fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from vlora.ids import MatrixId
from vlora.lora.patterns import suffixes
from vlora.lora.slab import ATTENTION

LM_HEAD = "lm_head"
LAYOUTS = ("model.language_model.", "language_model.model.", "model.", "")
"""Prefixes of `layers` in module paths: those of transformers 5, of transformers 4, of a decoder
on its own, and none."""


@dataclass(frozen=True)
class ModelShape:
    """Shapes that an adapter has to fit.

    shapes: target → (d_out, d_in), the same in every layer.
    prefix: of `layers` in the module paths of transformers' model.
    lm_head: returns the base model's; called only for an adapter that holds a copy of it.
    other_modules: returns the paths of modules outside the decoder; called only for an adapter that
        names a module which the decoder does not have.
    """

    layers: int
    hidden: int
    vocabulary: int
    shapes: Mapping[str, tuple[int, int]]
    prefix: str
    lm_head: Callable[[], torch.Tensor]
    other_modules: Callable[[], Iterable[str]]

    @cached_property
    def suffixes(self) -> frozenset[str]:
        """All suffixes of paths that name one of these matrices, in any supported layout."""
        paths = (path for matrix in self.matrices for path in paths_of(matrix, self))
        return frozenset(suffix for path in paths for suffix in suffixes(path))

    @cached_property
    def matrices(self) -> frozenset[MatrixId]:
        """All matrices that an adapter may change."""
        layers = ((layer, target) for layer in range(self.layers) for target in self.shapes)
        return frozenset([*layers, (-1, LM_HEAD)])

    def shape_of(self, matrix: MatrixId) -> tuple[int, int]:
        """Return (d_out, d_in) of a matrix."""
        layer, target = matrix
        return (self.vocabulary, self.hidden) if layer < 0 else self.shapes[target]


def paths_of(matrix: MatrixId, model: ModelShape, file_path: str | None = None) -> tuple[str, ...]:
    """Return the paths of a module to which an adapter's patterns may refer.

    These are `file_path`, its path in the adapter's file, and its path in the served model; without
    `file_path`, its paths in all supported layouts.
    """
    layer, target = matrix
    if layer < 0:
        return (LM_HEAD,) if file_path is None else (file_path, LM_HEAD)
    block = "self_attn" if target in ATTENTION else "mlp"
    module = f"layers.{layer}.{block}.{target}"
    if file_path is None:
        return tuple(prefix + module for prefix in LAYOUTS)
    return file_path, model.prefix + module
