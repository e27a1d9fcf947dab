"""Data that a camera gives to the alerts, for each answer, and to the page, at any time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict


@dataclass(frozen=True)
class Answer:
    """The answer to one chunk of a camera.

    A chunk that was not asked about, because the scene has not changed, counts as the last answer
    with the times of this chunk (`dataclasses.replace`). Otherwise "2 of 3" would wait for changes.

    began, ended: Unix seconds of the chunk's first and last frame. answered: Unix seconds.
    scores: probabilities of a vision task head by label; empty without a head.
    yes: probability of the answer "yes" by its log probability; None if it is not known.
    objects: boxes of `result`, in pixels of `picture`.
    adapter, digest: empty for the base model.
    picture: JPEG of the chunk's middle frame; empty if there is none.
    clip: return an MP4 of these Unix seconds from the camera's packets; None if it has none. It is
      called from a thread of the alerts.
    """

    camera: str
    began: float
    ended: float
    answered: float
    text: str
    scores: Mapping[str, float]
    yes: float | None
    objects: Sequence[Mapping[str, Any]]
    adapter: str
    digest: str
    picture: bytes
    clip: Callable[[float, float], bytes | None]


class CameraView(TypedDict):
    """State and counts of a camera that the page shows.

    state: "running", "connecting", "waiting" or "stopped"; detail: why, without secrets.
    overloaded: whether many of the last chunks were dropped.
    lag: seconds from the last frame of the last chunk to its answer. skipped: share of the chunks,
      from 0 to 1, that were not asked about because the scene had not changed. damaged: frames that
      were left out because packets were lost.
    """

    name: str
    state: str
    overloaded: bool
    detail: str
    adapter: str
    picture: bytes
    answer: str
    answered: float | None
    lag: float | None
    chunks: int
    drops: int
    reconnections: int
    gaps: int
    errors: int
    damaged: int
    skipped: float
