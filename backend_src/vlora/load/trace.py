"""Seeded traces of requests: when they arrive, how long they are, and which adapters they name.

Traces do not depend on models: lengths are numbers of tokens. The published traces are those of
Azure's LLM inference services (github.com/Azure/AzurePublicDataset, of 2023 and 2024).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vlora.errors import InvalidArgument
from vlora.ids import BASE

Application = Literal["retrieval", "analytics"]
Arrivals = Literal["poisson", "bursty"]
Numbers = np.ndarray[Any, np.dtype[Any]]

PAPER_LENGTHS: dict[Application, tuple[int, tuple[int, int]]] = {
    "retrieval": (256, (150, 250)),
    "analytics": (6 * 256, (5, 10)),
}
"""Mean prompt length, and (minimum, maximum) answer length, in tokens (§6.2: 256, 200+; 6 × 256,
5–10).
"""
LENGTH_SPREAD = 0.3
"""Standard deviation of the logarithm of a prompt's length."""
BURST_SIZE = 5
"""Mean number of requests that arrive together in a bursty trace."""
ARRIVALS = ("poisson", "bursty", "uniform", "azure-conv", "azure-code")
COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class Spread(NamedTuple):
    """Log-normal distribution of positive numbers."""

    mean: float
    median: float
    most: float = math.inf

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        sigma = math.sqrt(2 * math.log(self.mean / self.median))
        return np.minimum(rng.lognormal(math.log(self.median), sigma, count), self.most)


# Tokens of the prompt, tokens of the answer, and time between arrivals over its mean, as measured
# on the 19,366 and 8,819 requests of Azure's traces of 2023.
AZURE: dict[str, tuple[Spread, Spread, Spread]] = {
    "azure-conv": (Spread(1155, 1020, 14050), Spread(211, 129, 1000), Spread(1, 0.655)),
    "azure-code": (Spread(2048, 1469, 7437), Spread(28, 13, 1899), Spread(1, 0.164)),
}


class Shape(NamedTuple):
    """Tokens of a workload's prompts, without pictures, and of its answers; frames of a clip."""

    prompt: int
    output: int
    frames: int = 0


