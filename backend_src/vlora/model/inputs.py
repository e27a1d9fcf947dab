"""Tokenization of prompts, and assignment of image features to their positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from vlora.errors import InvalidArgument, prompt_too_long
from vlora.ids import NO_IMAGE
from vlora.model.decoder_config import DecoderConfig
from vlora.model.positions import image_grids, prompt_positions
from vlora.model.token_length import TokenLength
from vlora.model.tokenizer import load_tokenizer
from vlora.request import ImageFeatures


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt and its image features.

    ids: token ids. Each image placeholder is expanded to one token per feature row.
    feature_row: [len(ids)] int64, row of `features` that replaces the embedding of the token at
        this position, or NO_IMAGE.
    features: [rows, hidden] fp32; None without images.
    positions: [3, len(ids)] int64, rotary positions by time, height and width; None if the position
        of each token is its index.
    level_features: [levels, rows, hidden] fp32, added to the outputs of the first layers; None if
        the model has no such levels or the prompt no images.
    """

    ids: tuple[int, ...]
    feature_row: torch.Tensor
    features: torch.Tensor | None
    positions: torch.Tensor | None = None
    level_features: torch.Tensor | None = None

    @cached_property
    def position_shift(self) -> int:
        """Rotary position of a generated token minus its index in the sequence."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.ids)

    @classmethod
    def of_text(cls, ids: Iterable[int]) -> Prompt:
        """Return a prompt without images."""
        ids = tuple(ids)
        return cls(ids, torch.full((len(ids),), NO_IMAGE), None)


class PromptReader:
    """Tokenizes prompts and expands their image placeholders.

    Any thread may use it: the tokenizer is not changed after construction and releases the GIL
    while it works.
    """

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._config = config
        self.tokenizer = load_tokenizer(folder)
        self._backend = self.tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_length = TokenLength(self.tokenizer)

    def check_length(self, text: str, context: int) -> None:
        """Raise InvalidArgument if `text` is certainly too long for a context of this many tokens.

        The check compares numbers of bytes and takes almost no time. A text that passes may still
        be too long, which is known only after it is tokenized.
        """
        size, limit = (
            len(text.encode(errors="replace")),
            self._token_length.max_bytes(text, context),
        )
        if size > limit:
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
            return Prompt.of_text(tokens)
        ids: list[int] = []
        feature_row: list[int] = []
        image = 0
        for token in tokens:
            if token != image_token:
                ids.append(token)
                feature_row.append(NO_IMAGE)
                continue
            first, rows = int(images.layout[image, 0]), int(images.layout[image, 1])
            ids.extend([token] * rows)
            feature_row.extend(range(first, first + rows))
            image += 1
        positions = None
        if self._config.rope_axes:
            grids = image_grids(images, self._config.image_merge)
            positions = prompt_positions(feature_row, images, grids, self._config.clip_interval)
        features, levels = self._by_level(torch.from_numpy(images.features))
        return Prompt(tuple(ids), torch.tensor(feature_row), features, positions, levels)

    def _by_level(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the columns of features for the embedding, and those for the levels (None without
        levels).
        """
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
        """Return the token ids of `text`, with at most one begin-of-text token.

        The tokenizer adds this token only if the text does not begin with it already.
        """
        bos = self.tokenizer.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        # `encode` would hold the GIL. Calling the tokenizer itself would change its state and
        # compute offsets, which takes longer than computing the tokens.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=not has_bos)
        return list(encoded.ids)
