"""Loads of concurrent requests, the times of their tokens, and a client that sends them."""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.llava import Checkpoint, picture, prompt
from vlora.load.contents import Content
from vlora.load.targets import Answer, Question, RequestFailed, TritonTarget

OUTPUT = 32
"""Number of tokens of every answer; the end-of-text token does not end an answer."""
TEXT_TOKENS, IMAGE_TEXT_TOKENS = 256, 31
"""Number of tokens of a prompt without an image, and of the text that comes with an image. Both
include the begin-of-text token."""
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class BenchmarkError(Exception):
    """Raised when a request of a benchmark fails."""


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load, with an image [height, width, 3] and an adapter, or None."""

    prompt: str
    image: Pixels | None
    adapter: str | None
    task: str = "raw"
    tokens: int = OUTPUT

    @cached_property
    def file(self) -> bytes | None:
        """The image as a PNG file, None without one."""
        return None if self.image is None else png(self.image)

    def question(self) -> Question:
        content = Content(self.prompt, () if self.file is None else (self.file,))
        keys = {"temperature": 0, "max_tokens": self.tokens, "ignore_eos": True}
        return Question(content, self.adapter, keys, self.task)


def png(pixels: Pixels) -> bytes:
    """Return pixels [height, width, 3] as a PNG file, at the fastest compression level."""
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


@dataclass(frozen=True)
class Load:
    """Concurrent requests of one kind.

    kind: "text" or "image".
    adapters: number of adapters. Request i uses adapter i modulo this number; with 0 all requests
        use the base model.
    """

    kind: str
    adapters: int
    requests: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.adapters}"

    def draw(self, checkpoint: Checkpoint, seed: int) -> list[LoadRequest]:
        """Return the requests of this load, with prompts and images that differ for each seed."""
        names, sizes, text = checkpoint.adapter_names, checkpoint.sizes, self.kind == "text"
        words = (TEXT_TOKENS if text else IMAGE_TEXT_TOKENS) - 1
        numbers = range(seed * self.requests, (seed + 1) * self.requests)
        return [
            LoadRequest(
                prompt(words, number, sizes),
                None if text else picture(number, sizes),
                names[i % self.adapters] if self.adapters else None,
            )
            for i, number in enumerate(numbers)
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
            "token_latency_ms": self.token_latency * 1e3,
            "first_token_s": statistics.fmean(self.first),
            "wall_s": max(self.end),
        }


class GrpcClient:
    """Client that sends requests to a server's model `lmm` over gRPC, each on its own stream.

    It belongs to the event loop in which it is opened.
    """

    def __init__(self, address: str) -> None:
        self._target = TritonTarget(address, "lmm")
        self.open, self.close = self._target.open, self._target.close

    async def run(self, requests: Sequence[LoadRequest]) -> LoadTimes:
        """Send all requests at once and return their times. Raise BenchmarkError if one fails."""
        questions = [request.question() for request in requests]
        started = time.perf_counter()
        times = await asyncio.gather(*map(self._ask, questions))
        return times_since(started, times)

    async def _ask(self, question: Question) -> tuple[float, float]:
        answer, wanted = Answer(), question.sampling["max_tokens"]
        try:
            await self._target.ask(question, answer)
        except RequestFailed as error:
            raise BenchmarkError(str(error)) from None
        if answer.output_tokens != wanted:
            raise BenchmarkError(f"an answer has {answer.output_tokens} tokens instead of {wanted}")
        end = time.perf_counter()
        return answer.first or end, end


def times_since(started: float, moments: Sequence[tuple[float, float]]) -> LoadTimes:
    """Return the times of requests from the moments of their first tokens and ends."""
    firsts, ends = zip(*moments, strict=True)
    return LoadTimes([one - started for one in firsts], [one - started for one in ends])
