"""Cache of image features by image content, and the service that computes missing features.

A key is the SHA-256 of an image's pixels and shape, the tower's digest, and the digest of an
adapter's vision part, never a value from a client.

**Invariant:** if several calls miss the same image at the same time, one encodes it and the others
wait. A call encodes its own images before it waits, so two calls never wait for each other.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from cachetools import Cache, LRUCache

from vlora.errors import Internal, VLoraError, prompt_too_long
from vlora.metrics import EncoderCounters
from vlora.request import Clip, FloatArray, IntArray
from vlora.sampling import AS_CHECKPOINT, MediaOptions
from vlora.vision.images import DecodedImage, PictureSize, stacked, without_pixels
from vlora.vision.pictures import ByteArray
from vlora.vision.video import VideoSampling

if TYPE_CHECKING:
    from vlora.vision.adapters import VisionPart
    from vlora.vision.encoder import PreparedImage, TextOnlyEncoder, VisionEncoder
    from vlora.vision.families.base import Pixels

# Maximum number of images in one call of the tower, which limits the memory of activations.
MAX_TOWER_BATCH = 32
# Target duration in seconds of the tower's work on one batch of requests.
TARGET_BATCH_SECONDS = 0.05
# Target maximum duration of one call of the tower, in seconds. The target must be shorter than the
# deadline of a health probe. Images are counted when a call ends. If no images are counted within
# the deadline, the probe reports that the encoder hangs.
MAX_CALL_SECONDS = 1.0
DIGEST_CHARACTERS = 64


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Encoded images of one request.

    features: float32 [rows, hidden].
    layout: int32 [n, 6] with the columns first row, rows, t, h, w, is_video, as in `ImageFeatures`.
        h and w are in patches.
    size: int32 [n, 2], original height and width in pixels.
    digests: keys of the images in the cache, in hex and without a salt, in order.
    adapter_version: version of the adapter that was applied to the tower; "" if none was.
    videos: the video files.
    """

    features: FloatArray
    layout: IntArray
    size: IntArray
    digests: tuple[str, ...]
    adapter_version: str = ""
    videos: tuple[Clip, ...] = ()


class ReadyImage(NamedTuple):
    """An image whose decoded pixels are no longer needed.

    prepared: the image without pixels.
    key: digest of the image in DIGEST_CHARACTERS of hex, followed by the tenant's salt, if any.
    part: vision part of the adapter, or None.
    features: its features if they were cached; else `pixels` are those for the tower.
    """

    prepared: PreparedImage
    key: str
    part: VisionPart | None
    features: FloatArray | None
    pixels: Pixels | None

    @property
    def nbytes(self) -> int:
        """Number of bytes of the pixels."""
        return sum(values.nbytes for values in (self.pixels or {}).values())


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

    def get(self, key: str) -> FloatArray | None:
        """Return the features of `key`, or None."""
        with self._lock:
            found: FloatArray | None = self._entries.get(key)
            return found

    def claim(self, key: str) -> tuple[PendingFeatures, bool]:
        """Return a future for the features of `key`, and whether the caller must compute them.

        If so, it must call `fulfil` or `fail`, because other callers may wait for the future.
        """
        with self._lock:
            if key in self._entries:
                return _resolved(self._entries[key])
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


def _resolved(features: FloatArray) -> tuple[PendingFeatures, bool]:
    cached: PendingFeatures = Future()
    cached.set_result(features)
    return cached, False


