"""Image features of a step's rows, in the form that the step's device reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.ids import NO_IMAGE
from vlora.memory.device import Device
from vlora.model.chunk import Chunk


class StepImages:
    """Ranges of a step's rows that have image features.

    A CPU reads the features of whole images in place. For a GPU, only the features of the step's
    rows are gathered, and are uploaded with the step's other inputs.

    ranges: the ranges in the form that `ops.embed` takes.
    inputs: tensors to upload, in host memory: the index of each row's feature, and the features;
        [] on a CPU.
    """

    def __init__(self, chunks: Sequence[Chunk], device: Device) -> None:
        self.ranges = [
            (chunk.row, chunk.prompt.feature_row[chunk.start : chunk.end], chunk.prompt.features)
            for chunk in chunks
            if chunk.prompt.features is not None and not chunk.decodes
        ]
        self.inputs: list[torch.Tensor] = []
        if self.ranges and not device.in_host_memory:
            self.inputs = _gathered(self.ranges, sum(chunk.length for chunk in chunks))

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Store the copies of `inputs` that were made on the device."""
        if uploaded:
            feature_rows, features = uploaded
            self.ranges = [(0, feature_rows, features)]


def _gathered(
    ranges: Sequence[tuple[int, torch.Tensor, torch.Tensor]], rows: int
) -> list[torch.Tensor]:
    """Gather the image features that a step's rows need.

    Returns the index of each row's feature, [rows] int32, NO_IMAGE for a row without a feature, and
    the features, [features, hidden] fp32.
    """
    numbers, parts, count = torch.full((rows,), NO_IMAGE, dtype=torch.int32), [], 0
    for first_row, feature_rows, features in ranges:
        shown = torch.nonzero(feature_rows >= 0).flatten()
        numbers[first_row + shown] = torch.arange(count, count + len(shown), dtype=torch.int32)
        parts.append(features[feature_rows[shown]])
        count += len(shown)
    return [numbers, torch.cat(parts)]


def level_features(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """Return the `rows` and `features` of the step's `LevelFeatures`; [] if there are none."""
    rows, features = [], []
    for chunk in chunks:
        levels = chunk.prompt.level_features
        if levels is None or chunk.decodes:
            continue
        of_rows = chunk.prompt.feature_row[chunk.start : chunk.end]
        shown = torch.nonzero(of_rows >= 0).flatten()
        rows.append(chunk.row + shown)
        features.append(levels[:, of_rows[shown]])
    return [torch.cat(rows), torch.cat(features, dim=1)] if rows else []
