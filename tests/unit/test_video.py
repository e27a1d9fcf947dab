"""Tests of reading video files: which frames are sampled, their pixels, and hostile files."""

from __future__ import annotations

import base64
import importlib
import io
import resource
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="the extra video is not installed")

import av
from av.stream import Disposition
from transformers.models.llava_onevision.video_processing_llava_onevision import (
    LlavaOnevisionVideoProcessor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata, load_video

from tests.support import video_files as files
from tests.support.read_videos import outcomes
from tests.support.video_traps import Trap, lures
from vlora.errors import InvalidArgument
from vlora.vision import video
from vlora.vision.families.base import vision_family
from vlora.vision.video import VideoPlan, VideoSampling, is_video, plan_video, read_frames

LIMIT = 1 << 24


def read(data: bytes, *wanted: int) -> tuple[VideoPlan, list[np.ndarray]]:
    """Return a file's plan and its frames with the numbers `wanted`, or all."""
    plan = plan_video(data, "video 0", LIMIT)
    plan = plan.with_indices(wanted or range(plan.total))
    return plan, list(read_frames(data, "video 0", plan))


def stock(data: bytes) -> list[np.ndarray]:
    """Return all frames, as transformers' `load_video` does with PyAV."""
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def assert_same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.uint8
        assert one.flags.c_contiguous
        np.testing.assert_array_equal(one, other)


def odd(codec: str, container: str, pixels: str = "yuv420p") -> bytes:
    return files.video(codec, container, frames=files.pictures(12, 65, 51), pixels=pixels)


UNEVEN = [0, 40, 50, 60, 400, 410, 1000, 1001, 1500, 2600]
KINDS: dict[str, Callable[[], bytes]] = {
    **{
        f"{codec}.{container}": lambda codec=codec, container=container: files.video(
            codec, container
        )
        for codec in files.CODECS
        for container in ("mp4", "mov", "mkv", "ts")
        if container != "ts" or codec.startswith("h26")
        if container != "mov" or codec not in ("vp9", "av1")
    },
    "vp9.webm": lambda: files.video("vp9", "webm"),
    "fragmented": lambda: files.video(options={"movflags": "frag_keyframe+empty_moov"}),
    "10 bit": lambda: files.video("h265", "mkv", pixels="yuv420p10le"),
    "odd size": lambda: odd("vp9", "webm"),
    "odd size of 4:4:4": lambda: odd("h264", "mp4", "yuv444p"),
    "one frame": lambda: files.video(frames=files.pictures(1)),
    "uneven times": lambda: files.video("h264", "mkv", frames=files.pictures(10), times=UNEVEN),
    "negative times": lambda: files.video(
        "h264",
        "mkv",
        frames=files.pictures(10),
        times=[40 * i - 120 for i in range(10)],
        options={"avoid_negative_ts": "disabled"},
    ),
    "equal times": lambda: files.remuxed(
        [files.video("mjpeg", "mkv")], "mkv", lambda time: time // 120 * 120
    ),
    "no first time": lambda: files.without_first_time(files.video("h264", "ts")),
    "no order of times": lambda: files.video().replace(b"ctts", b"free"),
    "wrong rate": lambda: files.with_number(files.video("mjpeg"), b"stts", 12, 0),
    "joined": lambda: (
        files.video("h264", "ts", options={"output_ts_offset": "30"})
        + files.video("h264", "ts", frames=files.pictures(30, seed=4))
    ),
    "cut": lambda: files.video("h264", "ts")[188 * 10 :],
    "sound first": lambda: files.video("h264", "mkv", with_audio=True),
    "edit list": lambda: files.with_number(files.video(), b"elst", 12, 1024 + 5 * 512),
}


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_pyav(kind: str) -> None:
    data = KINDS[kind]()
    expected = stock(data)
    plan, found = read(data)
    assert (plan.total, plan.height, plan.width) == (len(expected), *expected[0].shape[:2])
    assert_same(found, expected)
    draw = np.random.default_rng(3)
    for count in (1, 2, 5):
        numbers = sorted(map(int, draw.choice(len(expected), min(count, len(expected)), False)))
        plan, found = read(data, *numbers)
        assert plan.indices == tuple(numbers)
        assert_same(found, [expected[number] for number in numbers])


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_frames_are_turned_upright(rotation: int, mirrored: bool) -> None:
    data = files.video("mjpeg", "mp4", rotation=rotation, mirrored=mirrored)
    plan, found = read(data, 0, 7)
    plain = [stock(data)[number] for number in (0, 7)]
    # `numpy.rot90` turns against the clock, as FFmpeg counts angles. Mirroring comes last.
    turned = [np.rot90(rgb, rotation // 90) for rgb in plain]
    upright = [rgb[:, ::-1] if mirrored else rgb for rgb in turned]
    assert (plan.height, plan.width) == upright[0].shape[:2]
    assert_same(found, upright)


def test_frames_of_another_size_are_resized_to_that_of_the_first() -> None:
    sizes = ((files.WIDTH, files.HEIGHT), (96, 64))
    parts = [files.video("h264", "ts", frames=files.pictures(20, *size)) for size in sizes]
    plan, found = read(files.remuxed(parts, "ts"))
    assert plan.total == 40
    assert {rgb.shape for rgb in found} == {(files.HEIGHT, files.WIDTH, 3)}
    assert_same(found[:20], stock(parts[0]))


def test_the_default_stream_is_used() -> None:
    parts = [files.video(), files.video(frames=files.pictures(8, 96, 64))]
    dispositions = [Disposition(0), Disposition.default]
    _, found = read(files.remuxed(parts, "mkv", dispositions=dispositions))
    assert_same(found, stock(parts[1]))


def test_a_cover_picture_is_not_the_video() -> None:
    parts = [files.video("mjpeg", frames=files.pictures(1, 96, 64)), files.video()]
    dispositions = [Disposition.attached_pic, Disposition(0)]
    _, found = read(files.remuxed(parts, "mp4", dispositions=dispositions))
    assert_same(found, stock(parts[1]))


@pytest.mark.parametrize("container", ["mkv", "ts", "mp4"])
def test_a_truncated_file_has_the_frames_that_are_there(container: str) -> None:
    data = files.video("h264", container)
    data = files.with_header_first(data) if container == "mp4" else data
    expected = stock(data)
    plan, found = read(data[: int(len(data) * 0.6)])
    assert 5 < plan.total < len(expected)
    assert len(found) == plan.total
    # The last frames may lack data, or frames after them that they depend on.
    assert_same(found[:-4], expected[: plan.total - 4])


@pytest.mark.parametrize("first", [0, 20])
def test_instead_of_a_frame_that_cannot_be_decoded_another_is_used(first: int) -> None:
    data = files.video("mjpeg", "mkv")
    expected = stock(data)
    with av.open(io.BytesIO(data)) as file:
        packet = bytes(list(file.demux(video=0))[first])
    plan, found = read(data.replace(packet, bytes(len(packet))), first, 30)
    assert plan.total == len(expected)
    assert_same(found, [expected[first - 1 if first else 1], expected[30]])


@pytest.mark.parametrize(("kind", "most"), [("mjpeg.mp4", 2), ("h264.mp4", 12), ("vp9.webm", 12)])
def test_only_frames_that_sampled_ones_depend_on_are_decoded(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_video(KINDS[kind](), "video 0", LIMIT).with_indices((20, 22))
    decoded, decode = [], video._decoded
    monkeypatch.setattr(video, "_decoded", lambda *of: decoded.extend(of[1:]) or decode(*of))
    assert len(list(read_frames(KINDS[kind](), "video 0", plan))) == 2
    assert len([packet for packet in decoded if packet is not None]) <= most


def test_a_server_without_the_extra_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        InvalidArgument, match=r"^video 0 .* install vlora\[video\], or send 'frames'"
    ):
        read(KINDS["mjpeg.mp4"]())


def test_base64_and_data_urls_are_read() -> None:
    data = files.video(frames=files.pictures(3))
    text = base64.b64encode(data)
    for element in (text, b"data:video/mp4;base64," + text):
        assert not is_video(element)
        assert_same(read(element)[1], stock(data))


@pytest.mark.parametrize("kind", ["h264.mp4", "h264.ts", "vp9.webm", "mjpeg.mov"])
def test_videos_are_told_by_their_first_bytes(kind: str) -> None:
    data = KINDS[kind]()
    assert is_video(data)
    for start in range(4, 200):
        assert not is_video(base64.b64encode(data[start:] if start > 4 else data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "video 0 is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "neither a video file (MP4, MOV, Matroska"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "neither a video file (MP4, MOV, Matroska"),
        (files.box(b"ftyp", b"isom" + bytes(4)), "video 0 is corrupt, truncated or of an unknown"),
        (files.sound_only(), "video 0 has no video stream"),
        (files.video()[:LIMIT] + bytes(LIMIT), f"bytes; the limit is {LIMIT}"),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        read(data)
    assert message in str(error.value)


def test_another_codec_is_refused() -> None:
    content = io.BytesIO()
    with av.open(content, "w", format="matroska") as file:
        stream = file.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        frame = av.VideoFrame.from_ndarray(files.pictures(1)[0], format="rgb24")
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with pytest.raises(InvalidArgument, match=r"codec 'mpeg4'; accepted: H.264, H.265, VP9, AV1"):
        read(content.getvalue())


# Samplers


@pytest.fixture(scope="module")
def processors() -> dict[str, type]:
    """Return the stock processors, of which one can only be imported with torchvision."""
    name = "torchvision"
    absent = ModuleType(name)
    names = [name, *(f"{name}.transforms{rest}" for rest in ("", ".v2", ".v2.functional"))]
    with pytest.MonkeyPatch.context() as patch:
        for parent in names:
            patch.setitem(sys.modules, parent, absent)
        absent.transforms = absent.v2 = absent.functional = absent  # type: ignore[attr-defined]
        module = importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    return {
        "qwen2_vl": module.Qwen2VLVideoProcessor,
        "qwen2_5_vl": module.Qwen2VLVideoProcessor,
        "qwen3_vl": Qwen3VLVideoProcessor,
        "llava_onevision": LlavaOnevisionVideoProcessor,
    }


def drawn(draw: np.random.Generator, *values: Any) -> Any:
    return values[int(draw.integers(len(values)))]


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_frames_are_sampled_as_by_the_stock_processor(
    model: str, processors: dict[str, type]
) -> None:
    draw, compared = np.random.default_rng(5), 0
    family = vision_family(model)
    for _ in range(600):
        total, fps = int(draw.integers(1, 900)), float(draw.uniform(0.3, 120))
        settings: dict[str, Any] = {"do_sample_frames": True, **drawn(draw, {}, {"fps": 1.5})}
        request = drawn(
            draw, {}, {"num_frames": int(draw.integers(1, 80))}, {"fps": draw.uniform(0.1, 9)}
        )
        if model != "llava_onevision":
            settings |= drawn(draw, {}, {"min_frames": 6, "max_frames": int(draw.integers(6, 50))})
        stock = processors[model](**settings)
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        found = family.sample_frames(settings, VideoSampling(**request, limit=1000), total, fps)
        assert 0 <= found[0] <= found[-1] < total
        try:
            expected = [int(number) for number in stock.sample_frames(metadata, **request)]
        except (ValueError, ZeroDivisionError, TypeError):
            continue  # The stock processor wants more frames than there are, or none.
        assert list(found) == [number for number in expected if number < total]
        compared += 1
    assert compared > 300


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_vl", "llava_onevision"])
def test_requests_and_checkpoints_decide_how_frames_are_sampled(model: str) -> None:
    family = vision_family(model)

    def count(settings: dict[str, Any], total: int = 100, **request: Any) -> int:
        return len(family.sample_frames(settings, VideoSampling(**request), total, 10.0))

    assert count({}) == (20 if model == "qwen3_vl" else 100)
    assert count({"do_sample_frames": False, "fps": 1}) == 100
    assert count({"do_sample_frames": True, "fps": 1}) == 10
    assert count({"do_sample_frames": True, "fps": 1}, do_sample_frames=False) == 100
    assert count({"do_sample_frames": True, "fps": 1}, num_frames=30) == 30
    assert count({"do_sample_frames": True, "num_frames": 30}, fps=2.0) == 20
    assert count({}, fps=2.0, num_frames=8) == 8
    assert count({}, fps=2.0, num_frames=40) == 20
    assert count({}, fps=5.0, max_frames=12) == 12
    assert count({}, total=1, fps=2.0) == 1
    with pytest.raises(InvalidArgument, match=r"100 frames of its 100 .* limit is 64 \('max_video"):
        count({}, do_sample_frames=False, limit=64)
    with pytest.raises(InvalidArgument, match="limit is 64"):
        count({}, num_frames=80, limit=64)


def test_a_file_is_sampled_as_by_transformers(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(files.video())
    stock = Qwen3VLVideoProcessor()
    frames, metadata = load_video(
        str(path), backend="pyav", sample_indices_fn=lambda metadata: stock.sample_frames(metadata)
    )
    sampler = partial(vision_family("qwen3_vl").sample_frames, {}, VideoSampling())
    plan = plan_video(path.read_bytes(), "video 0", LIMIT)
    plan = plan.with_indices(sampler(plan.total, plan.fps))
    assert_same(list(read_frames(path.read_bytes(), "video 0", plan)), list(frames))
    assert list(plan.indices) == list(metadata.frames_indices)
    assert list(plan.seconds) == metadata.timestamps
    assert (plan.fps, plan.total, plan.duration) == (metadata.fps, 40, metadata.duration)


# Hostile files


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Trap]:
    trap = Trap(tmp_path)
    yield trap
    trap.close()


def test_no_file_or_address_is_opened(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trap.path.parent)
    hostile = lures(trap)
    # The lures work on a reader without protection.
    for kind, options in (("alias", {"enable_drefs": "1", "use_absolute_path": "1"}), ("hls", {})):
        data = hostile["alias"] if kind == "alias" else hostile[f"hls of {trap.path}"]
        with suppress(av.FFmpegError):
            format = "mov" if kind == "alias" else "hls"
            av.open(io.BytesIO(data), format=format, options=options).close()
        assert trap.sprung(), kind
    for kind, data in hostile.items():
        with pytest.raises(InvalidArgument, match=r"^video 0 "):
            read(data)
        assert not trap.sprung(), kind


def test_mutated_files_give_frames_or_a_typed_error() -> None:
    few = files.pictures(10)
    kinds = [("h264", "mp4"), ("h264", "ts"), ("h265", "mkv"), ("vp9", "webm"), ("av1", "mkv")]
    originals = [files.video(*kind, frames=few) for kind in [*kinds, ("mjpeg", "mov")]]
    draw = np.random.default_rng(11)
    mutants = [files.mutated(originals[i % len(originals)], draw) for i in range(500)]
    found = outcomes(mutants)
    assert len(found) == len(mutants)
    assert set(found) <= set("fim")
    assert min(found.count("f"), found.count("i")) > 50


@pytest.mark.parametrize(
    ("box", "offset"), [(b"stsz", 8), (b"stts", 8), (b"stsc", 12), (b"stco", 4), (b"mvhd", 12)]
)
def test_a_header_that_claims_a_billion_frames_costs_little(box: bytes, offset: int) -> None:
    data = files.with_number(files.video(), box, offset, 10**9)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert outcomes([data]) in ("f", "i")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 5


def test_bytes_that_are_listed_many_times_are_refused() -> None:
    data = files.video("mjpeg", "mov", frames=files.pictures(1)).replace(b"edts", b"free")
    path = (b"moov", b"trak", b"mdia", b"minf", b"stbl")
    (start,) = struct.unpack_from(">I", data, data.index(b"stco") + 12)
    count, size = 5000, 1000
    tables = {
        b"stsz": struct.pack(">III", 0, size, count),
        b"stco": struct.pack(f">II{count}I", 0, count, *[start] * count),
        b"stts": struct.pack(">IIII", 0, 1, count, 512),
    }
    for name, content in tables.items():
        data = files.with_box(data, (*path, name), content)
    with pytest.raises(InvalidArgument, match="or its bytes several times"):
        read(data)
