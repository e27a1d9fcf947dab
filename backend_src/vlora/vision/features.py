"""Cache of image features by image content, and the service that computes missing features.

A key is the SHA-256 of an image's pixels and shape, the tower's digest, and the digest of an
adapter's vision part, never a value from a client.

**Invariant:** if several calls miss the same image at the same time, one encodes it and the others
wait. A call encodes its own images before it waits, so two calls never wait for each other.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from cachetools import Cache, LRUCache

from vlora.errors import Internal, VLoraError
from vlora.metrics import EncoderCounters
from vlora.request import FloatArray, IntArray
from vlora.vision.adapters import VisionPart
from vlora.vision.images import DecodedImage

if TYPE_CHECKING:
    from vlora.vision.encoder import PreparedImage, TextOnlyEncoder, VisionEncoder

# Maximum number of images in one call of the tower, which limits the memory of activations.
MAX_TOWER_BATCH = 32
# Target duration in seconds of the tower's work on one batch of requests.
TARGET_BATCH_SECONDS = 0.05
# Target maximum duration of one call of the tower, in seconds. The target must be shorter than the
# deadline of a health probe. Images are counted when a call ends. If no images are counted within
# the deadline, the probe reports that the encoder hangs.
MAX_CALL_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Encoded images of one request.

    features: float32 [rows, hidden].
    layout: int32 [n, 6] with the columns first row, rows, t, h, w, is_video, as in `ImageFeatures`.
        h and w are in patches.
    size: int32 [n, 2], original height and width in pixels.
    digests: keys of the images in the cache, in hex and without a salt, in order.
    adapter_version: version of the adapter that was applied to the tower; "" if none was.
    """

    features: FloatArray
    layout: IntArray
    size: IntArray
    digests: tuple[str, ...]
    adapter_version: str = ""


PendingFeatures = Future[FloatArray]


class FeatureCache:
    """LRU cache of image features. Thread-safe.

    budget: maximum size in bytes; 0 turns the cache off.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.evictions = 0
        self._lock = threading.Lock()
        self._entries: LRUCache[str, FloatArray] = LRUCache(budget, lambda entry: entry.nbytes)
        self._pending: dict[str, PendingFeatures] = {}

    @property
    def used(self) -> int:
        """Bytes of features in the cache."""
        return int(self._entries.currsize)

    def __len__(self) -> int:
        return len(self._entries)

    def claim(self, key: str) -> tuple[PendingFeatures, bool]:
        """Return a future for the features of `key`, and whether the caller must compute them.

        If so, it must call `fulfil` or `fail`, because other callers may wait for the future.
        """
        with self._lock:
            if key in self._entries:
                cached: PendingFeatures = Future()
                cached.set_result(self._entries[key])
                return cached, False
            if key in self._pending:
                return self._pending[key], False
            pending: PendingFeatures = Future()
            if self.budget:
                self._pending[key] = pending
            return pending, True

    def fulfil(self, key: str, pending: PendingFeatures, features: FloatArray) -> None:
        """Resolve `pending` with features, float32 [rows, hidden], and cache them if they fit."""
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
        """Fail `pending` with `error`. The next caller that claims the key must compute."""
        with self._lock:
            self._pending.pop(key, None)
        pending.set_exception(error)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounting is inconsistent. For tests and idle times."""
        with self._lock:
            # This method of the base class reads an entry without changing the LRU order.
            entries = [Cache.__getitem__(self._entries, key) for key in self._entries]
            total = sum(entry.nbytes for entry in entries)
            assert total == self.used, f"entries have {total} bytes, {self.used} are recorded"
            assert self.used <= self.budget, f"{self.used} bytes of {self.budget}"
            assert not self._pending.keys() & self._entries.keys(), "pending and cached"
            assert not any(entry.flags.writeable for entry in entries)


