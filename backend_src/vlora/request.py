"""Requests to the engine, and its outputs: plain values without torch or Triton."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vlora.errors import Cancelled, InvalidArgument, VLoraError

if TYPE_CHECKING:
    from vlora.sampling import SamplingParams

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
DoubleArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
IndexArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Minimum length of a client's id for `cancel`. Load generators reuse shorter ones.
MIN_STOPPABLE_ID = 16
# Begin of a clip that is a list of JPEG files in base64, separated by commas, as in vLLM.
FRAME_LIST = "data:video/jpeg;base64,"
FRAMES_PER_SECOND = 24.0  # Frame rate that transformers assumes for clips without a frame rate.
MAX_FRAMES_PER_ROW = 2  # Frames that one row of features can stand for.


class PromptText(str):
    """A prompt that a template has made.

    literals: spans (start, end) of the prompt, in order, that are only text, although they spell
        special tokens or placeholders.
    is_complete: whether it has all special tokens, so that no begin-of-text token is added.
    order: entry of `ImageFeatures.layout` of each placeholder; () if they have its order.
    """

    literals: tuple[tuple[int, int], ...]
    is_complete: bool
    order: tuple[int, ...]

    def __new__(
        cls,
        text: str,
        literals: tuple[tuple[int, int], ...] = (),
        is_complete: bool = False,
        order: tuple[int, ...] = (),
    ) -> PromptText:
        self = super().__new__(cls, text)
        self.literals = literals
        self.is_complete = is_complete
        self.order = order
        return self


@dataclass(frozen=True)
class Clip:
    """The sampled frames of a video file, or of a list of frames.

    seconds: time of each frame.
    fps: frames per second, on average.
    """

    seconds: tuple[float, ...]
    fps: float

    @staticmethod
    def of_list(frames: int) -> Clip:
        seconds = tuple(frame / FRAMES_PER_SECOND for frame in range(frames))
        return Clip(seconds, FRAMES_PER_SECOND)

    @property
    def frames(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class ImageFeatures:
    """Encoded images of one request: images, then video files, then the frames of its clip.

    features: [rows, hidden] float32, output of the connector.
    layout: [images, 6] int32 with the columns first row, rows, t, h, w, is_video. The rows of image
        i are `features[first:first + rows]`, and follow those of image i - 1. is_video is the
        number of frames that the rows encode; 0 for an image. t is the number of steps in time:
        above 1 for a clip whose frames are encoded together. h and w are in patches.
    adapter_version: version of the adapter whose vision part made the features; "" for the base
        model's tower; None if unknown.
    videos: the video files. The clip has the rest of the frames.
    """

    features: FloatArray
    layout: IntArray
    adapter_version: str | None = None
    videos: tuple[Clip, ...] = ()

    @property
    def count(self) -> int:
        return int(self.layout.shape[0])

    @property
    def counts(self) -> tuple[int, int]:
        """Number of images, and number of frames that are not those of a video file. Raises
        InvalidArgument for too many frames per row, and for fewer than the files have.
        """
        frames = self.layout[:, 5].astype(np.int64).clip(0)  # `check` refuses negative ones.
        limit = MAX_FRAMES_PER_ROW * len(self.features)
        if frames.sum() > limit:
            raise InvalidArgument(
                f"'image_layout' has {frames.sum()} frames in column is_video;"
                f" {len(self.features)} rows of 'image_features' show at most {limit}"
            )
        rest = int(frames.sum()) - sum(video.frames for video in self.videos)
        if rest < 0:
            raise InvalidArgument(
                f"'image_layout' has {frames.sum()} frames, fewer than the video files"
            )
        return int((frames == 0).sum()), rest

    def videos_by_entry(self) -> list[int | None]:
        """Return the number of each layout entry's video file; None if it belongs to none."""
        left = [video.frames for video in self.videos]
        found: list[int | None] = []
        number = 0
        for frames in self.layout[:, 5].tolist():
            while number < len(left) and left[number] <= 0:
                number += 1
            is_file = frames > 0 and number < len(left)
            found.append(number if is_file else None)
            if is_file:
                left[number] -= frames
        return found

    def check(self, hidden: int) -> None:
        """Check values and shape of the features, and that the layout covers all rows in order.

        Raises InvalidArgument, also if a row has another width than `hidden`.
        """
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
                    f"'image_layout' assigns {rows} rows from row {first} to image {index};"
                    f" it must begin at row {expected} and have at least one"
                )
            if min(t, h, w) < 1 or is_video < 0:
                raise InvalidArgument(
                    f"'image_layout' has t, h, w, is_video = {t}, {h}, {w}, {is_video} for image"
                    f" {index}; the first three must be positive, the last 0 or more"
                )
            expected += rows
        if expected != features.shape[0]:
            raise InvalidArgument(
                f"'image_layout' covers {expected} rows, 'image_features' has {features.shape[0]}"
            )
        if not np.isfinite(features).all():
            raise InvalidArgument("'image_features' holds NaN or infinite values")


