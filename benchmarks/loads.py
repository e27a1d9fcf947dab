"""Loads of concurrent requests, and the times of their tokens.

This module depends neither on the engine nor on the server, since the loads are the same for both.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.llava import Checkpoint, picture, prompt

REQUESTS = 16
"""Number of concurrent requests of the committed grid. The quick part has fewer."""
OUTPUT = 32
"""Number of tokens of every answer; the end-of-text token does not end an answer."""
TEXT_TOKENS, IMAGE_TEXT_TOKENS = 256, 31
"""Number of tokens of a prompt without an image, and of the text that comes with an image. Both
include the begin-of-text token."""
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class LoadRequest:
    """One request of the load, with an image [side, side, 3] and an adapter, or None."""

    prompt: str
    image: Pixels | None
    adapter: str | None

    def file(self) -> bytes | None:
        """Return the image as a PNG file, None without one."""
        return None if self.image is None else png(self.image)


def png(pixels: Pixels) -> bytes:
    """Return pixels [height, width, 3] as a PNG file, at the fastest compression level."""
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def sampling(adapter: str | None, max_tokens: int = OUTPUT) -> dict[str, Any]:
    """Return sampling parameters for a greedy answer of exactly `max_tokens` tokens."""
    adapters = {} if adapter is None else {"lora_name": adapter}
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **adapters}


@dataclass(frozen=True)
class Load:
    """Concurrent requests of one kind.

    kind: "text" or "image".
    adapters: number of adapters. Request i uses adapter i modulo this number; with 0 all requests
        use the base model.
    """

    kind: str
    adapters: int
    requests: int = REQUESTS

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.adapters}"

    def draw(self, checkpoint: Checkpoint, seed: int) -> list[LoadRequest]:
        """Return the requests of this load, with prompts and images that differ for each seed."""
        names, sizes, text = checkpoint.adapter_names, checkpoint.sizes, self.kind == "text"
        words = (TEXT_TOKENS if text else IMAGE_TEXT_TOKENS) - 1
        first = seed * self.requests
        return [
            LoadRequest(
                prompt(words, first + i, sizes),
                None if text else picture(first + i, sizes),
                names[i % self.adapters] if self.adapters else None,
            )
            for i in range(self.requests)
        ]


@dataclass(frozen=True)
class LoadTimes:
    """Seconds from the common start to each request's first token and to its end."""

    first: Sequence[float]
    end: Sequence[float]

    @property
    def token_latency(self) -> float:
        """Average token latency: the sum of end-to-end times divided by the number of tokens."""
        return sum(self.end) / (len(self.end) * OUTPUT)

    def as_row(self) -> Mapping[str, float]:
        return {
            "token_latency_ms": round(self.token_latency * 1e3, 2),
            "first_token_s": round(statistics.fmean(self.first), 3),
            "wall_s": round(max(self.end), 3),
        }
