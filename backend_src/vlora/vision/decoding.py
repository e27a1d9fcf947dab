"""Decoding of images in processes that can be killed, several requests at a time.

If a request exceeds its limit of processor time or memory, its decoder process ends and is
replaced, and the request gets an error. Each request needs a permit. So that a long request does
not delay others, it exchanges its regular permit for one for long requests, and its decoder later
gets a lower priority. If there is none, it goes to the end of a queue of long requests.

The sizes of all pictures of a request are read before the first is decoded. Its images are decoded
one after another, and what the vision tower needs of each replaces its pixels.

**Invariant:** the decoded pixels of all requests together are at most `max_batch_megapixels`, or
the picture that is decoded alone. A part of it is for small pictures.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vlora import fork_server
from vlora.config import Limits
from vlora.errors import Internal, InvalidArgument, Unavailable, VLoraError
from vlora.fork_server import OUT_OF_MEMORY, OUT_OF_TIME, ForkServer, processor_seconds
from vlora.request import Clip
from vlora.vision import decode_worker as worker
from vlora.vision.images import Element, ImageRequest, PictureBudget, PictureSize
from vlora.vision.pictures import ByteArray
from vlora.vision.video import MAX_PACKETS, VideoPlan, VideoSampling

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
MIN_SECONDS = 0.01  # Processor time of a decoder whose request has used up its own.
SMALL_SHARE = 0.25  # Share of the pixels that is kept for small pictures.
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
            limits.max_decode_seconds,
            limits.max_decode_bytes,
            limits.max_image_bytes,
            limits.max_video_bytes,
        )
        self._send(worker.BEGIN, b"", data)

    def end(self) -> None:
        """End a request. Processor time is not counted until the next one begins."""
        self._send(worker.END, b"", b"")

    def measure(self, element: Element, accept: Accept, wait: Callable[[HasReply], None]) -> None:
        """Call `accept` with the size of each picture of one element, as `decode` does."""
        kind = worker.MEASURED[worker.FRAME if element.is_frame else worker.IMAGE]
        self._send(kind, element.name.encode(), element.data)
        count = 0
        while True:
            wait(self.has_reply)
            reply, width, height, _ = self._receive()
            if reply == worker.DONE:
                return
            self._check_reply(reply == worker.SIZE, reply, width)
            accept(_name_of(element, count), width, height)
            count += 1

    def measure_video(self, element: Element, wait: Callable[[HasReply], None]) -> VideoPlan:
        """Return the plan of a video file, of which no frames are sampled yet."""
        self._send(worker.MEASURED[worker.VIDEO], element.name.encode(), element.data)
        wait(self.has_reply)
        reply, width, height, _ = self._receive()
        self._check_reply(reply == worker.FILE, reply, width)
        content = fork_server.receive(self._connection, worker.CONTENT.size)
        total, fps = worker.CONTENT.unpack(content)
        wait(self.has_reply)
        self._check_reply(self._receive()[0] == worker.DONE, worker.DONE, 0)
        if not (width and height and 0 < total <= MAX_PACKETS and 0 < fps < math.inf):
            raise ConnectionError("a decoder sent an impossible description of a video file")
        return VideoPlan(width, height, (), (), fps, total, total / fps)

    def decode(
        self,
        element: Element,
        accept: Accept,
        wait: Callable[[HasReply], None],
        plan: VideoPlan | None = None,
    ) -> Iterator[ByteArray]:
        """Yield the pictures of one element, each uint8 [height, width, 3], read-only.

        accept: called for each picture. If it raises an error, the caller must stop the decoder.
        wait: called to wait for a reply of the decoder.
        plan: which frames of a video file to decode.

        Raises PictureRefusedError, ConnectionError if the decoder has ended, or TimeoutError if it
        does not take the data.
        """
        if plan is not None:
            numbers = np.array(plan.indices, worker.NUMBER)
            head = worker.PLAN.pack(plan.width, plan.height, len(numbers)) + numbers.tobytes()
            self._send(worker.VIDEO, element.name.encode(), element.data, head)
        else:
            kind = worker.FRAME if element.is_frame else worker.IMAGE
            self._send(kind, element.name.encode(), element.data)
        count = 0
        # Pixels of the picture that has been accepted and is being decoded.
        accepted: int | None = None
        while True:
            wait(self.has_reply)
            reply, width, height, files = self._receive()
            name = _name_of(element, count)
            if reply == worker.SIZE:
                accept(name, width, height)
                accepted = width * height
                fork_server.send(self._connection, worker.PROCEED)
            elif reply == worker.PIXELS and files:
                rgb = _map_pixels(files[0], width, height)
                if accepted is None:
                    accept(name, width, height)
                elif accepted != width * height:
                    raise ConnectionError("a decoder sent a picture of another size")
                accepted = None
                count += 1
                yield rgb
                del rgb
            elif reply == worker.DONE:
                return
            else:
                self._check_reply(False, reply, width)

    def _check_reply(self, expected: bool, reply: bytes, size: int) -> None:
        if reply == worker.REFUSED and size <= worker.MAX_MESSAGE_BYTES:
            message = fork_server.receive(self._connection, size)
            raise PictureRefusedError(message.decode(errors="replace"))
        if not expected:
            raise ConnectionError("a decoder sent an unknown reply")

    def has_reply(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds`. Return whether there is a reply, or the process has ended."""
        return bool(select.select([self._connection], [], [], seconds)[0])

    def close(self) -> None:
        self._connection.close()

    def _send(self, kind: bytes, name: bytes, data: bytes, head: bytes = b"") -> None:
        header = worker.REQUEST.pack(kind, len(name), len(head) + len(data))
        fork_server.send(self._connection, header + name + head)
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