@dataclass(frozen=True)
class Freshness:
    """Arrival, deadline and stream of a request, which decide until when its answer is useful.

    arrival: at the server's first model, in seconds of `time.monotonic`.
    cache_salt: tenant to whom the request and its stream belong, if the client names one.
    """

    arrival: float
    deadline_ms: float | None = None
    stream_id: str | None = None
    supersede: bool = False
    cache_salt: str | None = None

    @staticmethod
    def of(params: SamplingParams, arrival: float) -> Freshness:
        keys = params.deadline_ms, params.stream_id, params.supersede, params.cache_salt
        return Freshness(arrival, *keys)

    @property
    def deadline(self) -> float:
        """Deadline in seconds of `time.monotonic`; infinity without a deadline."""
        return math.inf if self.deadline_ms is None else self.arrival + self.deadline_ms / 1e3

    def is_superseded_by(self, newer: Freshness) -> bool:
        same_tenant = self.cache_salt == newer.cache_salt
        same_stream = newer.supersede and self.stream_id == newer.stream_id
        return same_tenant and same_stream and self.arrival <= newer.arrival

    def late_error(self) -> Cancelled:
        """Return the error for a request whose deadline has passed."""
        return Cancelled(f"past its deadline: 'deadline_ms' = {self.deadline_ms:g}")

    def superseded_error(self) -> Cancelled:
        """Return the error for requests that this one supersedes."""
        return Cancelled(f"a newer request of stream '{self.stream_id}' superseded this one")


@dataclass(frozen=True)
class Request:
    """One request to the engine.

    id: unique among live requests; generated by the server.
    prompt: full text with one placeholder per image, which the engine expands.
    adapter: name of a LoRA adapter, or None for the base model.
    use_head: whether to answer with the adapter's vision task head instead of the LM head.
    client_id: the client's own id, by which `cancel` finds the request; may be empty.
    """

    id: str
    prompt: str
    sampling: SamplingParams
    adapter: str | None = None
    images: ImageFeatures | None = None
    use_head: bool = False
    client_id: str = ""
    arrival: float = field(default_factory=time.monotonic)

    def freshness(self, arrival: float) -> Freshness:
        """Return the request's freshness, with times on the clock of `arrival`."""
        return Freshness.of(self.sampling, arrival)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probability of one token, before penalties and filters; `rank` begins at 1.

    content: bytes of the token in the answer's text, which may be a part of a character.
    """

    token_id: int
    logprob: float
    rank: int
    content: bytes

    @property
    def text(self) -> str:
        """Text of the token alone, with U+FFFD for incomplete characters."""
        return self.content.decode(errors="replace")


@dataclass(frozen=True)
class HeadScores:
    """Answer of a vision task head: the softmax score of each label, in the adapter's order."""

    labels: tuple[str, ...]
    scores: tuple[float, ...]

    @property
    def best(self) -> str:
        return self.labels[max(range(len(self.scores)), key=self.scores.__getitem__)]


class Timings(NamedTuple):
    """Seconds from a request's arrival at the server's first model to each event.

    queued: until the request was first scheduled; until then, the same as `total`.
    first_token: until its first token; 0 before.
    total: until this output.
    """

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


# Value of `Output.modes` in every output of a request but the last.
NO_MODES: Mapping[str, int] = MappingProxyType({})


class Output(NamedTuple):
    """Progress of one request in one step, or in several steps whose outputs were coalesced.

    The last output has either `finish_reason` or `error`. A frozen dataclass would take several
    times as long to make, once per row.

    text, token_ids: since the previous output; no character is split.
    logprobs: one tuple per new token, the sampled token first; None unless requested.
    finish_reason: "stop" (end of text, stop string, complete choice, or task head) or "length".
    num_input_tokens, num_output_tokens: number of tokens of the prompt, and of the answer so far.
    num_cached_tokens: prompt tokens in the prefix cache when the request got its present pages.
    modes: number of steps by mode ("merged", "mixture", "unmerged"); in the last output only.
    word_probabilities: of the request's words at the answer's first token; in the last output only.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    finish_reason: str | None = None
    error: VLoraError | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    head: HeadScores | None = None
    adapter: str | None = None
    adapter_digest: str | None = None
    timings: Timings = Timings()
    modes: Mapping[str, int] = NO_MODES
    word_probabilities: Mapping[str, float] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def followed_by(self, later: Output) -> Output:
        """Return `later`, which has no error, with the text and tokens of both outputs."""
        logprobs = later.logprobs
        if self.logprobs is not None:
            logprobs = self.logprobs + (logprobs or ())
        text, token_ids = self.text + later.text, self.token_ids + later.token_ids
        return later._replace(text=text, token_ids=token_ids, logprobs=logprobs)


def coalesce(outputs: Iterable[Output]) -> list[Output]:
    """Return the outputs, with those of each request joined into one.

    Errors come last, after the unsent text of their requests. Finished requests come first, so that
    clients whose answers end together send their next requests together.
    """
    joined: dict[str, Output] = {}
    errors = []
    for output in outputs:
        if output.error is not None:
            errors.append(output)
        elif (earlier := joined.get(output.request_id)) is not None:
            joined[output.request_id] = earlier.followed_by(output)
        else:
            joined[output.request_id] = output
    return [*sorted(joined.values(), key=lambda output: not output.finished), *errors]


# Function that receives the outputs of a request, in order, on the response thread.
OutputSink = Callable[[Output], None]
