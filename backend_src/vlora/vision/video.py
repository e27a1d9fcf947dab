"""Reading of one video file: which frames a request samples, and their upright RGB pixels.

- A file is MP4 or QuickTime (`mov`), Matroska or WebM, or an MPEG transport stream, with H.264,
  H.265, VP9, AV1 or Motion JPEG. It is recognized by its first bytes, and may be base64 as in
  `vlora.vision.pictures`. FFmpeg gets the bytes in memory and the name of the container format. It
  opens nothing else: other formats, such as playlists, and all protocols are switched off, and
  references to other files are not followed.
- What a header says about the number of frames is ignored: packets are counted. Of a truncated or
  corrupt file, the frames that can be decoded are used.
- A frame that cannot be decoded is replaced by the one that is shown before it, as in a player.
- Rotation and mirroring of a file's display matrix are applied. All frames have the size of the
  first one.

This module runs in a decoder process, which bounds its processor time and memory. Package `av` is
the extra `video`, and is imported where it is used.
"""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlora.errors import InvalidArgument
from vlora.request import FRAMES_PER_SECOND, Clip
from vlora.vision.pictures import ByteArray, check_size, unwrap

CONTAINERS = "MP4, MOV, Matroska, WebM and MPEG-TS"
# Codecs by FFmpeg's names, with their names in messages.
CODECS = {"h264": "H.264", "hevc": "H.265", "vp9": "VP9", "av1": "AV1", "mjpeg": "Motion JPEG"}
DECODERS = "h264,hevc,vp9,libdav1d,mjpeg"  # FFmpeg's decoders of these codecs.
MAX_PACKETS = 500_000  # Maximum number of packets of a file: over 2 hours at 60 frames a second.
# Maximum number of frames by which codecs send a frame earlier or later than it is shown.
MAX_REORDERED = 32


@dataclass(frozen=True)
class VideoSampling:
    """Which frames of a video file a request asks for. None leaves it to the checkpoint.

    num_frames: number of frames, or the maximum number of them if `fps` is given too.
    fps: sampled frames per second.
    do_sample_frames: False for all frames of the file. None samples if a number of frames or a rate
        is given, and otherwise as the checkpoint's video processor does.
    max_frames: maximum number of frames if they are sampled by a rate.
    limit: the server's limit, above which a request is refused ('max_video_frames').
    """

    num_frames: int | None = None
    fps: float | None = None
    do_sample_frames: bool | None = None
    max_frames: int | None = None
    limit: int = 768

    def asked(self, settings: Mapping[str, Any]) -> tuple[int | None, float | None] | None:
        """Return the number of frames and the rate that apply; None for all frames of a file.

        settings: settings of the checkpoint's video processor. What a request gives replaces both.
        """
        given = self.num_frames is not None or self.fps is not None
        samples = given or bool(settings.get("do_sample_frames"))
        if not (samples if self.do_sample_frames is None else self.do_sample_frames):
            return None
        if given:
            return self.num_frames, self.fps
        count = settings.get("num_frames")
        return count, settings.get("fps") if count is None else None

    def check_count(self, count: int, total: int) -> int:
        """Return the number of frames to sample, or raise InvalidArgument if it is too high."""
        if count > self.limit:
            raise InvalidArgument(
                f"{count} frames of its {total} would be used; the limit is {self.limit}"
                " ('max_video_frames'); sample fewer by 'fps' or 'num_frames'"
            )
        return count


@dataclass(frozen=True)
class VideoPlan:
    """The sampled frames of a file, before they are decoded.

    width, height: size in pixels of each frame, upright.
    indices: numbers of the sampled frames in the order in which they are shown, ascending. A number
        may occur several times.
    seconds: time of each sampled frame, `index / fps`, as transformers' `VideoMetadata.timestamps`.
    fps: frames per second, the average over the file.
    total: number of the file's frames.
    duration: total / fps, in seconds.
    """

    width: int
    height: int
    indices: tuple[int, ...]
    seconds: tuple[float, ...]
    fps: float
    total: int
    duration: float

    @property
    def clip(self) -> Clip:
        # The rate is that of transformers, from which positions follow.
        return Clip(self.seconds, len(self.indices) / self.total * self.fps)

    def with_indices(self, indices: Iterable[int]) -> VideoPlan:
        """Return the plan of the same file with other sampled frames."""
        numbers = tuple(map(int, indices))
        return replace(self, indices=numbers, seconds=tuple(i / self.fps for i in numbers))


