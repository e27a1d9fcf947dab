"""Rotary position embeddings: supported rope types, their frequencies and a table of angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Supported rope types: those whose frequencies do not depend on the length of the sequence.

transformers computes the frequencies of each, so a further type of this kind is one entry here.
"""

INITIAL_POSITIONS = 1024
"""Number of positions in a new table."""


def unsupported_rope(text: Any) -> str | None:
    """Return why the rope type of a text configuration is not supported, None if it is."""
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ROPE_TYPES:
        return None
    return f"rope type '{rope}' is not supported; supported: {', '.join(ROPE_TYPES)}"


def rope_frequencies(text: Any) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies, [head_dim / 2] fp32, and the scale of cosines and sines.

    text: transformers' text configuration, whose rules are followed.
    """
    embedding = LlamaRotaryEmbedding(text)
    return embedding.inv_freq.float(), float(embedding.attention_scaling)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of every row's angles, each [T, dim / 2] fp32, the same in every layer."""

    cosines: torch.Tensor
    sines: torch.Tensor

    @staticmethod
    def from_angles(angles: torch.Tensor, scale: float) -> Rotary:
        """Return the cosines and sines of `angles`, [T, dim / 2] in radians, times `scale`."""
        return Rotary(angles.cos() * scale, angles.sin() * scale)


class RotaryTable:
    """Cosines and sines of all positions up to a limit, which doubles when a position exceeds it.

    Computing the cosines of a few rows in each step would cost more than one layer's norms.
    """

    def __init__(self, frequencies: torch.Tensor, scale: float) -> None:
        """frequencies: [dim / 2] fp32, in radians per position. scale: of cosines and sines."""
        self._frequencies = frequencies
        self._scale = scale
        self._table = self._compute(INITIAL_POSITIONS)

    def lookup(self, positions: torch.Tensor) -> Rotary:
        """Return the cosines and sines of `positions`, [T] int64, none negative."""
        if len(positions) and (last := int(positions.max())) >= len(self._table.cosines):
            self._table = self._compute(1 << last.bit_length())
        return Rotary(self._table.cosines[positions], self._table.sines[positions])

    def _compute(self, count: int) -> Rotary:
        return Rotary.from_angles(torch.arange(count)[:, None] * self._frequencies, self._scale)
