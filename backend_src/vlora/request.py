"""What the engine is asked and what it answers: plain values, no torch, no Triton."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vlora.errors import InvalidArgument, VLoraError

if TYPE_CHECKING:
    from vlora.sampling import SamplingParams

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
DoubleArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
IndexArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

MIN_STOPPABLE_ID = 16
"""Ids shorter than this cannot be cancelled: load tools reuse small ones for unrelated requests."""


@dataclass(frozen=True)
class ImageFeatures:
    """Encoded images of one request, in the order of their placeholders in the prompt.

    features: [rows, hidden] float32, the connector's output.
    layout: [images, 6] int32 = first row, rows, t, h, w, is_video; rows are contiguous and
        ascending, so that image i owns `features[first:first + rows]`.
    """

    features: FloatArray
    layout: IntArray

    @property
    def count(self) -> int:
        return int(self.layout.shape[0])

    def check(self, hidden: int) -> None:
        """Raises InvalidArgument unless the features are finite, `hidden` wide, and the layout
        covers them row by row."""
        features, layout = self.features, self.layout
        if features.ndim != 2 or (features.size and features.shape[1] != hidden):
            raise InvalidArgument(
                f"'image_features' has shape {list(features.shape)}; it must be [rows, {hidden}]"
            )
        if layout.ndim != 2 or layout.shape[1] != 6:
            raise InvalidArgument(
                f"'image_layout' has shape {list(layout.shape)}; it must be [images, 6]"
            )
        expected = 0
        for index, (first, rows, t, h, w, is_video) in enumerate(layout.tolist()):
            if first != expected or rows < 1:
                raise InvalidArgument(
                    f"'image_layout' gives image {index} the {rows} rows from {first};"
                    f" it must begin at row {expected} and have at least one"
                )
            if min(t, h, w) < 1 or is_video not in (0, 1):
                raise InvalidArgument(
                    f"'image_layout' gives image {index} t, h, w, is_video ="
                    f" {t}, {h}, {w}, {is_video}; the first three must be positive, the last 0 or 1"
                )
            expected += rows
        if expected != features.shape[0]:
            raise InvalidArgument(
                f"'image_layout' covers {expected} rows, 'image_features' has {features.shape[0]}"
            )
        if not np.isfinite(features).all():
            raise InvalidArgument("'image_features' holds NaN or infinite values")


@dataclass(frozen=True)
class Request:
    """One question to the model.

    id: unique among live requests (made by the loop, not by the client).
    client_id: the id the client gave, by which `cancel` finds the request; may be empty.
    prompt: the whole text with one image placeholder per image; expansion is the engine's.
    adapter: name of a LoRA adapter, or None for the base model.
    use_head: answer with the adapter's vision task head instead of the LM head.
    """

    id: str
    prompt: str
    sampling: SamplingParams
    adapter: str | None = None
    images: ImageFeatures | None = None
    use_head: bool = False
    client_id: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token (natural log, raw model distribution), rank from 1."""

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(frozen=True)
class HeadScores:
    """Answer of a vision task head: softmax scores by label, in the order of the adapter."""

    labels: tuple[str, ...]
    scores: tuple[float, ...]

    @property
    def best(self) -> str:
        return self.labels[max(range(len(self.scores)), key=self.scores.__getitem__)]


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was accepted; `first_token` is 0 until there is one."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Output:
    """News of one request: a step's, or what several steps brought that were told at once.
    The last has `finish_reason` or `error` set, never both.

    text: what is new since the last output (never split inside a UTF-8 character).
    finish_reason: None while running, else "stop" (end of text, stop string, head or choice
        complete) or "length" (max_tokens reached).
    logprobs: one tuple per new token, the sampled token first; None unless asked for.
    modes: steps so far by mode, "merged", "mixture" or "unmerged".
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    finish_reason: str | None = None
    error: VLoraError | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    head: HeadScores | None = None
    adapter: str | None = None
    adapter_digest: str | None = None
    timings: Timings = field(default_factory=Timings)
    modes: Mapping[str, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def then(self, later: Output) -> Output:
        """Both as one: what is new in either, and how things stand after `later`, which is the
        next of the same request and no error."""
        logprobs = later.logprobs
        if self.logprobs is not None:
            logprobs = self.logprobs + (logprobs or ())
        text, token_ids = self.text + later.text, self.token_ids + later.token_ids
        return replace(later, text=text, token_ids=token_ids, logprobs=logprobs)


def gathered(outputs: Iterable[Output]) -> list[Output]:
    """The same news with one output a request, and one more for each error: it comes after the
    text that its client has not been told yet. Who has all of an answer is told first, so that
    answers that end together are followed by requests that come together."""
    news: dict[str, Output] = {}
    errors = []
    for output in outputs:
        if output.error is not None:
            errors.append(output)
        elif (before := news.get(output.request_id)) is not None:
            news[output.request_id] = before.then(output)
        else:
            news[output.request_id] = output
    return [*sorted(news.values(), key=lambda output: not output.finished), *errors]


class OutputSink(Protocol):
    """Called on the response thread, in order, once per output of a request."""

    def __call__(self, output: Output) -> None: ...
