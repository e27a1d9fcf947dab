"""Decoding of images in processes that can be killed, several requests at a time.

If a request exceeds its limit of processor time or memory, its decoder process ends and is
replaced, and the request gets an error. Each request needs a permit. So that a long request does
not delay others, it exchanges its regular permit for one for long requests, and its decoder later
gets a lower priority.

**Invariant:** the decoded pixels of all requests together are at most `max_batch_megapixels`. One
request at a time may exceed this limit, so that every request can finish.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from vlora import fork_server
from vlora.config import Limits
from vlora.errors import Internal, InvalidArgument, Unavailable, VLoraError
from vlora.fork_server import OUT_OF_MEMORY, OUT_OF_TIME, ForkServer, processor_seconds
from vlora.vision import decode_worker as worker
from vlora.vision.images import DecodedImage, Element, ImageRequest, PictureBudget
from vlora.vision.pictures import ByteArray

# Environment variables of the decoder processes.
SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # With these values, malloc reuses the memory of one image for the next. Otherwise, page faults
    # would take as long as decoding.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024**2),
}

# Function that is called with a picture's name, its width and its height in pixels. For large
# pictures, it is called before they are decoded, so that it can refuse them.
Accept = Callable[[str, int, int], None]
# Function that waits at most the given number of seconds, and returns whether the decoder has
# replied or ended.
HasReply = Callable[[float], bool]

# Maximum time for sending a file to a decoder. A decoder that does not read it was stopped.
TRANSFER_SECONDS = 30.0
# Seconds after which a request gives up its regular permit. Ordinary images take less.
LONG_SECONDS = 0.1
SLOW_SECONDS = 0.25  # Seconds after which the priority of a request's decoder is lowered.
# Increase of the niceness of a slow request's decoder. If a process of normal niceness uses the
# same core, the decoder gets about a tenth of the core's time.
SLOW_NICENESS = 10
# Interval at which a waiting request checks whether it has become long or slow.
POLL_SECONDS = 0.05
# Maximum number of these intervals in which a decoder replies nothing and uses no processor time.
# Such a decoder was stopped, for example by a signal. Intervals are counted, instead of time,
# because the encoder's process may have been stopped as well.
MAX_IDLE_POLLS = 600


class PictureRefusedError(Exception):
    """Raised if the decoder cannot read a file. The message says why."""


class DecodeProcess:
    """One decoder process, as the encoder's process sees it. Not thread-safe."""

    def __init__(self, process: int, connection: socket.socket) -> None:
        self.process = process
        self._connection = connection
        connection.settimeout(TRANSFER_SECONDS)

    def begin(self, limits: Limits) -> None:
        """Begin a request, to which the limits of processor time and memory apply."""
        data = worker.LIMITS.pack(
            limits.max_decode_seconds, limits.max_decode_bytes, limits.max_image_bytes
        )
        self._send(worker.BEGIN, b"", data)

    def end(self) -> None:
        """End a request. Processor time is not counted until the next one begins."""
        self._send(worker.END, b"", b"")

    def decode(
        self, element: Element, accept: Accept, wait: Callable[[HasReply], None]
    ) -> list[ByteArray]:
        """Return the pictures of one element, each uint8 [height, width, 3], read-only.

        accept: called for each picture. If it raises an error, the caller must stop the decoder.
        wait: called to wait for a reply of the decoder.

        Raises PictureRefusedError, ConnectionError if the decoder has ended, or TimeoutError if it
        does not take the data.
        """
        kind = worker.FRAME if element.is_frame else worker.IMAGE
        self._send(kind, element.name.encode(), element.data)
        pictures: list[ByteArray] = []
        # Pixels of the picture that has been accepted and is being decoded.
        accepted: int | None = None
        while True:
            wait(self.has_reply)
            reply, width, height, files = self._receive()
            number = f" (its picture {len(pictures)})" if pictures else ""
            if reply == worker.SIZE:
                accept(element.name + number, width, height)
                accepted = width * height
                fork_server.send(self._connection, worker.PROCEED)
            elif reply == worker.PIXELS and files:
                rgb = _map_pixels(files[0], width, height)
                if accepted is None:
                    accept(element.name + number, width, height)
                elif accepted != width * height:
                    raise ConnectionError("a decoder sent a picture of another size")
                accepted = None
                pictures.append(rgb)
            elif reply == worker.DONE:
                return pictures
            elif reply == worker.REFUSED and width <= worker.MAX_MESSAGE_BYTES:
                message = fork_server.receive(self._connection, width)
                raise PictureRefusedError(message.decode(errors="replace"))
            else:
                raise ConnectionError("a decoder sent an unknown reply")

    def has_reply(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds`. Return whether there is a reply, or the process has ended."""
        return bool(select.select([self._connection], [], [], seconds)[0])

    def close(self) -> None:
        self._connection.close()

    def _send(self, kind: bytes, name: bytes, data: bytes) -> None:
        fork_server.send(self._connection, worker.REQUEST.pack(kind, len(name), len(data)) + name)
        fork_server.send(self._connection, data)

    def _receive(self) -> tuple[bytes, int, int, list[int]]:
        try:
            reply, files = fork_server.receive_with_file(self._connection, worker.REPLY.size)
        except EOFError:
            raise ConnectionError("a decoder closed its connection") from None
        return *worker.REPLY.unpack(reply), files


def _map_pixels(file: int, width: int, height: int) -> ByteArray:
    """Return the pixels in a memory file, which stay mapped while the array lives. Close it."""
    try:
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) == worker.SEALS
        if not sealed or os.fstat(file).st_size != 3 * width * height:
            raise ConnectionError("a decoder sent pixels of a wrong size")
        # Before Linux 6.7, mmap refuses a shared mapping of a file that is sealed against writing.
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        pixels = mmap.mmap(file, 3 * width * height, flags=flags, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


class PixelPool:
    """Limits the number of decoded pixels that are not encoded yet. Thread-safe.

    limit: maximum number of pixels. One request at a time may exceed it.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._held: dict[object, int] = {}
        self._exceeding: object = None

    def reserve(self, owner: object, pixels: int, while_waiting: Callable[[], None]) -> None:
        """Wait until `owner` may hold this many additional pixels.

        while_waiting: called repeatedly. An error that it raises ends the wait.
        """
        with self._changed:
            while not self._may_reserve(owner, pixels):
                self._changed.wait(POLL_SECONDS)
                while_waiting()
            self._held[owner] = self._held.get(owner, 0) + pixels

    def release(self, owner: object) -> None:
        """Free all pixels of `owner`."""
        with self._changed:
            self._held.pop(owner, None)
            if self._exceeding is owner:
                self._exceeding = None
            self._changed.notify_all()

    def _may_reserve(self, owner: object, pixels: int) -> bool:
        if sum(self._held.values()) + pixels <= self._limit:
            return True
        if self._exceeding is None:
            self._exceeding = owner
        return self._exceeding is owner


class DecodedRequest(NamedTuple):
    """Decoded images of one request: independent images, followed by the frames of the clip.

    release: frees the pixels; to be called when the images are encoded.
    """

    images: list[DecodedImage]
    release: Callable[[], None]


OnDone = Callable[[DecodedRequest | Exception], None]


class _Permit:
    """Permit to decode one request, regular at first.

    process: id of the request's decoder.
    is_slow: whether the priority of the decoder was lowered.
    """

    def __init__(self, regular: threading.Semaphore, long: threading.Semaphore) -> None:
        self._regular = regular
        self._long = long
        self._is_long = False
        self.is_slow = False
        self.process: int | None = None

    def __enter__(self) -> _Permit:
        self._regular.acquire()
        self._since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        (self._long if self._is_long else self._regular).release()

    def wait(self, has_reply: HasReply) -> None:
        """Wait for a reply of the decoder, and call `check` regularly.

        Raises TimeoutError if the decoder does not run.
        """
        used, idle = -1.0, 0
        while not has_reply(POLL_SECONDS):
            self.check()
            before, used = used, processor_seconds(self.process or 0)
            idle = idle + 1 if used == before else 0
            if idle >= MAX_IDLE_POLLS:
                raise TimeoutError

    def check(self) -> None:
        """Exchange the regular permit after LONG_SECONDS, and lower the priority after
        SLOW_SECONDS.

        If no permit for long requests is free, neither happens.
        """
        seconds = time.monotonic() - self._since
        if not self._is_long and seconds >= LONG_SECONDS and self._long.acquire(blocking=False):
            self._is_long = True
            self._regular.release()
        if self._is_long and not self.is_slow and seconds >= SLOW_SECONDS and self.process:
            self.is_slow = True
            # This fails if the decoder has ended.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.process, os.nice(0) + SLOW_NICENESS)


class ImageDecoder:
    """Decodes the images of requests. Thread-safe.

    permits: number of regular permits. There are also twice as many permits for long requests.
    """

    def __init__(self, limits: Limits, permits: int = 2) -> None:
        self._processes = ForkServer(worker.__name__, SETTINGS)
        self._pixels = PixelPool(limits.max_batch_megapixels * 1e6)
        self._regular = threading.Semaphore(permits)
        self._long = threading.Semaphore(2 * permits)
        self._threads = ThreadPoolExecutor(3 * permits, thread_name_prefix="decode")
        self._idle: list[DecodeProcess] = []
        self._closed = False

    def submit(
        self, request: ImageRequest, on_done: OnDone, check: Callable[[], None] = lambda: None
    ) -> None:
        """Decode a request on another thread, or without elements on this one.

        on_done: called once, with the images or an error.
        check: called before decoding begins. If it raises an error, the request is not decoded.

        Raises Unavailable after `close`.
        """

        def run() -> None:
            try:
                result: DecodedRequest | Exception = self.decode(request, check)
            except Exception as error:
                result = error
            on_done(result)

        if not request.elements:
            run()
            return
        try:
            self._threads.submit(run)
        except RuntimeError:
            raise self._closed_error() from None

    def decode(
        self, request: ImageRequest, check: Callable[[], None] = lambda: None
    ) -> DecodedRequest:
        """Return the decoded images of a request.

        Raises InvalidArgument, which names the element and, for a limit, the value and the limit.
        """
        owner = object()
        budget = PictureBudget(request.limits)
        try:
            images = self._decode_elements(request, budget, owner, check)
            for i, frame in enumerate(request.raw):
                budget.add(f"frame {i} of 'frames_raw'", frame.shape[1], frame.shape[0])
                images.append(DecodedImage(np.ascontiguousarray(frame), is_video=True))
        except BaseException:
            self._pixels.release(owner)
            raise
        return DecodedRequest(images, partial(self._pixels.release, owner))

    def close(self) -> None:
        """End all processes. Requests that are being decoded get Unavailable."""
        self._closed = True
        self._processes.close()
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _decode_elements(
        self, request: ImageRequest, budget: PictureBudget, owner: object, check: Callable[[], None]
    ) -> list[DecodedImage]:
        if not request.elements:
            return []

        def accept(name: str, width: int, height: int) -> None:
            budget.add(name, width, height)
            self._pixels.reserve(owner, width * height, permit.check)

        images: list[DecodedImage] = []
        with _Permit(self._regular, self._long) as permit:
            check()
            decoder = self._take()
            permit.process = decoder.process
            element = request.elements[0]
            try:
                decoder.begin(request.limits)
                for element in request.elements:
                    pictures = decoder.decode(element, accept, permit.wait)
                    images += [DecodedImage(rgb, element.is_frame) for rgb in pictures]
                    permit.check()
            except ConnectionError:
                code = self._stop(decoder)
                raise self._why_it_ended(code, element.name, request.limits) from None
            except TimeoutError:
                self._stop(decoder)
                raise Unavailable(
                    f"the decoder of {element.name} does not run; try again"
                ) from None
            except PictureRefusedError as error:
                self._put_back(decoder, permit)
                raise InvalidArgument(str(error)) from None
            except BaseException:
                # The decoder may still send pictures that are not needed.
                self._stop(decoder)
                raise
            self._put_back(decoder, permit)
        return images

    def _take(self) -> DecodeProcess:
        with suppress(IndexError):
            while True:
                decoder = self._idle.pop()
                if not decoder.has_reply():
                    return decoder
                # An idle decoder sends nothing, so a reply means that it has ended.
                self._stop(decoder)
        try:
            return DecodeProcess(*self._processes.fork())
        except ConnectionError as error:
            if self._closed:
                raise self._closed_error() from None
            raise Unavailable(f"images cannot be decoded at present: {error}") from None

    def _put_back(self, decoder: DecodeProcess, permit: _Permit) -> None:
        try:
            decoder.end()
        except OSError:
            self._stop(decoder)
            return
        if permit.is_slow or self._closed:
            self._stop(decoder)
        else:
            self._idle.append(decoder)

    def _stop(self, decoder: DecodeProcess) -> int | None:
        """End a decoder; return its exit code, or None if it is unknown."""
        decoder.close()
        return self._processes.stop(decoder.process)

    def _why_it_ended(self, code: int | None, name: str, limits: Limits) -> VLoraError:
        if self._closed:
            return self._closed_error()
        if code == OUT_OF_TIME:
            return InvalidArgument(
                f"decoding the request's images took more than {limits.max_decode_seconds:g} s of"
                f" processor time up to {name}; the limit is"
                f" {limits.max_decode_seconds:g} ('max_decode_seconds')"
            )
        if code == OUT_OF_MEMORY:
            return InvalidArgument(
                f"decoding {name} takes more than {limits.max_decode_bytes} bytes of memory; the"
                f" limit is {limits.max_decode_bytes} ('max_decode_bytes')"
            )
        if code is None or code == -signal.SIGKILL or code >= 0:
            return Internal(f"the decoder of {name} ended unexpectedly, with exit code {code}")
        return InvalidArgument(
            f"{name} is corrupt: its decoder ended by signal {signal.Signals(-code).name}"
        )

    @staticmethod
    def _closed_error() -> Unavailable:
        return Unavailable("the server is shutting down")