def is_video(data: bytes) -> bool:
    """Return whether `data` begins like a file of an accepted format. Base64 text never does."""
    return _format_of(data) is not None


def plan_video(data: bytes, name: str, limit: int) -> VideoPlan:
    """Count the frames of a file, decode the first, and return a plan that samples none yet.

    data: the file, or base64 of it.
    name: name of the element in error messages.
    limit: maximum size of the file in bytes.

    Raises InvalidArgument, which names the element, and MemoryError if the process has no memory
    left.
    """
    with _opened(unwrap_video(data, name, limit), name) as (container, stream):
        total, first = 0, None
        for packet in _packets(container, stream, name):
            total += not packet.is_discard  # An edit list hides such frames.
            if first is None:
                first = next(_decoded(stream, packet), None)
        first = first or next(_decoded(stream, None), None)
        if first is None:
            raise InvalidArgument(f"{name} has no frame that can be decoded")
        rate = stream.average_rate or stream.guessed_rate or stream.base_rate
        fps = float(rate) if rate and rate > 0 else FRAMES_PER_SECOND
        is_transposed, _, _ = _orientation(first)
        height, width = first.height, first.width
        if is_transposed:
            height, width = width, height
    return VideoPlan(width, height, (), (), fps, total, total / fps)


def read_frames(data: bytes, name: str, plan: VideoPlan) -> Iterator[ByteArray]:
    """Yield the sampled frames of a file, uint8 [height, width, 3] each, contiguous.

    Raises the errors of `plan_video`.
    """
    with _opened(unwrap_video(data, name, len(data)), name) as (container, stream):
        shown, position = None, 0
        for number, frame in _numbered(stream, list(_packets(container, stream, name)), plan):
            while position < len(plan.indices) and plan.indices[position] <= number:
                is_found = plan.indices[position] == number or shown is None
                yield _to_rgb(frame if is_found else shown, plan)
                position += 1
            if position == len(plan.indices):
                return
            shown = frame
        if shown is None:
            raise InvalidArgument(f"{name} has no frame that can be decoded")
        for _ in plan.indices[position:]:
            yield _to_rgb(shown, plan)


def unwrap_video(data: bytes, name: str, limit: int) -> bytes:
    """Return the file in `data`, which may be base64. Raises InvalidArgument."""
    check_size(data, name, limit)
    return unwrap(data, name, limit, is_video, f"a video file ({CONTAINERS})")


def _format_of(data: bytes) -> str | None:
    """Return FFmpeg's name of the container format of a file; None if it is not accepted."""
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    # A box begins with its length. Base64 text does not begin with so small a byte.
    if data[:1] < b"\x20" and data[4:8] in _BOXES:
        return "mov"
    # Packets of 188 bytes begin with `G`, after 4 bytes of time on a disc. No packet is text.
    for start, size in ((0, 188), (4, 192)):
        if set(data[start : start + 3 * size : size]) == {ord("G")} and not data[:size].isascii():
            return "mpegts"
    return None


_BOXES = (b"ftyp", b"moov", b"mdat", b"moof", b"styp", b"sidx", b"wide", b"free", b"skip", b"pnot")


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[tuple[Any, Any]]:
    """Open a file, and yield its container and the video stream to decode."""
    try:
        import av
    except ImportError:
        raise InvalidArgument(
            f"{name} is a video file, which this server cannot read: package 'av' is missing;"
            " install vlora[video], or send 'frames'"
        ) from None
    options = {
        "format_whitelist": "mov,matroska,mpegts",
        "protocol_whitelist": "none",
        "codec_whitelist": DECODERS,
        "enable_drefs": "0",  # References of a QuickTime file to others.
    }
    with _ffmpeg_errors(name):
        container = av.open(
            io.BytesIO(data),
            format=_format_of(data),
            options=options,
            io_open=_refuse,
            metadata_errors="replace",
        )
        with container:
            yield container, _stream_of(container, name)


