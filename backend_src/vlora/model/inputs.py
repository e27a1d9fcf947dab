"""Prompt text and image features → token ids and where each image row goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from vlora.errors import InvalidArgument
from vlora.model.decoder_config import DecoderConfig
from vlora.request import ImageFeatures

NO_IMAGE = -1


@dataclass(frozen=True)
class Prompt:
    """ids: token ids, image placeholders expanded. feature_row: [len(ids)] row of `features` that
    replaces the embedding at this position, or NO_IMAGE. features: [rows, hidden] or None."""

    ids: tuple[int, ...]
    feature_row: torch.Tensor
    features: torch.Tensor | None

    @classmethod
    def of_text(cls, ids: Iterable[int]) -> Prompt:
        """Without images."""
        ids = tuple(ids)
        return cls(ids, torch.full((len(ids),), NO_IMAGE), None)


class PromptReader:
    """The checkpoint's tokenizer, and the expansion of its image placeholder."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._config = config
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def read(self, text: str, images: ImageFeatures | None) -> Prompt:
        """Raises InvalidArgument where placeholders and images do not agree, or features do not
        fit the model."""
        if images is not None:
            images.check(self._config.hidden)
        tokens = self._tokenize(text)
        image_token = self._config.image_token
        placeholders = tokens.count(image_token) if image_token is not None else 0
        given = images.count if images is not None else 0
        if placeholders != given:
            raise InvalidArgument(
                f"the prompt has {placeholders} image placeholder{'s' * (placeholders != 1)}"
                f" for {given} image{'s' * (given != 1)}"
            )
        if images is None or given == 0:
            return Prompt.of_text(tokens)
        ids: list[int] = []
        rows: list[int] = []
        image = 0
        for token in tokens:
            if token != image_token:
                ids.append(token)
                rows.append(NO_IMAGE)
                continue
            first, count = int(images.layout[image, 0]), int(images.layout[image, 1])
            ids.extend([token] * count)
            rows.extend(range(first, first + count))
            image += 1
        return Prompt(tuple(ids), torch.tensor(rows), torch.from_numpy(images.features))

    def _tokenize(self, text: str) -> list[int]:
        """Text that begins with the begin-of-text token has it once; other text gets it where
        the tokenizer adds one."""
        bos = self.tokenizer.bos_token
        starts = bool(bos) and text.startswith(bos)
        # Not verbose: too long a prompt is refused, and no index is out of range for it.
        return list(self.tokenizer(text, add_special_tokens=not starts, verbose=False)["input_ids"])