# Retrieval as in §6.2; a second of a camera, of whose 30 frames six are sent (§6.2); and the unit
# of NVIDIA's video search and summarization: a chunk of 80 frames, answered by one token.
SHAPES = {
    "text": Shape(256, 64),
    "retrieval": Shape(256, 200),
    "video": Shape(16, 10, frames=6),
    "vss": Shape(16, 1, frames=80),
}


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace.

    at: seconds from the start of the trace.
    adapter: index of the adapter, or BASE.
    prompt: number of prompt tokens.
    output: number of tokens of the answer, which no policy knows.
    limit: maximum number of answer tokens that the client asks for.
    stream: number of the video stream of which this is a chunk, or None.
    deadline: seconds from the arrival after which the answer is not wanted any more.
    """

    at: float
    adapter: int
    prompt: int
    output: int
    limit: int
    priority: int = 0
    stream: int | None = None
    deadline: float = math.inf


@dataclass(frozen=True)
class Workload:
    """Distribution of requests.

    skew: share of requests for the most popular adapter (§6.3). The other adapters share the rest
        equally.
    scale: number by which the paper's prompt lengths are multiplied and, for "retrieval", also its
        answer lengths.
    """

    application: Application
    skew: float
    adapters: int
    arrivals: Arrivals = "poisson"
    scale: float = 1.0

    def trace(self, seed: int, rate: float, count: int) -> list[TracedRequest]:
        """Return `count` requests at a mean `rate` per second. The rate affects only the times."""
        rng = np.random.default_rng([seed, count])
        mean_prompt, (least, most) = PAPER_LENGTHS[self.application]
        if self.application == "retrieval":
            least, most = (max(1, round(n * self.scale)) for n in (least, most))
        times = arrival_times(rng, self.arrivals, rate, count)
        lengths = (
            mean_prompt * self.scale * rng.lognormal(-(LENGTH_SPREAD**2) / 2, LENGTH_SPREAD, count)
        )
        # The seed decides which adapter is the most popular one, and so the rank used most.
        drawn = rng.choice(self.adapters, count, p=adapter_shares(self.adapters, self.skew))
        adapters = (drawn + seed) % self.adapters
        outputs = rng.integers(least, most + 1, count)
        return [
            TracedRequest(float(t), int(a), max(2, round(float(n))), int(output), most)
            for t, a, n, output in zip(times, adapters, lengths, outputs, strict=True)
        ]


def arrival_times(rng: np.random.Generator, arrivals: str, rate: float, count: int) -> Numbers:
    """Return the times of `count` arrivals in seconds, the first at 0, at a mean rate per second.

    arrivals: one of ARRIVALS; "bursty" are about BURST_SIZE at once.
    """
    if arrivals == "uniform":
        return np.arange(count) / rate
    azure = AZURE.get(arrivals)
    gaps = azure[2].draw(rng, count) if azure else rng.exponential(1.0, count)
    if arrivals == "bursty":
        starts_burst = rng.random(count) < 1 / BURST_SIZE
        gaps = np.where(starts_burst, gaps * BURST_SIZE, 0.0)
    return np.asarray(np.cumsum(gaps) - gaps[0]) / rate


def adapter_shares(count: int, hot: float | None = None, zipf: float = 0.0) -> Sequence[float]:
    """Return the share of requests of each of `count` adapters.

    hot: share of the first adapter; None for its share by popularity.
    zipf: exponent by which popularity falls with an adapter's place; 0 for equal shares.
    """
    weights = [place**-zipf for place in range(1, count + 1)]
    if hot is None or count == 1:
        return [weight / sum(weights) for weight in weights]
    return [hot, *((1.0 - hot) * weight / sum(weights[1:]) for weight in weights[1:])]


@dataclass(frozen=True)
class Traffic:
    """Requests of a load: all that is drawn, without their contents.

    arrivals: source of the times, as of `arrival_times`, or the path of a file of Azure's.
    rate: requests per second, to which the source's times are stretched.
    lengths: tokens of every prompt and every answer; None for those of the source, Azure's.
    streams: number of video streams, each of which sends a chunk per second; None for no streams.
    context: maximum number of tokens of a prompt and its answer; longer ones are cut.
    priorities: share of the requests that have a priority other than 0, by priority.
    """

    arrivals: str = "poisson"
    rate: float = 1.0
    seconds: float = 30.0
    lengths: tuple[int | None, int | None] = (256, 64)
    streams: int | None = None
    context: int | None = None
    adapters: int = 0
    hot: float | None = None
    zipf: float = 0.0
    base_share: float = 0.0
    priorities: Mapping[int, float] | None = None

    def draw(self, seed: int) -> list[TracedRequest]:
        """Return the requests in the order of their times. Raises InvalidArgument."""
        rng = np.random.default_rng(seed)
        plain = self._chunks() if self.streams else self._arrivals(rng)
        names, shares = self._drawn_from()
        # All chunks of a stream name the same adapter.
        drawn = rng.choice(names, self.streams or len(plain), p=shares)
        adapters = drawn if self.streams is None else [drawn[one.stream or 0] for one in plain]
        given = {0: 1.0 - sum((self.priorities or {}).values()), **(self.priorities or {})}
        priorities = rng.choice([*given], len(plain), p=[*given.values()])
        return [
            replace(self._cut(one), adapter=int(adapter), priority=int(priority))
            for one, adapter, priority in zip(plain, adapters, priorities, strict=True)
        ]

    def _drawn_from(self) -> tuple[list[int], list[float]]:
        if not self.adapters:
            return [BASE], [1.0]
        rest = 1.0 - self.base_share
        shares = adapter_shares(self.adapters, self.hot, self.zipf)
        return [BASE, *range(self.adapters)], [self.base_share, *(rest * one for one in shares)]

    def _chunks(self) -> list[TracedRequest]:
        # The streams start at different moments of a second.
        prompt, output = (length or 1 for length in self.lengths)
        streams = self.streams or 1
        return [
            TracedRequest(second + stream / streams, BASE, prompt, output, output, stream=stream)
            for second in range(max(1, round(self.seconds)))
            for stream in range(streams)
        ]

    def _arrivals(self, rng: np.random.Generator) -> list[TracedRequest]:
        count = max(1, round(self.rate * self.seconds))
        if self.arrivals.endswith(".csv"):
            times, prompts, outputs = read_azure(Path(self.arrivals), self.rate, count)
        else:
            times = arrival_times(rng, self.arrivals, self.rate, count)
            spreads = AZURE.get(self.arrivals, (Spread(1, 1),) * 3)
            prompts, outputs = (one.draw(rng, count) for one in spreads[:2])
        prompts, outputs = (
            drawn if length is None else np.full(count, length)
            for length, drawn in zip(self.lengths, (prompts, outputs), strict=True)
        )
        rows = zip(times.tolist(), prompts.round().tolist(), outputs.round().tolist(), strict=True)
        return [
            TracedRequest(at, BASE, max(1, int(p)), output := max(1, int(o)), output)
            for at, p, o in rows
        ]

    def _cut(self, request: TracedRequest) -> TracedRequest:
        if self.context is None:
            return request
        output = min(request.output, max(1, self.context // 2))
        prompt = min(request.prompt, max(1, self.context - output))
        return replace(request, prompt=prompt, output=output, limit=output)


def read_azure(path: Path, rate: float, count: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return times, prompt lengths and answer lengths of the first `count` requests of a file.

    The times start at 0 and are stretched to a mean rate per second. Raises InvalidArgument.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            if (head := next(rows, [])) != COLUMNS:
                raise InvalidArgument(
                    f"{path} begins with the columns {','.join(head)[:80]!r}; Azure's LLM inference"
                    f" traces begin with {','.join(COLUMNS)}"
                )
            read = [_azure_row(path, number, row) for number, row in enumerate(islice(rows, count))]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidArgument(f"{path} cannot be read: {reason}") from None
    if len(read) < count:
        raise InvalidArgument(
            f"{path} has {len(read)} requests, but --rate times --seconds are {count}; take fewer"
            " seconds"
        )
    times, prompts, outputs = np.array(read).T
    times = times - times.min()
    span = times.max() or 1.0
    order = np.argsort(times, kind="stable")
    return times[order] * (max(1, count - 1) / rate / span), prompts[order], outputs[order]


def _azure_row(path: Path, number: int, row: Sequence[str]) -> tuple[float, int, int]:
    try:
        at, prompt, output = row
        return datetime.fromisoformat(at).timestamp(), int(prompt), int(output)
    except ValueError:
        raise InvalidArgument(
            f"line {number + 2} of {path} is {','.join(row)[:80]!r}; it must have a time and two"
            " numbers of tokens"
        ) from None
