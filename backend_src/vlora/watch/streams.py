"""Video by FFmpeg's libraries: cameras of a network, and files.

**What may be opened.** A playlist or a file can name others. So each kind of source has its list of
protocols and formats: what a network sends never opens a file, and a file never opens an address.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import av

from vlora.watch.chunks import Frame
from vlora.watch.clock import unix_time
from vlora.watch.config import Camera
from vlora.watch.counts import StreamCounts
from vlora.watch.pixels import Pixels, View, of_video
from vlora.watch.ring import PacketRing
from vlora.watch.sources import SourceError

FILES = "mov,matroska,avi,mpegts,mpeg,flv,ogg,mjpeg"
MULTIPART = "mpjpeg"  # Pictures over HTTP, whose time stamps FFmpeg invents.
# To find out the frame rate, which nothing here needs, takes 1.4 s more of a camera.
QUICK = {"fpsprobesize": "0"}
# Pictures of 8K have 33 million pixels. A camera with larger ones could take all memory or time.
LIMITS = {"max_pixels": str(40_000_000)}
MIN_OPEN_SECONDS = 4.0  # Minimum time-out of opening a stream.
DEVICE = "/dev/video"
DEVICE_FORMAT = "video4linux2,v4l2"

# Packets and bytes that wait for decoding; at more, they are decoded, wanted or not.
MAX_PENDING, MAX_PENDING_BYTES = 600, 16 << 20
# So long after damage, pictures are used again. Streams with intra refresh have one key frame only.
MAX_DAMAGE_SECONDS = 10.0
# A step of the time stamps by more than this is a new beginning of the stream.
MAX_STEP_SECONDS = 10.0
MAX_BACK_SECONDS = 1.0
# A live stream may be so late; a longer period of a camera allows more.
MIN_LATE_SECONDS = 2.0
# A packet that took longer to arrive was waited for, so no older ones are queued.
WAITED_SECONDS = 0.005
# Packets are read at most so fast, beyond those of some seconds that may come at once. Cameras send
# some hundred per second. More, such as endless empty pictures, would take a core.
MAX_PACKETS_PER_SECOND, MAX_AHEAD_SECONDS = 1000, 5.0
# How much faster than ours a camera's clock may run, as a share. Crystals differ by a tenth of it.
MAX_DRIFT = 1e-3


class LazyDecoder:
    """Decodes only what leads to frames that are wanted.

    Packets wait until one has a time that is wanted. A key packet before that time makes those that
    wait needless: all their frames come before it.

    Frames that FFmpeg calls corrupt, and those that are predicted from them, are left out, up to
    the next whole key frame. FFmpeg does not notice that all packets of a frame are lost.
    """

    def __init__(self, context: Any, counts: StreamCounts) -> None:
        self._context, self._counts = context, counts
        self._pending: list[Any] = []
        self._bytes = 0
        self._has_skipped = False
        self._has_key = False  # Some cameras never have a key frame that FFmpeg calls whole.
        self._damaged_until = -math.inf

    def take(self, packet: Any, at: float, wanted: float) -> list[Any]:
        """Return decoded frames: all at or after the Unix time `wanted`, and some before it."""
        if packet.is_keyframe and at <= wanted and self._pending:
            self._has_skipped = True
            self._pending.clear()
            self._bytes = 0
        self._pending.append(packet)
        self._bytes += packet.size
        is_full = len(self._pending) > MAX_PENDING or self._bytes > MAX_PENDING_BYTES
        return self._decode(at) if at >= wanted or is_full else []

    def finish(self) -> list[Any]:
        """Return the frames that are left at the end of the stream."""
        return [*self._decode(-math.inf), *self._try(None, -math.inf)]

    def _decode(self, at: float) -> list[Any]:
        packets, self._pending, self._bytes = self._pending, [], 0
        if self._has_skipped:
            self._context.flush_buffers()
            self._has_skipped = False
        return [frame for packet in packets for frame in self._try(packet, at)]

    def _try(self, packet: Any, at: float) -> list[Any]:
        try:
            frames = self._context.decode(packet)
        except av.error.FFmpegError:  # A lost packet damages a few frames, not the stream.
            self._note_damage(at)
            self._counts.damaged += 1
            return []
        return [frame for frame in frames if self._is_whole(frame, at)]

    def _is_whole(self, frame: Any, at: float) -> bool:
        if frame.is_corrupt:
            self._note_damage(at)
        elif frame.key_frame:
            self._has_key, self._damaged_until = True, -math.inf
        is_whole = not frame.is_corrupt and at >= self._damaged_until
        self._counts.damaged += not is_whole
        return is_whole

    def _note_damage(self, at: float) -> None:
        if self._has_key:
            self._damaged_until = at + MAX_DAMAGE_SECONDS


class StreamClock:
    """Unix times of a stream's time stamps, which start anywhere.

    The packet with the shortest way tells the offset. is_live: whether packets come when they were
    recorded; otherwise the first one tells it.
    """

    def __init__(
        self, is_live: bool, counts: StreamCounts, now: Callable[[], float] = unix_time
    ) -> None:
        self._is_live, self._counts, self._now = is_live, counts, now
        self._offset: float | None = None
        self._read_at = now()
        self._last = 0.0  # Time stamp in seconds of the last packet.

    def unix(self, seconds: float | None) -> float:
        """Return the Unix time of a time stamp; the present time if there is none."""
        now = self._now()
        if seconds is None:
            return now if self._offset is None or self._is_live else self._offset + self._last
        step = seconds - self._last
        if self._offset is None:
            self._offset = now - seconds
        elif not -MAX_BACK_SECONDS <= step <= MAX_STEP_SECONDS:
            self._counts.gaps += 1
            self.restart(seconds)
        elif self._is_live:
            drifted = self._offset + MAX_DRIFT * max(0.0, now - self._read_at)
            self._offset = min(drifted, now - seconds)
        self._last, self._read_at = seconds, now
        return self._offset + seconds

    def place(self, seconds: float) -> float:
        """Return the Unix time of a time stamp of a packet that was read before."""
        return (self._offset or 0.0) + seconds

    def restart(self, seconds: float) -> None:
        """Let the time stamp be that of the present time, or follow the last one of a file."""
        assert self._offset is not None
        now = self._now() if self._is_live else self._offset + self._last
        self._offset = now - seconds
        self._last = seconds


class VideoStream:
    """An open video stream.

    A stream that is read too slowly would be seen ever later. So when its packets come `max_late`
    seconds late, they are not decoded until one has to be waited for.
    """

    def __init__(self, camera: Camera, url: str, ring: PacketRing, counts: StreamCounts) -> None:
        self._camera, self._ring, self._counts = camera, ring, counts
        self._max_late = max(MIN_LATE_SECONDS, camera.period)
        self._container = _open(camera, url)
        if not self._container.streams.video:
            self.close()
            raise SourceError(f"{camera.shown_url} has no video stream")
        self._stream = self._container.streams.video[0]
        format = self._container.format.name
        # An HLS playlist comes in pieces of seconds, at once.
        self._is_live = self._container.duration is None and format != "hls"
        self._is_timed = self._is_live or camera.pace == "real"
        self._has_times = format != MULTIPART
        self._clock = StreamClock(self._is_live, counts)
        if self._is_live:
            # With a thread per core and camera, dozens of cameras would be hundreds of threads.
            self._stream.codec_context.thread_count = 1
        self._stream.codec_context.options = LIMITS
        self._decoder = LazyDecoder(self._stream.codec_context, counts)
        self._size: tuple[int, int] | None = None
        ring.begin()

    def close(self) -> None:
        self._container.close()

    def frames(self, wanted: Callable[[], float]) -> Iterator[Frame]:
        try:
            for packet, at, is_late in self._packets():
                self._ring.add(packet, at)
                until = math.inf if is_late else wanted()
                for frame in self._decoder.take(packet, at, until):
                    yield self._frame(frame, at)
            for frame in self._decoder.finish():
                yield self._frame(frame, self._clock.unix(None))
        except av.error.FFmpegError as error:
            raise SourceError(_reason(error, self._camera)) from None

    def _packets(self) -> Iterator[tuple[Any, float, bool]]:
        """Yield packets, their Unix times, and whether they come too late to be decoded."""
        is_late = False
        asked = seen = due = time.monotonic()
        for packet in self._container.demux():
            now = time.monotonic()
            if packet.stream is self._stream and packet.size:
                has_time = self._has_times and packet.pts is not None
                seconds = float(packet.pts * packet.time_base) if has_time else None
                at = self._clock.unix(seconds)
                if is_late and self._has_caught_up(at, now - asked):
                    is_late = False
                    if self._is_live and seconds is not None:
                        self._clock.restart(seconds)
                        at = self._clock.place(seconds)
                elif not is_late and self._is_timed and unix_time() - at > self._max_late:
                    is_late = True
                    self._counts.gaps += 1
                yield packet, at, is_late
                seen = time.monotonic()
            elif now - seen > self._camera.timeout_seconds and self._is_live:
                # Sound alone does not end the time-out of FFmpeg.
                raise SourceError(f"{self._camera.shown_url}: no video for {now - seen:.1f} s")
            due = max(due, now) + 1 / MAX_PACKETS_PER_SECOND
            if self._is_timed and due > now + MAX_AHEAD_SECONDS:
                time.sleep(due - now - MAX_AHEAD_SECONDS)
            asked = time.monotonic()

    def _has_caught_up(self, at: float, waited: float) -> bool:
        """Return whether no older packets are queued behind one that had to be waited for."""
        return waited > WAITED_SECONDS if self._is_live else at >= unix_time()

    def _frame(self, frame: Any, packet_at: float) -> Frame:
        # The first frame of a stream may have no time stamp.
        # `frame.time` lacks the time base for the last frames, which the end of the stream brings.
        has_time = self._has_times and frame.pts is not None
        seconds = float(frame.pts * self._stream.time_base) if has_time else 0.0
        at = self._clock.place(seconds) if has_time else packet_at
        size = (frame.width, frame.height)
        if self._size not in (None, size):
            self._ring.begin()
        self._size = size
        return Frame(at, size, partial(self._pixels, frame))

    def _pixels(self, frame: Any, view: View) -> Pixels:
        try:
            return of_video(frame, view)
        except av.error.FFmpegError as error:
            raise SourceError(_reason(error, self._camera)) from None


def _open(camera: Camera, url: str) -> Any:
    """Return the container of a stream or a file. Raises SourceError."""
    options, format = _options(camera)
    options |= LIMITS
    # FFmpeg reads the first seconds of a stream to open it.
    timeout = (max(MIN_OPEN_SECONDS, 2 * camera.timeout_seconds), camera.timeout_seconds)
    try:
        return av.open(url, format=format, options=options, timeout=timeout)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise SourceError(_reason(error, camera)) from None


def _options(camera: Camera) -> tuple[dict[str, str], str | None]:
    """Return FFmpeg's options for a camera, and the name of its format if it is not found out."""
    if camera.scheme.startswith("rtsp"):
        lists = {"protocol_whitelist": "rtsp,rtsps,rtp,udp,tcp,tls,srtp"}
        lists["format_whitelist"] = "rtsp,rtp,sdp,mpegts"
        return {"rtsp_transport": camera.transport, **QUICK, **lists}, None
    if camera.scheme:
        lists = {"protocol_whitelist": "http,https,tcp,tls,crypto"}
        return {**QUICK, **lists, "format_whitelist": f"hls,{MULTIPART},webvtt,{FILES}"}, None
    if camera.url.startswith(DEVICE):
        return {}, DEVICE_FORMAT
    return {"protocol_whitelist": "file", "format_whitelist": FILES}, None


def _reason(error: Exception, camera: Camera) -> str:
    """Return a sentence without the URL that libav puts into its errors."""
    text = getattr(error, "strerror", None) or type(error).__name__
    if "Input/output error" in text or isinstance(error, av.error.ExitError):
        text = f"nothing arrived for {camera.timeout_seconds:g} s, or the connection broke"
    return f"{camera.shown_url}: {text}"