def _refuse(url: str, *_: object) -> None:
    raise PermissionError(f"a video file may not open {url}")


def _stream_of(container: Any, name: str) -> Any:
    """Return the video stream that is marked as default, or the first. Cover pictures are none."""
    from av.stream import Discard, Disposition

    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise InvalidArgument(f"{name} has no video stream")
    stream = next((s for s in streams if s.disposition & Disposition.default), streams[0])
    codec = stream.codec_context and stream.codec_context.codec.canonical_name
    if codec not in CODECS:
        accepted = ", ".join(CODECS.values())
        raise InvalidArgument(
            f"{name} has video of codec '{codec or 'unknown'}'; accepted: {accepted}"
        )
    # Several decoder processes run at a time, so more threads would not decode more files.
    stream.codec_context.thread_count = 1
    for other in container.streams:
        other.discard = Discard.default if other is stream else Discard.all
    return stream


def _packets(container: Any, stream: Any, name: str) -> Iterator[Any]:
    """Yield the packets of a stream, from the first key frame to the end or what cannot be read.

    Raises InvalidArgument if they are too many, or too long together for their file, whose header
    may list the same bytes many times.
    """
    import av

    count, left, is_begun = 0, 2 * container.size, False
    try:
        for packet in container.demux(stream):
            count, left = count + 1, left - packet.size
            if count > MAX_PACKETS or left < 0:
                raise InvalidArgument(
                    f"{name} lists more than {MAX_PACKETS} frames, or its bytes several times"
                )
            is_begun = is_begun or packet.is_keyframe
            if packet.size and is_begun:
                yield packet
    except MemoryError:
        raise
    except av.FFmpegError:
        return


def _numbered(stream: Any, packets: Sequence[Any], plan: VideoPlan) -> Iterator[tuple[int, Any]]:
    """Yield decoded frames with their numbers, ascending; all sampled ones that can be decoded.

    Numbers are found by time stamps, if each frame has one of its own. Then only the packets that
    the sampled frames depend on are decoded.
    """
    times = [packet.pts for packet in packets if not packet.is_discard]
    numbers = _numbers(times, stream.codec_context.has_b_frames)
    if numbers is None:
        yield from enumerate(_frames(stream, packets))
        return
    indices = set(plan.indices)
    sampled = {time for time, number in numbers.items() if number in indices}
    for frame in _sampled_frames(stream, packets, sampled):
        if frame.pts in numbers:
            yield numbers[frame.pts], frame


def _numbers(times: Sequence[int | None], is_reordered: bool) -> dict[int, int] | None:
    """Return the number of each frame by its time stamp; None if time stamps do not tell it.

    times: time stamps in the order in which the frames are sent.
    is_reordered: whether frames are shown in another order.
    """
    numbers = {time: i for i, time in enumerate(sorted({t for t in times if t is not None}))}
    if len(numbers) < len(times) or not times:
        return None
    moves = max(abs(numbers[time] - i) for i, time in enumerate(times) if time is not None)
    # Time stamps that are not reordered are wrong, and those of joined files may start again.
    return numbers if moves <= MAX_REORDERED and (moves or not is_reordered) else None