def _name_of(element: Element, number: int) -> str:
    return element.name + (f" (its picture {number})" if number else "")


class PixelPool:
    """Limits the number of decoded pixels in memory. Thread-safe.

    limit: maximum number of pixels. Large pictures together have at most `1 - SMALL_SHARE` of it,
        or one of them has more. Since small ones wait for small ones only, they wait briefly.
    """

    def __init__(self, limit: float) -> None:
        # By whether pictures are small.
        self._limits = {True: SMALL_SHARE * limit, False: (1 - SMALL_SHARE) * limit}
        self._held = {True: 0, False: 0}
        self._waiting: dict[bool, list[object]] = {True: [], False: []}
        self._changed = threading.Condition()

    def reserve(self, pixels: int, while_waiting: Callable[[], None]) -> None:
        """Wait until so many additional pixels may be held, after those that waited before.

        while_waiting: called repeatedly. An error that it raises ends the wait.
        """
        small, turn = pixels <= worker.SMALL_PIXELS, object()
        queue = self._waiting[small]
        with self._changed:
            queue.append(turn)
            try:
                while queue[0] is not turn or (
                    self._held[small] and self._held[small] + pixels > self._limits[small]
                ):
                    self._changed.wait(POLL_SECONDS)
                    while_waiting()
                self._held[small] += pixels
            finally:
                queue.remove(turn)
                self._changed.notify_all()

    def release(self, pixels: int) -> None:
        with self._changed:
            self._held[pixels <= worker.SMALL_PIXELS] -= pixels
            self._changed.notify_all()


class Pictures(Protocol):
    """Takes the pictures of one request, in order: images, then the frames of the clip."""

    pictures: int  # Number of pictures that need not be decoded again.

    def sample(self, sampling: VideoSampling, total: int, fps: float) -> Sequence[int]:
        """Return the numbers of the frames to use of a video file. May raise InvalidArgument."""

    def plan(self, sizes: Sequence[PictureSize], videos: Sequence[Clip] = ()) -> None:
        """Take the sizes of all pictures, before they are added. May raise InvalidArgument."""

    def number_of_next(self) -> int:
        """Return the number of pictures until no pixels are needed any more."""

    def add(self, rgb: ByteArray) -> bool:
        """Take the next picture. Return whether no pixels are needed any more."""

    def drop(self) -> None:
        """Forget the pictures that are still needed. They are added again later."""


Begin = Callable[[], Pictures]
OnDone = Callable[[BaseException | None], None]


class _Interrupted(Exception):
    """Raised if a long request must wait for others."""


@dataclass(eq=False)
class _Job:
    """A request that is decoded.

    sizes, counts: sizes of all pictures, and numbers of pictures of each element, once measured.
    plans: plans of the video files by `Element.clip`, once measured.
    seconds: processor time that decoders of its earlier turns have used.
    since: time at which its first turn began.
    is_queued: whether it was interrupted, and needs a permit for long requests.
    """

    request: ImageRequest
    begin: Begin
    on_done: OnDone
    sizes: list[PictureSize] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    plans: dict[int, VideoPlan] = field(default_factory=dict)
    seconds: float = 0.0
    since: float = 0.0
    is_queued: bool = False


