"""The last compressed packets of a camera, of which clips are made without encoding again."""

from __future__ import annotations

import io
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from threading import Lock
from typing import Any

# Codecs that an MP4 may hold and browsers or players know.
CODECS = ("h264", "hevc", "av1", "vp9", "mpeg4", "mjpeg")


@dataclass(frozen=True)
class _Packet:
    """A packet and its Unix time. A clip has packets of one header only."""

    at: float
    header: bytes
    data: bytes
    is_key: bool
    pts: int
    dts: int
    time_base: Fraction


class PacketRing:
    """Packets of the last seconds, bounded in seconds and bytes.

    One thread adds packets, and others make clips.
    """

    def __init__(self, seconds: float, max_bytes: float) -> None:
        self._seconds, self._max_bytes = seconds, max_bytes
        self._packets: deque[_Packet] = deque()
        self._bytes = 0
        self._lock = Lock()
        self._header = b""

    def begin(self) -> None:
        """Start a new series of packets, after a connection or a change of resolution."""
        self._header = b""

    def add(self, packet: Any, at: float) -> None:
        """Append a packet of Unix time `at`, unless a series has had no key packet yet."""
        if not self._max_bytes or packet.pts is None or packet.stream.codec.name not in CODECS:
            return
        if not self._header:
            if not packet.is_keyframe:
                return
            self._header = _header_of(packet)
        dts = packet.pts if packet.dts is None else packet.dts
        kept = _Packet(
            at, self._header, bytes(packet), packet.is_keyframe, packet.pts, dts, packet.time_base
        )
        with self._lock:
            self._packets.append(kept)
            self._bytes += len(kept.data)
            while self._packets and (
                self._packets[0].at < at - self._seconds or self._bytes > self._max_bytes
            ):
                self._bytes -= len(self._packets.popleft().data)

    def clip(self, begin: float, end: float) -> bytes | None:
        """Return an MP4 of these Unix seconds, from the key packet before them; None without any.

        If they include a new connection, the clip has what came after it.
        """
        with self._lock:
            packets = [packet for packet in self._packets if packet.at <= end]
        if not packets:
            return None
        last = packets[-1].header
        packets = [packet for packet in packets if packet.header is last]
        keys = [i for i, packet in enumerate(packets) if packet.is_key]
        if not keys or packets[-1].at < begin:
            return None
        first = max((i for i in keys if packets[i].at <= begin), default=keys[0])
        return _remuxed(packets[first:])


def _header_of(packet: Any) -> bytes:
    """Return a file with the stream's parameters. NUT keeps them as they are, unlike MP4."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="nut") as container:
        stream = container.add_stream_from_template(packet.stream)
        container.mux(_copy(bytes(packet), 0, 0, packet.time_base, True, stream))
    return buffer.getvalue()


def _remuxed(packets: list[_Packet]) -> bytes:
    import av

    buffer = io.BytesIO()
    start, last = packets[0].dts, -1
    with (
        av.open(io.BytesIO(packets[0].header), format="nut") as template,
        av.open(buffer, "w", format="mp4") as container,
    ):
        stream = container.add_stream_from_template(template.streams.video[0])
        for one in packets:
            # Cameras repeat time stamps after loss, and a muxer needs rising ones.
            last = max(one.dts - start, last + 1)
            pts = max(one.pts - start, last)
            container.mux(_copy(one.data, pts, last, one.time_base, one.is_key, stream))
    return buffer.getvalue()


def _copy(data: bytes, pts: int, dts: int, base: Fraction, is_key: bool, stream: Any) -> Any:
    from av import Packet

    packet = Packet(data)
    packet.pts, packet.dts, packet.time_base = pts, dts, base
    packet.is_keyframe, packet.stream = is_key, stream
    return packet