def _sampled_frames(stream: Any, packets: Sequence[Any], sampled: set[int]) -> Iterator[Any]:
    """Yield the frames with the time stamps `sampled`, among others, in order."""
    runs = _runs(packets, sampled)
    for first, last in runs:
        frames = _frames(stream, packets[first : last + 1], sampled)
        # Frames that are sent after a key frame but shown before it cannot be decoded from it.
        start = packets[first].pts if first else None
        usable = (
            one for one in frames if start is None or (one.pts is not None and one.pts >= start)
        )
        head = next(usable, None)
        if head is None or head.interlaced_frame or not (first == 0 or _is_whole(head, start)):
            # A packet may have only one field of a frame, and only a part of a picture may be
            # refreshed at a time. So the file must be decoded from its start.
            yield from _frames(stream, packets[: runs[-1][1] + 1])
            return
        yield head
        yield from frames


def _is_whole(frame: Any, time: int | None) -> bool:
    """Return whether a frame is the key frame of a time stamp, and depends on no other frame."""
    from av.video.frame import PictureType

    return bool(frame.pts == time and frame.pict_type == PictureType.I)


def _runs(packets: Sequence[Any], sampled: set[int]) -> list[tuple[int, int]]:
    """Return the (first, last) packets of each run that must be decoded for the sampled frames.

    A frame depends on no packet before the last key frame that is sent and shown before it. A frame
    that is sent after a key frame, but shown before it, may depend on an earlier one.
    """
    keys: list[int] = []
    runs: list[tuple[int, int]] = []
    for last, packet in enumerate(packets):
        if packet.is_keyframe and packet.pts is not None:
            keys.append(last)
        if packet.pts in sampled:
            shown = (key for key in reversed(keys) if packets[key].pts <= packet.pts)
            first = next(shown, 0)
            while runs and first <= runs[-1][1] + 1:
                first = min(first, runs.pop()[0])
            runs.append((first, last))
    return runs


def _frames(
    stream: Any, packets: Iterable[Any], sampled: Container[int] | None = None
) -> Iterator[Any]:
    """Yield the decoded frames of packets in the order in which they are shown.

    sampled: time stamps of the frames that are needed. Of the others, those on which no frame
        depends may be left out.
    """
    context = stream.codec_context
    context.flush_buffers()
    # Frames that H.265 calls unreferenced may be needed by those of a higher layer.
    needed = sampled if context.name == "h264" else None
    for packet in packets:
        is_needed = needed is None or packet.pts in needed
        context.skip_frame = "DEFAULT" if is_needed else "NONREF"
        yield from _decoded(stream, packet)
    yield from _decoded(stream, None)


def _decoded(stream: Any, packet: Any) -> Iterator[Any]:
    """Yield the frames that a packet completes, or, for None, the last ones. A corrupt packet has
    none.
    """
    import av

    try:
        yield from stream.codec_context.decode(packet)
    except MemoryError:
        raise
    except av.FFmpegError:
        return


def _orientation(frame: Any) -> tuple[bool, int, int]:
    """Return whether an upright frame's columns are rows of the coded one, and the steps (1 or -1)
    by which the result is read across and down. Other angles than multiples of 90 degrees are
    ignored.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is not None:
        # A pixel at (x, y) is shown at (a x + c y, b x + d y).
        a, b, _, c, d = np.sign(np.frombuffer(bytes(data), np.int32)[:5]).tolist()
        if a and d and not b and not c:
            return False, a, d
        if b and c and not a and not d:
            return True, c, b
    return False, 1, 1


def _to_rgb(frame: Any, plan: VideoPlan) -> ByteArray:
    """Return the upright pixels of a frame in the plan's size."""
    is_transposed, across, down = _orientation(frame)
    width, height = (plan.height, plan.width) if is_transposed else (plan.width, plan.height)
    rgb = frame.to_ndarray(format="rgb24", width=width, height=height, threads=1)
    if is_transposed:
        rgb = rgb.transpose(1, 0, 2)
    return np.ascontiguousarray(rgb[::down, ::across])


@contextmanager
def _ffmpeg_errors(name: str) -> Iterator[None]:
    """Raise InvalidArgument for the errors of PyAV, which may be of many types."""
    try:
        yield
    except (InvalidArgument, MemoryError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InvalidArgument(
            f"{name} is corrupt, truncated or of an unknown format: {reason}"
        ) from None
