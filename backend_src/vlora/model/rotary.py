"""Rotary position embeddings: supported rope types, and the table of cosines and sines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Supported rope types. transformers computes their frequencies. Another type can be added here if
# its frequencies do not depend on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
INITIAL_POSITIONS = 1024  # Number of positions in a new table.


def unsupported_rope(text: Any, axes_of: Callable[[Any], Sequence[int]]) -> str | None:
    """Return why the rotary embedding of a text configuration is not supported; None if it is.

    axes_of: returns the axis of each frequency, or () if positions have one axis.
    """
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        return f"rope type '{rope}' is not supported; supported: {', '.join(ROPE_TYPES)}"
    try:
        count, axes = len(rope_frequencies(text)[0]), axes_of(text)
    except Exception as error:  # transformers computes them, and checks the parameters in part.
        return f"'rope_parameters' cannot be used: {error!r}"
    if 2 * count != head_dim(text):
        return (
            f"'rope_parameters' rotates {2 * count} of the {head_dim(text)} columns of a head;"
            " supported: all of them ('partial_rotary_factor' 1 and an even 'head_dim')"
        )
    if axes and len(axes) != count:
        return (
            f"'mrope_section' has {len(axes)} frequencies in all; a head has {count}, half of its"
            " columns"
        )
    return None


def head_dim(text: Any) -> int:
    """Return the number of columns of a head."""
    dim = getattr(text, "head_dim", None)
    return int(text.hidden_size // text.num_attention_heads if dim is None else dim)


def rope_frequencies(text: Any) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies, [head_dim / 2] fp32, and the scale of cosines and sines.

    text: transformers' text configuration.
    """
    rope = text.rope_parameters
    if rope["rope_type"] == "default":
        # ROPE_INIT_FUNCTIONS lacks this type. Each model class of transformers computes it, but to
        # import one adds a second of work to the start of a server.
        dim = head_dim(text)
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](text)
    return frequencies.float(), float(scale)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the angles of each row, each [T, dim / 2] fp32, for all layers."""

    cosines: torch.Tensor
    sines: torch.Tensor

    @staticmethod
    def from_angles(angles: torch.Tensor, scale: float) -> Rotary:
        """Return the cosines and sines of `angles`, [T, dim / 2] in radians, times `scale`."""
        return Rotary(angles.cos() * scale, angles.sin() * scale)


class RotaryTable:
    """Cosines and sines of all positions below a limit, which `extend` increases.

    Computing the cosines of a few rows in each step would take longer than the norms of a layer.
    """

    def __init__(
        self,
        frequencies: torch.Tensor,
        scale: float,
        axes: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        """Compute the table.

        frequencies: [dim / 2] fp32, in radians per position.
        scale: factor of cosines and sines.
        axes: axis of each frequency if positions have three axes.
        device: device of the table; None for the CPU.
        """
        self._frequencies = frequencies
        self._device = device
        self._axes = torch.tensor(axes, device=device)
        self._columns = torch.arange(len(axes), device=device)
        self._scale = scale
        self._table = self._compute(INITIAL_POSITIONS)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the table, which change when `extend` computes a longer one."""
        return self._table.cosines.data_ptr(), self._table.sines.data_ptr()

    def reserve(self, count: int) -> None:
        """Compute the table for at least the positions below `count`."""
        if count > len(self._table.cosines):
            self._table = self._compute(1 << (count - 1).bit_length())

    def extend(self, positions: torch.Tensor) -> None:
        """Compute a longer table if this one lacks any of `positions`, in host memory."""
        if positions.numel():
            self.reserve(int(positions.max()) + 1)

    def lookup(self, positions: torch.Tensor) -> Rotary:
        """Return the cosines and sines of `positions`, [T] or [3, T] int64, on the table's device.

        The table must contain all of them (see `extend`).
        """
        if positions.ndim == 1:
            return Rotary(self._table.cosines[positions], self._table.sines[positions])
        of_frequency = positions[self._axes].T.contiguous()
        return Rotary(
            self._table.cosines[of_frequency, self._columns],
            self._table.sines[of_frequency, self._columns],
        )

    def _compute(self, count: int) -> Rotary:
        table = Rotary.from_angles(torch.arange(count)[:, None] * self._frequencies, self._scale)
        return Rotary(table.cosines.to(self._device), table.sines.to(self._device))
