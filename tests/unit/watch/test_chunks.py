"""Tests of cutting streams into chunks: times, gaps, lazy decoding, the gate, and who yields."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.support.cameras import write_video
from vlora.watch.admission import Admission
from vlora.watch.chunks import Chunk, Chunker, Frame
from vlora.watch.config import Gate
from vlora.watch.counts import StreamCounts
from vlora.watch.gate import CELLS, SceneGate, small_grey
from vlora.watch.pixels import WHOLE, Region, Shot, View, of_array
from vlora.watch.sources import SyntheticCamera


def frame(at: float, value: int = 0, size: tuple[int, int] = (4, 4)) -> Frame:
    pixels = np.full((size[1], size[0], 3), value, np.uint8)
    return Frame(at, size, lambda view: of_array(pixels, view))


def cut(
    times: list[float], seconds: float = 1.0, frames: int = 2, period: float = 1.0
) -> tuple[list[list[int]], int]:
    """Return the indices of the frames of each chunk, and the number of broken chunks."""
    chunker = Chunker(seconds, frames, period, View(), lambda pixels: int(pixels[0, 0, 0]))
    chunks = [one for index, at in enumerate(times) for one in chunker.take(frame(at, index))]
    return [one.frames for one in chunks + chunker.finish()], chunker.broken


TENTHS = [index / 10 for index in range(40)]


@pytest.mark.parametrize(
    ("times", "shape", "chunks", "broken"),
    [
        (TENTHS[:25], (1.0, 2, 1.0), [[0, 5], [10, 15], [20, 24]], 0),
        (TENTHS[:13], (1.0, 2, 1.0), [[0, 5]], 0),  # The rest is too short.
        (TENTHS[:3], (1.0, 2, 1.0), [[0, 2]], 0),  # But it is all there is.
        (TENTHS, (0.5, 1, 1.5), [[0], [15], [30]], 0),
        ([0, 1, 2, 3.0], (1.0, 3, 1.0), [[0, 0, 0], [1, 1, 1], [2, 2, 2]], 0),  # slow
        ([0, 0.1, 5.0, 5.6], (1.0, 2, 1.0), [[2, 3]], 1),  # a gap
        ([0, 0.5, 5.3, 5.6, 6, 6.5], (1.0, 2, 1.0), [[0, 1], [2, 3], [4, 5]], 0),  # in step
    ],
)
def test_a_chunk_has_the_first_frames_at_evenly_spaced_times(
    times: list[float], shape: tuple[float, int, float], chunks: list[list[int]], broken: int
) -> None:
    assert cut(times, *shape) == (chunks, broken)


def test_another_size_starts_another_chunk() -> None:
    chunker = Chunker(1.0, 2, 1.0, View(), lambda pixels: pixels.shape)
    assert chunker.take(frame(0.0)) == []
    assert chunker.take(frame(0.6, size=(8, 4))) == []
    (chunk,) = chunker.take(frame(1.2, size=(8, 4)))
    assert chunk.frames == [(4, 8, 3)] * 2
    assert chunker.broken == 1


def test_a_view_is_the_bounding_box_of_the_regions_and_never_enlarges() -> None:
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[50:, 100:150] = 255
    view = View.of([Region(0.5, 0.5, 0.6, 1.0), Region(0.7, 0.6, 0.75, 0.9)], 400)
    assert view.bounds == Region(0.5, 0.5, 0.75, 1.0)
    part = of_array(pixels, view)
    assert part.shape == (50, 50, 3)
    assert part.min() == 255
    assert of_array(pixels, View(WHOLE, 50)).shape == (25, 50, 3)
    np.testing.assert_allclose(view.inside(Region(0.5, 0.6, 0.75, 0.9)), (0, 0.2, 1, 0.8))


@pytest.mark.parametrize("b_frames", ["0", "2"])
@pytest.mark.parametrize("spacing", [0.05, 0.4, 1.7])
def test_lazy_decoding_yields_the_same_frames_for_less_work(
    tmp_path: Path, spacing: float, b_frames: str
) -> None:
    av = pytest.importorskip("av", reason="the extra watch is not installed")
    from vlora.watch.streams import LazyDecoder

    path = write_video(
        tmp_path / "v.mp4", 20, range(0, 200, 2), (64, 64), "h264", g="10", bf=b_frames
    )

    def first_at_or_after(frames: list[tuple[float, int]]) -> list[int]:
        times = itertools.takewhile(lambda t: t < 4.9, itertools.count(0, spacing))
        return [next(shade for at, shade in frames if at >= time - 1e-9) for time in times]

    with av.open(str(path)) as container:
        whole = [(f.time, int(f.to_ndarray(format="rgb24").mean())) for f in container.decode()]
    found: list[tuple[float, int]] = []
    decoded, wanted = 0, 0.0
    with av.open(str(path)) as container:
        decoder = LazyDecoder(container.streams.video[0].codec_context, StreamCounts())
        for packet in container.demux(video=0):
            if not packet.size:
                frames = decoder.finish()
            else:
                frames = decoder.take(packet, float(packet.pts * packet.time_base), wanted)
            decoded += len(frames)
            for one in frames:
                at = float(one.pts * packet.time_base)
                if at >= wanted - 1e-9:
                    found.append((at, int(one.to_ndarray(format="rgb24").mean())))
                    while wanted <= at + 1e-9:
                        wanted += spacing
    assert first_at_or_after(found) == first_at_or_after(whole)
    if spacing > 1:
        assert decoded < 0.6 * len(whole)


def test_pictures_after_damage_are_left_out_up_to_the_next_whole_key_frame(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="the extra watch is not installed")
    from vlora.watch.streams import LazyDecoder

    options = {"g": "8", "bf": "0", "sc_threshold": "0", "threads": "1"}
    noise = np.random.default_rng(0).integers(0, 256, (30, 128, 128, 3), np.uint8)
    path = write_video(tmp_path / "v.ts", 10, [*noise], (128, 128), "h264", **options)
    counts, times = StreamCounts(), []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        decoder = LazyDecoder(stream.codec_context, counts)
        for index, packet in enumerate(one for one in container.demux(video=0) if one.size):
            sent = packet
            if index in (3, 17):
                sent = av.Packet(bytes(packet)[: packet.size // 2])
                sent.pts, sent.dts, sent.time_base = packet.pts, packet.dts, packet.time_base
            times += [one.pts for one in decoder.take(sent, index / 10, 0.0)]
        times += [one.pts for one in decoder.finish()]
    first, step = times[0], times[1] - times[0]
    assert [(time - first) // step for time in times] == [0, 1, 2, *range(8, 17), *range(24, 30)]
    assert counts.damaged == 12


def clock(is_live: bool = True):
    streams = pytest.importorskip("vlora.watch.streams", reason="the extra watch is not installed")
    now = [1000.0]
    counts = StreamCounts()
    return streams.StreamClock(is_live, counts, lambda: now[0]), now, counts


def test_the_packet_with_the_shortest_way_tells_the_time() -> None:
    made, now, counts = clock()
    assert made.unix(None) == 1000.0  # The first packet may have no time stamp.
    assert made.unix(50.0) == 1000.0
    now[0] = 1001.0  # A packet that was recorded 0.6 s before, so the first one was late.
    assert made.unix(51.4) == pytest.approx(1001.0)
    now[0] = 1002.5
    assert made.unix(51.5) == pytest.approx(1001.1, abs=0.01)  # It is 1.4 s late.
    assert counts.gaps == 0


def test_a_jump_of_the_time_stamps_is_a_gap() -> None:
    for jump in (-5.0, 500.0):
        made, now, counts = clock()
        made.unix(50.0)
        now[0] = 1001.0
        assert made.unix(50.0 + jump) == 1001.0
        assert counts.gaps == 1


def chunk(*shades: int, width: int = 96) -> Chunk[Shot]:
    """Return a chunk of frames with a bright square at the left, as many cells wide as `shades`."""
    shots = []
    for shade in shades:
        pixels = np.zeros((96, width, 3), np.uint8)
        pixels[:16, : 2 * shade] = 255
        shots.append(Shot(b"", small_grey(pixels)))
    return Chunk(0.0, 1.0, shots)


def test_the_gate_passes_what_changes_inside_the_regions() -> None:
    gate = SceneGate(Gate(threshold=0.01, every_seconds=60.0), (), View())
    assert gate.has_changed(chunk(0, 0), 0.0)  # Nothing is known yet.
    gate.note_answer(chunk(0, 0), 0.0)
    assert not gate.has_changed(chunk(0, 0), 1.0)
    assert not gate.has_changed(chunk(1, 0), 1.0)  # 8 of 48 x 48 cells are below the threshold.
    assert gate.has_changed(chunk(0, 4, 0), 1.0)  # Also if only a frame in the middle differs.
    assert gate.has_changed(chunk(0, 0), 60.0)
    assert gate.has_changed(chunk(0, width=48), 1.0)
    blind = SceneGate(Gate(), (Region(0.0, 0.5, 1.0, 1.0),), View())
    blind.note_answer(chunk(0), 0.0)
    assert not blind.has_changed(chunk(30), 1.0)
    assert small_grey(np.zeros((1080, 1920, 3), np.uint8)).shape == (27, CELLS)


def test_the_camera_of_lowest_priority_yields_first_and_longer_each_time() -> None:
    admission = Admission()
    cameras = {"door": 0, "yard": 5, "belt": 5, "gate": -1}
    assert admission.refused(cameras, 0.0) == "belt"
    assert admission.refused(cameras, 0.1) == "yard"
    assert admission.refused(cameras, 0.2) == "door"
    assert admission.refused(cameras, 0.3) is None
    assert admission.is_yielding("belt", 1.9)
    assert not admission.is_yielding("belt", 2.0)
    assert admission.refused(cameras, 2.0) == "belt"
    assert admission.is_yielding("belt", 5.9)
    assert not admission.is_yielding("belt", 6.1)
    assert not admission.is_yielding("gate", 0.5)


def test_the_synthetic_camera_shows_the_motion_that_it_names() -> None:
    chunker = Chunker(1.0, 6, 1.0, View(), lambda pixels: pixels)
    frames = SyntheticCamera(30, seed=5).frames(lambda: chunker.wanted)
    chunks = itertools.islice((one for each in frames for one in chunker.take(each)), 30)
    told = set()
    for one in chunks:
        surface = one.frames[0][0, 0].astype(int)
        places = [np.argwhere(np.abs(f - surface).sum(-1) > 30).mean(0) for f in one.frames]
        down, right = np.subtract(places[-1], places[0])
        told.add(one.truth)
        words = {"moving left": right < -40, "moving right": right > 40, "moving up": down < -40}
        words |= {"moving down": down > 40, "standing still": max(abs(down), abs(right)) < 2}
        assert [word for word, holds in words.items() if holds] == [one.truth]
    assert len(told) == 5