class EncoderService:
    """Encodes the images of requests. Each image that is not cached is encoded once.

    Thread-safe. One call of the tower runs at a time.

    seconds_per_image: the tower's time per image until it is measured, 0 if unknown.
    """

    def __init__(
        self,
        encoder: VisionEncoder | TextOnlyEncoder,
        cache: FeatureCache,
        seconds_per_image: float = 0.0,
    ) -> None:
        self._encoder = encoder
        self._cache = cache
        self._lock = threading.Lock()
        self._tower = threading.Lock()
        self._counters = EncoderCounters()
        # After a call of the tower: the duration of the call divided by its number of images.
        self._seconds_per_image = seconds_per_image

    @property
    def images_per_batch(self) -> int:
        """Number of images that the tower encodes in TARGET_BATCH_SECONDS, at least 1."""
        seconds = self._seconds_per_image
        return max(1, int(TARGET_BATCH_SECONDS / seconds)) if seconds else 1

    @property
    def counters(self) -> EncoderCounters:
        """Counters of the service and its cache."""
        cache = self._cache
        return replace(self._counters, evictions=cache.evictions, bytes=cache.used)

    def run(
        self,
        batch: Sequence[Sequence[DecodedImage]],
        parts: Sequence[VisionPart | None] = (),
        salts: Sequence[str | None] = (),
    ) -> list[EncodedImages]:
        """Return the encoded images of each request of `batch`. A request may have none.

        parts: vision part of each request's adapter; () if no adapter has one.
        salts: tenant of each request, whose features no other tenant shares; () without tenants.

        Raises the encoder's VLoraError, or Internal for any other exception of the encoder.
        """
        parts = parts or [None] * len(batch)
        requests = list(zip(map(self._encoder.prepare, batch), parts, strict=True))
        images = [(one.image, part) for request, part in requests for one in request]
        keys = [_key(image, part, self._encoder.tower_digest) for image, part in images]
        owners = [
            salt
            for (request, _), salt in zip(requests, salts or [None] * len(batch), strict=True)
            for _ in request
        ]
        # A salt can have any content, so a key that begins with 64 digits stays unambiguous.
        salted = [
            key if salt is None else key + salt for key, salt in zip(keys, owners, strict=True)
        ]
        features = self._encode_all(images, salted)
        encoded = []
        start = 0
        for request, part in requests:
            own = slice(start, start + len(request))
            version = "" if part is None else part.version
            encoded.append(self._assemble(request, features[own], keys[own], version))
            start += len(request)
        return encoded

    def count_group(self, requests: int) -> None:
        """Count requests that were ready together. `run` may encode them in several parts."""
        self._count(requests=requests, groups=1)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounting is inconsistent."""
        self._cache.check_integrity()
        counters = self.counters
        assert counters.images == counters.hits + counters.misses, counters
        assert counters.batches <= counters.misses, counters

    def _encode_all(
        self, images: Sequence[tuple[DecodedImage, VisionPart | None]], keys: list[str]
    ) -> list[FloatArray]:
        claims = [self._cache.claim(key) for key in keys]
        missed = [i for i, (_, must_compute) in enumerate(claims) if must_compute]
        hits = len(images) - len(missed)
        self._count(images=hits, hits=hits)
        by_part: dict[VisionPart | None, list[int]] = {}
        for i in missed:
            by_part.setdefault(images[i][1], []).append(i)
        try:
            for part, same in by_part.items():
                while same:
                    with self._tower:
                        batch = same[: self._images_per_call]
                        start = time.monotonic()
                        encoded = self._encoder.encode([images[i][0] for i in batch], part)
                        self._seconds_per_image = (time.monotonic() - start) / len(batch)
                    self._count(images=len(batch), misses=len(batch), batches=1)
                    for i, features in zip(batch, encoded, strict=True):
                        self._cache.fulfil(keys[i], claims[i][0], features)
                    del same[: len(batch)]
        except BaseException as error:
            failed = f"the vision tower failed: {type(error).__name__}: {error}"
            failure = error if isinstance(error, VLoraError) else Internal(failed)
            for i in missed:
                if not claims[i][0].done():
                    self._cache.fail(keys[i], claims[i][0], failure)
            raise failure from error
        return [pending.result() for pending, _ in claims]

    def _assemble(
        self,
        images: Sequence[PreparedImage],
        features: list[FloatArray],
        keys: list[str],
        adapter_version: str,
    ) -> EncodedImages:
        layout: list[list[int]] = []
        size: list[tuple[int, int]] = []
        first = 0
        for (image, grid), own in zip(images, features, strict=True):
            frames = image.frames if image.is_video else 0
            if image.continues:
                # A later step in time of the same clip adds rows, a step and frames to its entry.
                layout[-1][1] += len(own)
                layout[-1][2] += 1
                layout[-1][5] += frames
            else:
                layout.append([first, len(own), 1, *grid, frames])
                size.append((image.height, image.width))
            first += len(own)
        empty = np.zeros((0, self._encoder.hidden), np.float32)
        return EncodedImages(
            features=np.concatenate([empty, *features]),
            layout=np.array(layout, np.int32).reshape(-1, 6),
            size=np.array(size, np.int32).reshape(-1, 2),
            digests=tuple(keys),
            adapter_version=adapter_version,
        )

    @property
    def _images_per_call(self) -> int:
        seconds = self._seconds_per_image
        return min(MAX_TOWER_BATCH, max(1, int(MAX_CALL_SECONDS / seconds))) if seconds else 1

    def _count(self, **more: int) -> None:
        """Add to the counters. Call this for images only when their features exist."""
        with self._lock:
            counts = {name: getattr(self._counters, name) + count for name, count in more.items()}
            self._counters = replace(self._counters, **counts)


def _key(image: DecodedImage, part: VisionPart | None, tower_digest: str) -> str:
    tower = tower_digest if part is None else f"{tower_digest} {part.digest}"
    digest = hashlib.sha256(f"{tower} {image.view} {image.scaled} {image.rgb.shape}".encode())
    digest.update(np.ascontiguousarray(image.rgb).data)
    return digest.hexdigest()