class _Permit:
    """Permit to decode one request, regular at first.

    process: id of the request's decoder.
    is_slow: whether the priority of the decoder was lowered.
    """

    def __init__(self, job: _Job, regular: threading.Semaphore, long: threading.Semaphore) -> None:
        self._job = job
        self._regular = regular
        self._long = long
        self._is_long = job.is_queued
        self.is_slow = False
        self.process: int | None = None

    def __enter__(self) -> _Permit:
        (self._long if self._is_long else self._regular).acquire()
        self._job.since = self._job.since or time.monotonic()
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

        Raises _Interrupted if no permit for long requests is free.
        """
        seconds = time.monotonic() - self._job.since
        if not self._is_long and seconds >= LONG_SECONDS:
            if not self._long.acquire(blocking=False):
                raise _Interrupted
            self._is_long = True
            self._regular.release()
        if not self.is_slow and seconds >= SLOW_SECONDS and self.process:
            self.is_slow = True
            # This fails if the decoder has ended.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.process, os.nice(0) + SLOW_NICENESS)


class _Turn:
    """Decodes pictures of a request until it ends or must wait for others.

    name: name of the element that is being decoded.
    """

    def __init__(self, job: _Job, pictures: Pictures, permit: _Permit, pixels: PixelPool) -> None:
        self._job = job
        self._pictures = pictures
        self._permit = permit
        self._pool = pixels
        self._held = 0
        self._budget = PictureBudget(job.request.limits)
        self._elements = job.request.elements
        # A single image is decoded as soon as its own size is known.
        self._is_measured = len(job.request) > 1 or not self._elements or self._elements[0].is_frame
        self.name = "the request"

    def measure(self, decoder: DecodeProcess | None) -> None:
        """Read the sizes of all pictures, unless that is done."""
        job, raw = self._job, self._job.request.raw
        if job.counts or not self._is_measured:
            return
        sizes = []

        def accept(name: str, width: int, height: int) -> None:
            self._budget.add(name, width, height)
            sizes.append(PictureSize(height, width, element.is_frame, element.clip))

        counts, plans = [], dict[int, VideoPlan]()
        for element in self._elements:
            assert decoder is not None
            self.name = element.name
            before = len(sizes)
            if element.is_video:
                plan = plans[element.clip] = self._plan(decoder, element)
                size = PictureSize(plan.height, plan.width, True, element.clip)
                sizes += [size] * len(plan.indices)
            else:
                decoder.measure(element, accept, self._permit.wait)
            counts.append(len(sizes) - before)
        for i, frame in enumerate(raw):
            self._budget.add(f"frame {i} of 'frames_raw'", frame.shape[1], frame.shape[0])
            sizes.append(PictureSize(frame.shape[0], frame.shape[1], True, job.request.videos))
        frames = Counter(size.clip for size in sizes if size.is_frame)
        videos = [
            plans[i].clip if i in plans else Clip.of_list(frames[i])
            for i in range(job.request.videos)
        ]
        self._pictures.plan(sizes, videos)
        job.sizes, job.counts, job.plans = sizes, counts, plans

    def _plan(self, decoder: DecodeProcess, element: Element) -> VideoPlan:
        """Choose the frames to use of a video file."""
        request = self._job.request
        plan = decoder.measure_video(element, self._permit.wait)
        options = request.options
        sampling = VideoSampling(
            options.num_frames,
            options.fps,
            options.do_sample_frames,
            options.max_frames,
            request.limits.max_video_frames,
        )
        try:
            plan = plan.with_indices(self._pictures.sample(sampling, plan.total, plan.fps))
        except InvalidArgument as error:
            raise InvalidArgument(f"{element.name}: {error.message}") from None
        self._budget.add_video(element.name, plan.width, plan.height, len(plan.indices))
        return plan

    def decode(self, decoder: DecodeProcess) -> None:
        """Decode the pictures that earlier turns have not."""
        first = 0
        for element, count in zip(self._elements, self._job.counts or [1], strict=True):
            done = self._pictures.pictures - first
            first += count
            if done < count:
                self.name = element.name
                self._decode_element(decoder, element, count, done)

    def _decode_element(
        self, decoder: DecodeProcess, element: Element, count: int, done: int
    ) -> None:
        plan = self._job.plans[element.clip] if element.is_video else None
        # The frames of earlier turns need not be decoded again.
        start = 0 if plan is None else done
        if plan is not None:
            plan = plan.with_indices(plan.indices[start:])
        found = decoder.decode(element, self._accept, self._permit.wait, plan)
        for number in range(start, count):
            if self._is_measured and number >= done:
                self._reserve_next()
            rgb = next(found, None)
            if rgb is None:
                raise InvalidArgument(f"{element.name} is corrupt: it lacks picture {number}")
            if number >= done:
                self.add(rgb)
                self._permit.check()
        if next(found, None) is not None:
            raise InvalidArgument(f"{element.name} is corrupt: it has more than {count} pictures")

    def _accept(self, name: str, width: int, height: int) -> None:
        if not self._is_measured:
            self._budget.add(name, width, height)
            self._pictures.plan([PictureSize(height, width, False)])
            self._reserve(width * height)

    def _reserve_next(self) -> None:
        """Reserve pixels for the next picture and those that are needed together with it."""
        if not self._held:
            first = self._pictures.pictures
            sizes = self._job.sizes[first : first + self._pictures.number_of_next()]
            self._reserve(sum(size.width * size.height for size in sizes))

    def _reserve(self, pixels: int) -> None:
        self._pool.reserve(pixels, self._permit.check)
        self._held = pixels

    def add(self, rgb: ByteArray) -> None:
        if self._pictures.add(rgb):
            self._release()

    def add_raw(self) -> None:
        done = self._pictures.pictures - sum(self._job.counts)
        for frame in self._job.request.raw[max(done, 0) :]:
            self.add(np.ascontiguousarray(frame))

    def close(self) -> None:
        """Release the pixels of pictures that are not complete."""
        self._pictures.drop()
        self._release()

    def _release(self) -> None:
        if self._held:
            self._pool.release(self._held)
            self._held = 0


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
        self._long_threads = ThreadPoolExecutor(2 * permits, thread_name_prefix="decode-long")
        self._idle: list[DecodeProcess] = []
        self._closed = False

    def submit(self, request: ImageRequest, begin: Begin, on_done: OnDone) -> None:
        """Decode a request on another thread.

        begin: called before decoding begins, or goes on. It returns where the pictures go. If it
            raises an error, the request is not decoded.
        on_done: called once, with None after the last picture, or with an error. The error is
            InvalidArgument, which names the element and, for a limit, the value and the limit,
            another VLoraError, or one of `begin` or of `Pictures`.

        Raises Unavailable after `close`.
        """
        self._submit(self._threads, _Job(request, begin, on_done))

    def close(self) -> None:
        """End all processes. Requests that are being decoded get Unavailable."""
        self._closed = True
        self._processes.close()
        for threads in (self._threads, self._long_threads):
            threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _submit(self, threads: ThreadPoolExecutor, job: _Job) -> None:
        try:
            threads.submit(self._run, job)
        except RuntimeError:
            raise self._closed_error() from None

    def _run(self, job: _Job) -> None:
        error: BaseException | None = None
        try:
            try:
                with _Permit(job, self._regular, self._long) as permit:
                    self._decode(job, permit)
            except _Interrupted:
                job.is_queued = True
                self._submit(self._long_threads, job)
                return
        except BaseException as failure:  # A panic of a Rust library is not an Exception.
            error = failure
        job.on_done(error)

    def _decode(self, job: _Job, permit: _Permit) -> None:
        turn = _Turn(job, job.begin(), permit, self._pixels)
        try:
            if job.request.elements:
                self._decode_elements(job, turn, permit)
            else:
                turn.measure(None)
            turn.add_raw()
        finally:
            turn.close()

    def _decode_elements(self, job: _Job, turn: _Turn, permit: _Permit) -> None:
        limits = job.request.limits
        decoder = self._take()
        permit.process = decoder.process
        before = processor_seconds(decoder.process)
        try:
            left = max(job.request.max_seconds - job.seconds, MIN_SECONDS)
            decoder.begin(replace(limits, max_decode_seconds=left))
            turn.measure(decoder)
            turn.decode(decoder)
        except ConnectionError:
            code = self._stop(decoder)
            raise self._why_it_ended(code, turn.name, job.request) from None
        except TimeoutError:
            self._stop(decoder)
            raise Unavailable(f"the decoder of {turn.name} does not run; try again") from None
        except PictureRefusedError as error:
            self._put_back(decoder, permit)
            raise InvalidArgument(str(error)) from None
        except BaseException:
            job.seconds += max(processor_seconds(decoder.process) - before, 0.0)
            # The decoder may still send pictures that are not needed.
            self._stop(decoder)
            raise
        self._put_back(decoder, permit)

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

    def _why_it_ended(self, code: int | None, name: str, request: ImageRequest) -> VLoraError:
        limits = request.limits
        if self._closed:
            return self._closed_error()
        if code == OUT_OF_TIME:
            seconds = request.max_seconds
            key = "max_video_seconds" if request.has_files else "max_decode_seconds"
            return InvalidArgument(
                f"decoding the request's images took more than {seconds:g} s of processor time up"
                f" to {name}; the limit is {seconds:g} ('{key}')"
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
