"""Tokenization of prompts, and assignment of image features to their positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from vlora.errors import InvalidArgument, prompt_too_long
from vlora.ids import NO_IMAGE
from vlora.model.chunk import Chunk, Prompt, next_position
from vlora.model.decoder_config import DecoderConfig
from vlora.model.tokenizer import LiteralTokenizer, TokenLength, load_tokenizer
from vlora.request import FRAMES_PER_SECOND, ImageFeatures, PromptText

Grid = tuple[int, int, int]  # Size of an image in tokens: time, height and width.


def image_grids(images: ImageFeatures, merge: int) -> list[Grid]:
    """Return the grid of each image. merge: patches on each side of the square of one token.

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
    intervals: Sequence[float] = (),
    order: Sequence[int] = (),
) -> torch.Tensor:
    """Return the positions of a prompt's tokens by time, height and width, [3, len(feature_row)].

    The three positions of a text token are equal. Text and images begin at the `next_position` of
    what precedes them, as generated tokens do.

    feature_row: see `Prompt.feature_row`. The rows of each image are adjacent.
    intervals: distance between successive time steps of each image; time positions are rounded
        down. By default 1.
    order: numbers of the images in the order of the prompt; () if they are in order.
    """
    parts: list[torch.Tensor] = []
    index = position = 0
    layout = images.layout.tolist()
    for image in order or range(len(layout)):
        (first, rows, *_), (t, h, w) = layout[image], grids[image]
        interval = intervals[image] if intervals else 1.0
        text = list(feature_row).index(first, index) - index
        parts.append(_text_positions(position, text))
        position += text
        times = (torch.arange(t) * interval).long()
        grid = torch.cartesian_prod(times, torch.arange(h), torch.arange(w)).T + position
        parts.append(grid)
        position = next_position(grid)
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


def kept_rows(images: ImageFeatures, features: torch.Tensor, rate: float) -> torch.Tensor:
    """Return which rows of the features become tokens, [rows] bool.

    Of each clip, the first step in time is kept, and of the others those rows that differ most from
    the same place one step before, by cosine similarity: in all, the share 1 - `rate`, but at least
    the first step. So vLLM prunes videos.

    features: [rows, hidden], those for the embedding.
    """
    clips: dict[int | None, list[torch.Tensor]] = {}  # The rows of each step, [rows of a step].
    for clip, entry in zip(images.videos_by_entry(), images.layout.tolist(), strict=True):
        first, rows, times, _, _, frames = entry
        if frames:
            clips.setdefault(clip, []).extend(torch.arange(first, first + rows).chunk(times))
    keep = torch.ones(len(features), dtype=torch.bool)
    for steps in clips.values():
        if len({len(step) for step in steps}) > 1:
            continue  # Steps of different sizes have no places in common.
        shown = torch.stack(steps)
        later, before = features[shown[1:]], features[shown[:-1]]
        similarity = torch.cosine_similarity(later, before, dim=2).flatten()
        count = max(0, int(shown.numel() * (1 - rate)) - shown.shape[1])
        keep[shown[1:].flatten()[similarity.argsort(stable=True)[count:]]] = False
    return keep


def text_prompt(ids: Iterable[int]) -> Prompt:
    """Return a prompt without images."""
    ids = tuple(ids)
    return Prompt(ids, torch.full((len(ids),), NO_IMAGE), None)


