"""Rotary positions of tokens.

The position of a token is its index in the sequence. In the M-RoPE of Qwen2-VL, it is three
numbers: time, height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.errors import InvalidArgument
from vlora.model.chunk import Chunk
from vlora.request import ImageFeatures

Grid = tuple[int, int, int]
"""Size of an image in tokens: time, height and width."""


def image_grids(images: ImageFeatures, merge: int) -> list[Grid]:
    """Return the grid of each image.

    merge: number of patches on each side of the square that becomes one token.

    Raises InvalidArgument if the number of patches of an image does not fit its number of rows.
    """
    grids = []
    for index, (_, rows, t, h, w, _) in enumerate(images.layout.tolist()):
        if t * h * w != rows * merge * merge or h % merge or w % merge:
            raise InvalidArgument(
                f"'image_layout' has t, h, w = {t}, {h}, {w} and {rows} rows for image {index};"
                f" {merge} x {merge} patches must make one row"
            )
        grids.append((t, h // merge, w // merge))
    return grids


def prompt_positions(
    feature_row: Sequence[int],
    images: ImageFeatures,
    grids: Sequence[Grid],
    clip_interval: float = 1.0,
) -> torch.Tensor:
    """Return the positions of a prompt's tokens by time, height and width, [3, len(feature_row)].

    The three positions of a text token are equal. An image starts at the position after the text
    before it. The text after an image starts at the image's first position plus the height or the
    width of its grid, whichever is larger.

    feature_row: see `Prompt.feature_row`. The rows of each image are adjacent and in order.
    grids: grid of each image.
    clip_interval: distance between successive time steps of a clip, in positions. The time
        positions are rounded down.
    """
    parts: list[torch.Tensor] = []
    index = position = 0
    for (first, rows, *_), (t, h, w) in zip(images.layout.tolist(), grids, strict=True):
        text = list(feature_row).index(first, index) - index
        parts.append(_text_positions(position, text))
        position += text
        times = (torch.arange(t) * clip_interval).long()
        grid = torch.cartesian_prod(times, torch.arange(h), torch.arange(w))
        parts.append(grid.view(-1, 3).T + position)
        position += max(h, w)
        index += text + rows
    parts.append(_text_positions(position, len(feature_row) - index))
    return torch.cat(parts, dim=1)


def _text_positions(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).expand(3, -1)


def row_positions(chunks: Sequence[Chunk]) -> torch.Tensor:
    """Return the positions of a step's rows: [T], or [3, T] if any prompt has three axes."""
    if all(chunk.prompt.positions is None for chunk in chunks):
        return torch.tensor(
            [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        )
    return torch.cat([_chunk_positions(chunk) for chunk in chunks], dim=1)


def _chunk_positions(chunk: Chunk) -> torch.Tensor:
    prompt = chunk.prompt
    if prompt.positions is None:
        return _text_positions(chunk.start, chunk.length)
    first = max(chunk.start, len(prompt.ids))
    generated = _text_positions(first + prompt.position_shift, max(0, chunk.end - first))
    return torch.cat([prompt.positions[:, chunk.start : chunk.end], generated], dim=1)