class EncoderService:
    """Encodes the images of requests. Each image that is not cached is encoded once.

    Thread-safe. One call of the tower runs at a time.

    seconds_per_image: the tower's time per image until it is measured, 0 if unknown.
    context: maximum number of tokens of a prompt.
    pruning_rate: share of the tokens of clips that become none.
    """

    def __init__(
        self,
        encoder: VisionEncoder | TextOnlyEncoder,
        cache: FeatureCache,
        seconds_per_image: float = 0.0,
        context: float = math.inf,
        pruning_rate: float = 0.0,
    ) -> None:
        self._encoder = encoder
        self._context = context
        self._kept_share = 1.0 - pruning_rate
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
        nothing = [None] * len(batch)
        ready = [
            [self.ready(one, part, salt) for one in self._encoder.prepare(images)]
            for images, part, salt in zip(batch, parts or nothing, salts or nothing, strict=True)
        ]
        features = iter(self.encode([image for request in ready for image in request]))
        return [self.assemble(request, [*islice(features, len(request))]) for request in ready]

    def receive(
        self,
        part: VisionPart | None,
        hold: Callable[[int], None] = lambda size: None,
        salt: str | None = None,
        options: MediaOptions = AS_CHECKPOINT,
    ) -> RequestImages:
        """Return the images of a new request, for its pictures.

        part: vision part of its adapter.
        hold: called with the bytes of each image for the tower. May raise a VLoraError.
        salt: its tenant, whose features no other tenant shares.
        options: how its pictures are prepared.
        """
        return RequestImages(self, part, hold, salt, options)

    def sample(self, sampling: VideoSampling, total: int, fps: float) -> Sequence[int]:
        """Return the numbers of the frames to use of a video file with `total` frames."""
        return self._encoder.sample_frames(sampling, total, fps)

    def plan(self, sizes: Sequence[PictureSize], options: MediaOptions) -> list[PreparedImage]:
        """Return the images of one request before its pictures are decoded.

        Raises InvalidArgument if their tokens alone are too many for a prompt.
        """
        planned = self._encoder.prepare([without_pixels(size) for size in sizes], options)
        of_frames = sum(image.tokens for image in planned if image.image.is_video)
        tokens = sum(image.tokens for image in planned) - of_frames
        tokens += int(of_frames * self._kept_share)
        if tokens > self._context:
            frames = sum(size.is_frame for size in sizes)
            fewer = f"; send fewer than {frames} frames; of a video file, choose them with"
            hint = f"{fewer} 'media_io_kwargs.video.num_frames'" if frames else ""
            raise prompt_too_long(tokens, self._context, "image tokens", int(self._context), hint)
        return planned

    def ready(
        self, prepared: PreparedImage, part: VisionPart | None, salt: str | None
    ) -> ReadyImage:
        """Return what the tower needs of an image with pixels."""
        image = prepared.image
        # A salt can have any content, so a key that begins with the digest stays unambiguous.
        key = _key(image, part, self._encoder.tower_digest) + (salt or "")
        features = self._cache.get(key)
        pixels = self._encoder.preprocess(image) if features is None else None
        size = PictureSize(image.rgb.shape[0], image.width, image.is_video)
        prepared = prepared._replace(image=replace(image, rgb=without_pixels(size).rgb))
        return ReadyImage(prepared, key, part, features, pixels)

    def count_group(self, requests: int) -> None:
        """Count requests that were ready together. `run` may encode them in several parts."""
        self._count(requests=requests, groups=1)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounting is inconsistent."""
        self._cache.check_integrity()
        counters = self.counters
        assert counters.images == counters.hits + counters.misses, counters
        assert counters.batches <= counters.misses, counters

    def encode(self, images: Sequence[ReadyImage]) -> list[FloatArray]:
        """Return the features of images, which may belong to several requests.

        Raises the encoder's VLoraError, or Internal for any other exception of the encoder.
        """
        keys = [image.key for image in images]
        claims = [
            self._cache.claim(image.key) if image.features is None else _resolved(image.features)
            for image in images
        ]
        missed = [i for i, (_, must_compute) in enumerate(claims) if must_compute]
        hits = len(images) - len(missed)
        self._count(images=hits, hits=hits)
        by_part: dict[VisionPart | None, list[int]] = {}
        for i in missed:
            by_part.setdefault(images[i].part, []).append(i)
        try:
            for part, same in by_part.items():
                while same:
                    with self._tower:
                        batch = same[: self._images_per_call]
                        start = time.monotonic()
                        encoded = self._encoder.encode(
                            [images[i].pixels or {} for i in batch], part
                        )
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

    def assemble(
        self,
        images: Sequence[ReadyImage],
        features: Sequence[FloatArray],
        videos: Sequence[Clip] = (),
    ) -> EncodedImages:
        """Return the answer to one request from its images, their features and its video files."""
        layout: list[list[int]] = []
        size: list[tuple[int, int]] = []
        first = 0
        for ready, own in zip(images, features, strict=True):
            image, grid, _ = ready.prepared
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
            digests=tuple(image.key[:DIGEST_CHARACTERS] for image in images),
            adapter_version=next((image.part.version for image in images if image.part), ""),
            videos=tuple(videos),
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


class RequestImages:
    """The images of one request as their pictures are decoded, one after another.

    images: the images whose pictures have all been decoded.
    pictures: number of the pictures of `images`.
    videos: the video files, once planned.
    """

    def __init__(
        self,
        service: EncoderService,
        part: VisionPart | None,
        hold: Callable[[int], None],
        salt: str | None,
        options: MediaOptions,
    ) -> None:
        self._service = service
        self._options = options
        self._salt = salt
        self._hold = hold
        self._part = part
        self._sizes: list[PictureSize] = []
        self._plan: list[PreparedImage] = []
        self._parts: list[ByteArray] = []  # Pictures of the next image.
        self.images: list[ReadyImage] = []
        self.pictures = 0
        self.videos: Sequence[Clip] = ()

    def sample(self, sampling: VideoSampling, total: int, fps: float) -> Sequence[int]:
        """Return the numbers of the frames to use of a video file with `total` frames."""
        return self._service.sample(sampling, total, fps)

    def plan(self, sizes: Sequence[PictureSize], videos: Sequence[Clip] = ()) -> None:
        """Set the sizes of all pictures, and the video files among them.

        Raises InvalidArgument if they make too many tokens.
        """
        self._sizes = list(sizes)
        self.videos = videos
        self._plan = self._service.plan(sizes, self._options)

    def number_of_next(self) -> int:
        """Return the number of pictures of the next image."""
        return self._plan[len(self.images)].image.frames

    def add(self, rgb: ByteArray) -> bool:
        """Add the next picture. Return whether no pixels are needed any more."""
        index = self.pictures + len(self._parts)
        size = self._sizes[index]._replace(height=rgb.shape[0], width=rgb.shape[1])
        if size != self._sizes[index]:  # The orientation of its file has turned it.
            self._sizes[index] = size
            self._plan = self._service.plan(self._sizes, self._options)
        self._parts.append(rgb)
        prepared = self._plan[len(self.images)]
        image = prepared.image
        if len(self._parts) < image.frames:
            return False
        rgb = stacked(self._parts, image.height, image.width)
        prepared = prepared._replace(image=replace(image, rgb=rgb))
        ready = self._service.ready(prepared, self._part, self._salt)
        self._hold(ready.nbytes)
        self.images.append(ready)
        self.pictures += len(self._parts)
        self._parts.clear()
        return True

    def drop(self) -> None:
        """Forget the pictures whose pixels are still needed. They are added again later."""
        self._parts.clear()


def _key(image: DecodedImage, part: VisionPart | None, tower_digest: str) -> str:
    tower = tower_digest if part is None else f"{tower_digest} {part.digest}"
    digest = hashlib.sha256(f"{tower} {image.view} {image.scaled} {image.rgb.shape}".encode())
    digest.update(np.ascontiguousarray(image.rgb).data)
    return digest.hexdigest()
