"""The load of `vlora bench engine`: requests at once, sixteen by default, and what came back when.

Knows neither the engine nor the server: both run the same load.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.llava import Checkpoint, picture, prompt

REQUESTS = 16
"""Of the committed grid; its quick part has fewer."""
OUTPUT = 32
"""Tokens of every answer: the end of text is ignored."""
TEXT_TOKENS = 256
BESIDE_IMAGE = 31
"""Tokens of the text that comes with an image; both with the begin of text."""
KINDS = ("text", "image")


@dataclass(frozen=True)
class Ask:
    """One request: prompt, image [side, side, 3] or None, adapter's name or None."""

    prompt: str
    image: np.ndarray[Any, np.dtype[np.uint8]] | None
    adapter: str | None


@dataclass(frozen=True)
class Load:
    """kind: text or image. adapters: request i asks for adapter i mod so many; 0: the base."""

    kind: str
    adapters: int
    requests: int = REQUESTS

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.adapters}"

    def asks(self, checkpoint: Checkpoint, seed: int) -> list[Ask]:
        """Prompts and images of no other seed."""
        names, sizes = checkpoint.adapter_names, checkpoint.sizes
        words = (TEXT_TOKENS if self.kind == "text" else BESIDE_IMAGE) - 1
        return [
            Ask(
                prompt(words, seed * self.requests + i, sizes),
                None if self.kind == "text" else picture(seed * self.requests + i, sizes),
                names[i % self.adapters] if self.adapters else None,
            )
            for i in range(self.requests)
        ]


@dataclass(frozen=True)
class Run:
    """Seconds from the common start: of each request's first token, and of its end."""

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
