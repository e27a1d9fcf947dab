"""Formats of quantized weights. This module does not need torch."""

from __future__ import annotations

from dataclasses import dataclass

# Number of values in a block. Rows are stored in whole blocks (csrc/quantized/quantized.h).
BLOCK = 64
# Supported numbers of adjacent values per scale, if an output has more than one scale.
GROUPS = (32, 64, 128)
# Largest number of adjacent activations per scale, if activations are quantized too. Smaller groups
# of weights have a scale for each group.
ACTIVATION_GROUP = 64
# Value that the kernels take as base-2 logarithm of the group size if a whole row is one group.
WHOLE_ROW = 62


@dataclass(frozen=True)
class Format:
    """Type of quantized weights. Raises ValueError for a combination that is not supported.

    bits: 8 or 4.
    group: one of GROUPS, or None for one scale per output. int4 needs groups.
    zeros: whether each group has its own zero, which is possible for int4 only.
    dynamic: whether products quantize activations to int8, too; for int4, or int8 with one
        scale per output.
    """

    bits: int
    group: int | None
    zeros: bool = False
    dynamic: bool = False

    def __post_init__(self) -> None:
        grouped = self.group in GROUPS
        if not (
            (self.bits == 4 and grouped)
            or (self.bits == 8 and not self.zeros and (grouped or self.group is None))
        ):
            groups = ", ".join(map(str, GROUPS[:-1]))
            raise ValueError(
                f"{self} is not supported; int4 needs groups of {groups} or {GROUPS[-1]};"
                " int8 may have such groups, but no zeros"
            )
        if self.dynamic and self.bits == 8 and grouped:
            raise ValueError(f"{self} is not supported; dynamic needs int4, or int8 without groups")

    @property
    def name(self) -> str:
        """Name for messages, such as "int4 in groups of 128"."""
        name = f"int{self.bits}" + ("" if self.group is None else f" in groups of {self.group}")
        return name + (" with quantized activations" if self.dynamic else "")

    @property
    def activation_group(self) -> int:
        """Number of adjacent activations per scale, of a dynamic format."""
        return min(self.group or ACTIVATION_GROUP, ACTIVATION_GROUP)

    @property
    def group_shift(self) -> int:
        """Base-2 logarithm of the group size, in the form that the kernels take."""
        return WHOLE_ROW if self.group is None else self.group.bit_length() - 1

    def row_bytes(self, depth: int) -> int:
        """Return the number of bytes of a row of `depth` values."""
        return -(-depth // BLOCK) * BLOCK * self.bits // 8

    def groups(self, depth: int) -> int:
        """Return the number of groups in a row that is padded to whole blocks."""
        return 1 if self.group is None else -(-(-(-depth // BLOCK) * BLOCK) // self.group)

    def matrix_bytes(self, rows: int, depth: int) -> int:
        """Return the number of bytes of a matrix: its values, scales and zeros."""
        return rows * (self.row_bytes(depth) + self.groups(depth) * (5 if self.zeros else 4))
