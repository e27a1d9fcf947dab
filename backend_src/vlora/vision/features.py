"""Image features by content: a cache with a byte budget, and the service that fills it.

A key is the SHA-256 of an image's pixels, its shape and the tower's digest, computed here and
never taken from a client. Knows nothing of Triton.

**Invariant:** of the calls that miss one image at the same time, one encodes it and the others
wait for it. Whoever encodes does so before it waits, so no two callers can wait for each other.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from cachetools import Cache, LRUCache

from vlora.errors import Internal, VLoraError
from vlora.request import FloatArray, IntArray
from vlora.vision.images import DecodedImage

CHUNK = 32
"""Images in one call of the tower, which bounds the memory of its activations."""
MOMENT = 0.05
"""Seconds of the tower's work that requests which came together may wait for each other."""


class Encoder(Protocol):
    """What the service needs of a `VisionEncoder`."""

    @property
    def hidden(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def tower_digest(self) -> str: ...
    def encode(self, images: Sequence[DecodedImage]) -> list[FloatArray]: ...


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """The images of one request.

    features: float32 [rows, hidden]. layout: int32 [n, 6] = first row, rows, t, h, w, is_video,
    where t is 1 (a clip has one line per frame) and h, w count patches. size: int32 [n, 2] =
    original height, width. digests: n hex keys.
    """

    features: FloatArray
    layout: IntArray
    size: IntArray
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Counters:
    """Since the start: images asked for = hits + misses; a miss is an image given to the tower.

    batches: calls of the tower. evictions: entries that had to make room. bytes: held now.
    """

    images: int = 0
    hits: int = 0
    misses: int = 0
    batches: int = 0
    evictions: int = 0
    bytes: int = 0


PendingFeatures = Future[FloatArray]


class FeatureCache:
    """Least recently used features within `budget` bytes; 0 turns it off. Safe among threads."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.evictions = 0
        self._lock = threading.Lock()
        self._entries: LRUCache[str, FloatArray] = LRUCache(budget, lambda entry: entry.nbytes)
        self._pending: dict[str, PendingFeatures] = {}

    @property
    def used(self) -> int:
        """Bytes of features held."""
        return int(self._entries.currsize)

    def __len__(self) -> int:
        return len(self._entries)

    def claim(self, key: str) -> tuple[PendingFeatures, bool]:
        """The features of `key`, there or still to come, and whether the caller must bring them,
        by `fulfil` or `fail`."""
        with self._lock:
            if key in self._entries:
                known: PendingFeatures = Future()
                known.set_result(self._entries[key])
                return known, False
            if key in self._pending:
                return self._pending[key], False
            pending: PendingFeatures = Future()
            if self.budget:
                self._pending[key] = pending
            return pending, True

    def fulfil(self, key: str, pending: PendingFeatures, features: FloatArray) -> None:
        """The claimed features, float32 [rows, hidden]: cached if they fit, given to all."""
        owned = np.array(features, np.float32)
        owned.flags.writeable = False
        with self._lock:
            self._pending.pop(key, None)
            if owned.nbytes <= self.budget:
                before = len(self._entries)
                self._entries[key] = owned
                self.evictions += before + 1 - len(self._entries)
        pending.set_result(owned)

    def fail(self, key: str, pending: PendingFeatures, error: VLoraError) -> None:
        """They could not be had: whoever waits gets the same error; the next to ask tries anew."""
        with self._lock:
            self._pending.pop(key, None)
        pending.set_exception(error)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance; for tests and idle times."""
        with self._lock:
            # Past the order of use, which looking must not change.
            entries = [Cache.__getitem__(self._entries, key) for key in self._entries]
            held = sum(entry.nbytes for entry in entries)
            assert held == self.used, f"holds {held} bytes, books say {self.used}"
            assert self.used <= self.budget, f"{self.used} bytes of {self.budget}"
            assert not self._pending.keys() & self._entries.keys(), "pending and cached"
            assert not any(entry.flags.writeable for entry in entries)


class EncoderService:
    """Encodes the images of a batch of requests, each image that is not known once."""

    def __init__(self, encoder: Encoder, cache: FeatureCache) -> None:
        self._encoder = encoder
        self._cache = cache
        self._lock = threading.Lock()
        self._counters = Counters()
        self._pace = 0.0  # seconds an image took the last time

    @property
    def at_once(self) -> int:
        """Images that the tower encodes in a moment, at the pace of its last call; at least 1."""
        return max(1, int(MOMENT / self._pace)) if self._pace else 1

    @property
    def counters(self) -> Counters:
        cache = self._cache
        return replace(self._counters, evictions=cache.evictions, bytes=cache.used)

    def run(self, batch: Sequence[Sequence[DecodedImage]]) -> list[EncodedImages]:
        """Features of each request of `batch`, which may have no images at all.

        Raises the encoder's VLoraError, or Internal where it failed in any other way.
        """
        images = [image for request in batch for image in request]
        keys = [_key(image, self._encoder.tower_digest) for image in images]
        features = self._encode_all(images, keys)
        answers = []
        start = 0
        for request in batch:
            mine = slice(start, start + len(request))
            answers.append(self._assemble(request, features[mine], keys[mine]))
            start += len(request)
        return answers

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance."""
        self._cache.check_integrity()
        counters = self.counters
        assert counters.images == counters.hits + counters.misses, counters
        assert counters.batches <= counters.misses, counters

    def _encode_all(self, images: list[DecodedImage], keys: list[str]) -> list[FloatArray]:
        claims = [self._cache.claim(key) for key in keys]
        mine = [i for i, (_, ours) in enumerate(claims) if ours]
        self._count(images=len(images), hits=len(images) - len(mine), misses=len(mine))
        try:
            for start in range(0, len(mine), CHUNK):
                chunk = mine[start : start + CHUNK]
                self._count(batches=1)
                began = time.monotonic()
                encoded = self._encoder.encode([images[i] for i in chunk])
                self._pace = (time.monotonic() - began) / len(chunk)
                for i, features in zip(chunk, encoded, strict=True):
                    self._cache.fulfil(keys[i], claims[i][0], features)
        except BaseException as error:
            failure = _typed(error)
            for i in mine:
                if not claims[i][0].done():
                    self._cache.fail(keys[i], claims[i][0], failure)
            raise failure from error
        return [pending.result() for pending, _ in claims]

    def _assemble(
        self, images: Sequence[DecodedImage], features: list[FloatArray], keys: list[str]
    ) -> EncodedImages:
        height, width = self._encoder.grid
        rows = [len(one) for one in features]
        firsts = np.cumsum([0, *rows])[:-1]
        layout = [
            (first, count, 1, height, width, int(image.is_video))
            for first, count, image in zip(firsts, rows, images, strict=True)
        ]
        empty = np.zeros((0, self._encoder.hidden), np.float32)
        return EncodedImages(
            features=np.concatenate([empty, *features]),
            layout=np.array(layout, np.int32).reshape(-1, 6),
            size=np.array([(i.height, i.width) for i in images], np.int32).reshape(-1, 2),
            digests=tuple(keys),
        )

    def _count(self, images: int = 0, hits: int = 0, misses: int = 0, batches: int = 0) -> None:
        with self._lock:
            before = self._counters
            self._counters = Counters(
                images=before.images + images,
                hits=before.hits + hits,
                misses=before.misses + misses,
                batches=before.batches + batches,
            )


def _key(image: DecodedImage, tower_digest: str) -> str:
    digest = hashlib.sha256(f"{tower_digest} {image.rgb.shape}".encode())
    digest.update(np.ascontiguousarray(image.rgb).data)
    return digest.hexdigest()


def _typed(error: BaseException) -> VLoraError:
    if isinstance(error, VLoraError):
        return error
    return Internal(f"the vision tower failed: {type(error).__name__}: {error}")
