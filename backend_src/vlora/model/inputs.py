"""Tokenise a prompt and assign image features to its positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from vlora.errors import InvalidArgument
from vlora.ids import NO_IMAGE
from vlora.model.decoder_config import DecoderConfig
from vlora.model.token_length import TokenLength
from vlora.request import ImageFeatures


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt and its image features.

    ids: token ids, each image placeholder expanded to one token per feature row.
    feature_row: [len(ids)] int64, row of `features` that replaces the token's embedding at this
        position, or NO_IMAGE.
    features: [rows, hidden] fp32, or None without images.
    """

    ids: tuple[int, ...]
    feature_row: torch.Tensor
    features: torch.Tensor | None

    @classmethod
    def of_text(cls, ids: Iterable[int]) -> Prompt:
        """Return a prompt without images."""
        ids = tuple(ids)
        return cls(ids, torch.full((len(ids),), NO_IMAGE), None)


class PromptReader:
    """Tokenizer of a checkpoint, which also expands image placeholders.

    Safe to use from several threads at once: the tokenizer is not changed after construction, and
    it does not hold Python's lock while it works.
    """

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._config = config
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._backend = self.tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_length = TokenLength(self.tokenizer)

    def check_length(self, text: str, context: int) -> None:
        """Raise InvalidArgument if `text` cannot fit a context of this many tokens.

        Costs no time. A text that passes may still be too long, which its tokens then show.
        """
        size, limit = (
            len(text.encode(errors="replace")),
            self._token_length.max_bytes(text, context),
        )
        if size > limit:
            raise InvalidArgument(
                f"the prompt has {size} bytes; the context of {context} tokens holds at most"
                f" {limit:.0f}"
            )

    def read(self, text: str, images: ImageFeatures | None) -> Prompt:
        """Return the prompt of a text with one placeholder per image.

        Raises InvalidArgument if the numbers of placeholders and images differ, the features do not
        fit the model, or the text has a token that the embedding lacks.
        """
        if images is not None:
            images.check(self._config.hidden)
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
        return Prompt(tuple(ids), torch.tensor(feature_row), torch.from_numpy(images.features))

    def _check_embedded(self, tokens: list[int]) -> None:
        """Raise InvalidArgument if a token has no embedding and is no image placeholder.

        A tokenizer may have more tokens than the model: they are added for other models.
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

        A text that already begins with this token gets no other; any other text gets it if the
        tokenizer adds one.
        """
        bos = self.tokenizer.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        # Unlike `encode` it releases Python's lock; unlike the tokenizer itself it changes nothing
        # and computes no offsets, which takes longer than the tokens.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=not has_bos)
        return list(encoded.ids)