class PromptReader:
    """Tokenizes prompts and expands their image placeholders. Thread-safe.

    pruning_rate: share of the tokens of clips to leave out. Raises InvalidArgument if the model's
        positions are not three-dimensional, and so would move.
    """

    def __init__(self, folder: Path, config: DecoderConfig, pruning_rate: float = 0.0) -> None:
        if pruning_rate and not config.rope_axes:
            raise InvalidArgument(
                f"'video_pruning_rate' = {pruning_rate:g} needs a model of Qwen2-VL, Qwen2.5-VL or"
                f" Qwen3-VL; remove the key to serve {folder}"
            )
        self._config, self._pruning_rate = config, pruning_rate
        self.tokenizer = load_tokenizer(folder)
        self._backend = self.tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_length = TokenLength(self.tokenizer)
        self._literal = LiteralTokenizer(self.tokenizer)

    def check_length(self, text: str, context: int) -> None:
        """Raise InvalidArgument if `text` is certainly too long for a context of this many tokens.

        The check compares numbers of bytes, and a text that passes may still be too long.
        """
        size = len(text.encode(errors="replace"))
        if size > (limit := self._token_length.max_bytes(text, context)):
            raise prompt_too_long(size, limit, "bytes", context)

    def read(self, text: str, images: ImageFeatures | None) -> Prompt:
        """Return the prompt of a text that has one placeholder per image.

        Raises InvalidArgument if the numbers of placeholders and images differ, if the features do
        not fit the model, or if a token has no embedding.
        """
        if images is not None:
            images.check(self._config.feature_width)
        tokens = self._tokenize(text)
        image_token = self._config.image_token
        placeholders = tokens.count(image_token) if image_token is not None else 0
        count = images.count if images is not None else 0
        if placeholders != count:
            raise InvalidArgument(
                f"the prompt has {placeholders} image placeholder{'s' * (placeholders != 1)}"
                f" for {count} image{'s' * (count != 1)}"
            )
        self._check_embedded(tokens)
        if images is None or count == 0:
            return text_prompt(tokens)
        order: Sequence[int] = range(count)
        if isinstance(text, PromptText) and len(text.order) == count:
            order = text.order
        ids: list[int] = []
        feature_row: list[int] = []
        following = iter(order)
        for token in tokens:
            if token != image_token:
                ids.append(token)
                feature_row.append(NO_IMAGE)
                continue
            first, rows = images.layout[next(following), :2].tolist()
            ids.extend([token] * rows)
            feature_row.extend(range(first, first + rows))
        positions = None
        if self._config.rope_axes:
            grids = image_grids(images, self._config.image_merge)
            positions = prompt_positions(feature_row, images, grids, self._intervals(images), order)
        features, levels = self._by_level(torch.from_numpy(images.features))
        prompt = Prompt(tuple(ids), torch.tensor(feature_row), features, positions, levels)
        if self._pruning_rate:
            prompt = prompt.with_rows(kept_rows(images, features, self._pruning_rate))
        return prompt

    def _intervals(self, images: ImageFeatures) -> list[float]:
        """Return the distance between successive time steps of each image, in time positions."""
        if self._config.clip_times is None:
            return []
        per_second, frames = self._config.clip_times
        rates = (
            FRAMES_PER_SECOND if number is None else images.videos[number].fps
            for number in images.videos_by_entry()
        )
        # Computed as in transformers, since the product is rounded down.
        return [per_second * (frames / rate) for rate in rates]

    def _by_level(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the columns of features for the embedding, and those for the levels, if any."""
        if not self._config.image_levels:
            return features, None
        parts = features.view(len(features), -1, self._config.hidden).transpose(0, 1).contiguous()
        return parts[0], parts[1:]

    def _check_embedded(self, tokens: list[int]) -> None:
        """Raise InvalidArgument if a token other than the image placeholder has no embedding.

        A tokenizer may have more tokens than the model, because several models share it.
        """
        size = self._config.vocabulary
        if max(tokens, default=0) < size:
            return
        beyond = next((t for t in tokens if t >= size and t != self._config.image_token), None)
        if beyond is not None:
            text = self.tokenizer.convert_ids_to_tokens(beyond)
            raise InvalidArgument(
                f"the prompt has token {beyond} ({text!r}), which the model's embedding lacks;"
                f" its tokens are from 0 to {size - 1}"
            )

    def _tokenize(self, text: str) -> list[int]:
        """Return the token ids, with a begin-of-text token unless the text begins with it."""
        bos = self.tokenizer.bos_token
        literals = text.literals if isinstance(text, PromptText) else ()
        has_bos = bool(bos) and text.startswith(bos) and (0, len(bos)) not in literals
        is_complete = has_bos or (isinstance(text, PromptText) and text.is_complete)
        if self._literal.spells_special(text, literals):
            return self._literal.encode(text, literals, add_special_tokens=not is_complete)
        # `encode` would hold the GIL. Calling the tokenizer itself would change its state and
        # compute offsets, which takes longer than computing the tokens.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=not is_complete)
        return list(encoded.ids)
