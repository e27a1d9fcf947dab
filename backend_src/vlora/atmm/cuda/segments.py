"""Segments as the kernels read them from device memory: arranged in waves and padded.

A wave is a set of segments that share no rows. Segments of length 0 pad it to a fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlora.atmm.cuda.choice import ONE_LAUNCH_ROWS, PAIR_OF_ROWS
from vlora.atmm.cuda.library import Library
from vlora.atmm.types import Segment

Fields = tuple[int, int, int, int]  # Start, length, slot and sign of a segment.


@dataclass(frozen=True)
class SegmentBounds:
    """Bounds of the segments with which a captured call can be replayed.

    waves: number of waves.
    capacity: maximum number of segments of a wave, a power of two.
    longest: maximum length of a segment.
    """

    waves: int
    capacity: int
    longest: int

    def on(self, tensor: torch.Tensor) -> DeviceSegments:
        """Return the segments of a captured call, [waves · capacity, 4] int32 on the device."""
        ends = tuple(self.capacity * (wave + 1) for wave in range(self.waves))
        return DeviceSegments(tensor, ends, 1, self.longest)


@dataclass(frozen=True)
class DeviceSegments:
    """Segments in the form that the kernels read, arranged in waves.

    tensor: [segments, 4] int32: start, length, slot, sign. Kernels need it on the device.
    ends: index after the last segment of each wave.
    shortest, longest: minimum and maximum length.
    """

    tensor: torch.Tensor
    ends: tuple[int, ...]
    shortest: int
    longest: int

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0


def arrange(library: Library, segments: Sequence[Segment]) -> DeviceSegments:
    """Return the segments in host memory, arranged in waves."""
    waves = _waves(library, [(s.start, s.length, s.slot, s.sign) for s in segments])
    rows = [fields for wave in waves for fields in wave]
    lengths = [length for _, length, _, _ in rows] or [1]
    tensor = torch.tensor(rows or [(0, 0, 0, 1)], dtype=torch.int32)
    ends = tuple(sum(map(len, waves[: index + 1])) for index in range(len(waves)))
    return DeviceSegments(tensor, ends, min(lengths), max(lengths))


def bounds_of(library: Library, segments: Sequence[Segment]) -> tuple[SegmentBounds, torch.Tensor]:
    """Return bounds for a captured call that can apply `segments`, and the call's segments.

    Segments of more than ONE_LAUNCH_ROWS rows are divided, so that the call needs one launch. The
    tensor is [waves · capacity, 4] int32 in host memory.
    """
    longest = max((segment.length for segment in segments), default=1)
    rows_per_segment = PAIR_OF_ROWS if longest <= PAIR_OF_ROWS else ONE_LAUNCH_ROWS
    waves = _waves(
        library,
        [
            (s.start + first, min(rows_per_segment, s.length - first), s.slot, s.sign)
            for s in segments
            for first in range(0, s.length, rows_per_segment)
        ],
    )
    needed = max((len(wave) for wave in waves), default=1)
    # A power of two, so that later calls with a few more segments fit the same bounds.
    bounds = SegmentBounds(max(1, len(waves)), 1 << (needed - 1).bit_length(), rows_per_segment)
    tensor = torch.zeros(bounds.waves, bounds.capacity, 4, dtype=torch.int32)
    for index, wave in enumerate(waves):
        tensor[index, : len(wave)] = torch.tensor(wave, dtype=torch.int32)
    return bounds, tensor.view(-1, 4)


def _waves(library: Library, segments: Sequence[Fields]) -> list[list[Fields]]:
    """Return the segments that are not empty, wave by wave and ascending within a wave."""
    arranged, ends = library.arrange(segments)
    return [
        [(s.start, s.length, s.slot, s.sign) for s in arranged[first:end]]
        for first, end in zip([0, *ends], ends, strict=False)
    ]
