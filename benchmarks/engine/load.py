"""The load of the engine benchmark: concurrent requests, and when their tokens came.

This module knows neither the engine nor the server; all of them run the same load.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.llava import Checkpoint, picture, prompt

REQUESTS = 16
"""Concurrent requests of the committed grid. Its quick part has fewer."""
OUTPUT = 32
"""Tokens of every answer: the end of text is ignored."""
TEXT_TOKENS = 256
"""Tokens of a prompt without an image, counting the begin-of-text token."""
IMAGE_TEXT_TOKENS = 31
"""Tokens of the text that comes with an image, counting the begin-of-text token."""
KINDS = ("text", "image")


@dataclass(frozen=True)
class LoadRequest:
    """One request of the load.

    image: [side, side, 3], or None.
    adapter: its name, or None.
    """

    prompt: str
    image: np.ndarray[Any, np.dtype[np.uint8]] | None
    adapter: str | None


@dataclass(frozen=True)
class Load:
    """Concurrent requests of one kind.

    kind: "text" or "image".
    adapters: request i uses adapter i modulo this number; 0: the base model.
    """

    kind: str
    adapters: int
    requests: int = REQUESTS

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.adapters}"

    def draw(self, checkpoint: Checkpoint, seed: int) -> list[LoadRequest]:
        """Return the requests, with prompts and images that no other seed has."""
        names, sizes = checkpoint.adapter_names, checkpoint.sizes
        words = (TEXT_TOKENS if self.kind == "text" else IMAGE_TEXT_TOKENS) - 1
        return [
            LoadRequest(
                prompt(words, seed * self.requests + i, sizes),
                None if self.kind == "text" else picture(seed * self.requests + i, sizes),
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
        """Average token latency: all end-to-end times over all tokens."""
        return sum(self.end) / (len(self.end) * OUTPUT)

    @property
    def wall(self) -> float:
        return max(self.end)

    def as_row(self) -> Mapping[str, float]:
        return {
            "token_latency_ms": round(self.token_latency * 1e3, 2),
            "first_token_s": round(statistics.fmean(self.first), 3),
            "wall_s": round(self.wall, 3),
        }
