"""Shapes of the served model, and the module paths by which adapters name its matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from vlora.atmm.types import LoraPair
from vlora.ids import VISION, MatrixId
from vlora.weights.slab import ATTENTION

T = TypeVar("T")

# Matrices that a linear layer of the trained model corresponds to if it fuses several of them. The
# layer's A belongs to each of the matrices. Its B has the rows for each in this order, which have
# the same size.
FUSED = {"c_attn": ("q_proj", "k_proj", "v_proj")}

LM_HEAD = "lm_head"
# Text before `layers` in the module paths of adapters that were trained on:
# - a multimodal model in transformers 4.52 and later;
# - a multimodal model in earlier versions of transformers 4;
# - a decoder with its LM head, Qwen2-VL in transformers 4, and LLaVA's own training code;
# - a multimodal model without its LM head;
# - a decoder without its LM head.
LAYOUTS = ("model.language_model.", "language_model.model.", "model.", "language_model.", "")
HEADS = (LM_HEAD, f"language_model.{LM_HEAD}")  # Paths of the LM head in these layouts.
_VISION_PATH = re.compile(
    r"(?:model\.|transformer\.)?(vision_tower|visual|multi_modal_projector)\.(?:vision_model\.)?(.+)"
)


class Rows(Protocol):
    """A matrix in memory or in a file, of which slices of rows can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class ModelShape:
    """Shapes and module paths of the served model that an adapter has to fit.

    layers, hidden, vocabulary: number of layers, width and number of tokens of the decoder.
    shapes: (d_out, d_in) by target. All layers have the same shapes.
    prefix: text before `layers` in the module paths of the served model.
    lm_head: returns the unquantized weight of the base model's LM head.
    vision: returns (d_out, d_in) of each linear layer outside the decoder, by `vision_path`.
    modules: target, or key of FUSED, by path within a layer, for modules with unusual paths.
    """

    layers: int
    hidden: int
    vocabulary: int
    shapes: Mapping[str, tuple[int, int]]
    prefix: str
    lm_head: Callable[[], Rows]
    vision: Callable[[], Mapping[str, tuple[int, int]]] = dict
    modules: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def matrices(self) -> frozenset[MatrixId]:
        """All matrices of the language model that an adapter may change."""
        targets = {*self.shapes, *self.modules.values()}
        layers = ((layer, target) for layer in range(self.layers) for target in targets)
        return frozenset([*layers, (-1, LM_HEAD)])

    def shape_of(self, matrix: MatrixId) -> tuple[int, int]:
        layer, target = matrix
        if layer == VISION:
            return self.vision()[target]
        if layer < 0:
            return self.vocabulary, self.hidden
        shapes = [self.shapes[one] for one in FUSED.get(target, (target,))]
        return sum(rows for rows, _ in shapes), shapes[0][1]


def vision_path(path: str) -> str | None:
    """Return the path, equal in all layouts, of a module of the vision tower or the connector; None
    for any other module.
    """
    match = _VISION_PATH.fullmatch(path)
    return f"{match[1]}.{match[2]}" if match else None


def suffixes(path: str) -> Iterator[str]:
    """Yield a module's names in patterns: its path, and each end of it after a dot."""
    yield path
    while "." in path:
        path = path.split(".", 1)[1]
        yield path


def paths_of(matrix: MatrixId, model: ModelShape, file_path: str) -> tuple[str, str]:
    """Return the module paths of a matrix, against which the patterns of an adapter are matched:
    `file_path`, as the adapter's file spells it, and the path in the served model.
    """
    layer, target = matrix
    if layer == VISION:
        return file_path, f"model.{target}"
    if layer < 0:
        return file_path, LM_HEAD
    block = "self_attn" if target in ATTENTION else "mlp"
    return file_path, f"{model.prefix}layers.{layer}.{block}.{target}"


def for_each_matrix(values: Mapping[MatrixId, T]) -> dict[MatrixId, T]:
    """Return the values by matrix, with each fused layer's value for all of its matrices."""
    given = {
        (layer, target): value
        for (layer, name), value in values.items()
        for target in FUSED.get(name, (name,))
    }
    return {matrix: given[matrix] for matrix in sorted(given)}


def split_pairs(pairs: Mapping[MatrixId, LoraPair]) -> dict[MatrixId, LoraPair]:
    """Return A and B by matrix, with B of each fused layer split into the rows of its matrices."""
    split: dict[MatrixId, LoraPair] = {}
    for (layer, name), pair in pairs.items():
        targets = FUSED.get(name, (name,))
        for target, b in zip(targets, pair.b.chunk(len(targets)), strict=True):
            split[layer, target] = LoraPair(pair.a, b)
    return {matrix: split[matrix] for matrix in sorted(split)}
