"""Tests of the processes that decode images: limits of time and memory, isolation, and exit."""

from __future__ import annotations

import errno
import fcntl
import io
import math
import os
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.decoding import Kept, decoded, start
from tests.support.hostile_images import flat_png, jpeg_with_scans, run_length_bmp, tiff_with_tile
from tests.support.polling import until
from tests.support.processes import children_that_run
from vlora.config import Limits
from vlora.errors import Internal, InvalidArgument, Unavailable
from vlora.launcher.processes import is_alive
from vlora.request import Clip
from vlora.sampling import MediaOptions
from vlora.vision import decode_worker, decoding
from vlora.vision.decoding import SLOW_NICENESS, ImageDecoder, PixelPool
from vlora.vision.images import DecodedImage, ImageRequest, check_images
from vlora.vision.pictures import ByteArray

LIMITS = Limits()
BRIEF = replace(LIMITS, max_decode_seconds=0.2)
ENDLESS = jpeg_with_scans(2000, 3000)
"""A file that takes many seconds to decode."""


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(LIMITS)
    yield decoder
    decoder.close()
    assert fork_servers() == []


def fork_servers() -> list[psutil.Process]:
    """Return the fork servers that this process has started."""
    return children_that_run("vlora.vision.decode_worker")


def decode(decoder: ImageDecoder, *images: bytes, limits: Limits = LIMITS) -> list[DecodedImage]:
    return decoded(decoder, check_images(images, [], None, limits))


def picture(seed: int = 0, side: int = 40) -> tuple[ByteArray, bytes]:
    rgb = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(rgb).save(content, "PNG")
    return rgb, content.getvalue()


def check_that_it_works(decoder: ImageDecoder, seed: int = 0) -> None:
    rgb, data = picture(seed)
    (image,) = decode(decoder, data)
    np.testing.assert_array_equal(image.rgb, rgb)
    assert not image.rgb.flags.writeable


@pytest.mark.parametrize(
    "images",
    [[ENDLESS], [run_length_bmp(8000, 2000)], [flat_png(3200, 3125)] * 64],
    ids=["jpeg-scans", "bmp-runs", "many-pngs"],
)
def test_images_that_take_too_long_are_refused(decoder: ImageDecoder, images: list[bytes]) -> None:
    check_that_it_works(decoder)
    with pytest.raises(InvalidArgument, match=r"more than 0\.2 s of processor time .* image \d+;"):
        decode(decoder, *images, limits=BRIEF)
    check_that_it_works(decoder)


def test_the_time_limit_counts_one_request_only(decoder: ImageDecoder) -> None:
    limits = replace(LIMITS, max_decode_seconds=0.5)
    data = flat_png(2000, 1500)
    for _ in range(20):
        decode(decoder, data, limits=limits)


@pytest.mark.parametrize(
    ("limit", "image", "message"),
    [
        (100_000_000, tiff_with_tile(16, 8192), "image 1"),
        (
            20_000_000,
            flat_png(4000, 4000),
            r"decoding image 1 takes more than 20000000 bytes .*'max_decode_bytes'",
        ),
    ],
    ids=["a tile larger than its image", "a large image"],
)
def test_an_image_that_needs_too_much_memory_is_refused(
    decoder: ImageDecoder, limit: int, image: bytes, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode(decoder, picture()[1], image, limits=replace(LIMITS, max_decode_bytes=limit))
    check_that_it_works(decoder)


def videos_of(*data: bytes, limits: Limits = LIMITS, **options: int) -> ImageRequest:
    return check_images([], [], None, limits, data, MediaOptions(**options))


@pytest.fixture(scope="module")
def video() -> bytes:
    pytest.importorskip("av", reason="the extra video is not installed")
    from tests.support.video_files import video

    return video()


def test_videos_are_clips_of_their_own(decoder: ImageDecoder, video: bytes) -> None:
    pixels, png = picture()
    listed = b"data:video/jpeg;base64," + b",".join([b64encode(png)] * 3)
    request = check_images([png], [png] * 2, None, LIMITS, [video, listed, b64encode(video)])
    kept = Kept()
    images = start(decoder, request, kept).result(60)
    assert [(size.is_frame, size.clip) for size in kept.sizes] == [
        (False, 0),
        *[(True, 0)] * 40,
        *[(True, 1)] * 3,
        *[(True, 2)] * 40,
        *[(True, 3)] * 2,
    ]
    assert kept.videos[0] == kept.videos[2]
    assert kept.videos[1] == Clip((0.0, 1 / 24, 2 / 24), 24.0)
    assert kept.videos[0].seconds == tuple(i / 25 for i in range(40))
    assert kept.videos[0].fps == 25
    np.testing.assert_array_equal(images[1].rgb, images[44].rgb)
    np.testing.assert_array_equal(images[41].rgb, pixels)
    assert not images[1].rgb.flags.writeable
    with pytest.raises(InvalidArgument, match="has 3 images and frames; the limit is 2"):
        videos_of(listed, limits=replace(LIMITS, max_images=2))
    with pytest.raises(InvalidArgument, match="video 0, frame 3 is neither an encoded image"):
        start(decoder, videos_of(listed + b",AAAA"), Kept()).result(60)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_video_frames": 39}, "video 0: 40 frames .* the limit is 39"),
        ({"max_video_frames": 79}, "with video 1 .* 80 frames of videos; the limit is 79"),
        ({"max_video_frames": 1}, "2 videos; .* the limit is 1 frames"),
        ({"max_video_bytes": 999}, "video 0 has .* bytes; the limit is 999"),
        ({"max_image_megapixels": 0.001}, r"a frame of video 0 is 64x48 = 0\.003 megapixels"),
    ],
)
def test_limits_of_videos_are_their_own(
    decoder: ImageDecoder, video: bytes, limit: dict[str, int], message: str
) -> None:
    limits = replace(LIMITS, max_images=1, **limit)
    with pytest.raises(InvalidArgument, match=message):
        start(decoder, videos_of(video, video, limits=limits), Kept()).result(60)
    start(decoder, videos_of(video, num_frames=8), Kept()).result(60)


def test_a_video_that_takes_too_long_is_refused(decoder: ImageDecoder, video: bytes) -> None:
    from tests.support.video_files import video as encoded

    noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    slow = encoded("mjpeg", "mkv", frames=[noise] * 400)
    limits = replace(LIMITS, max_video_seconds=0.1, max_decode_seconds=0.001)
    with pytest.raises(InvalidArgument, match=r"0\.1 s .* video 1; .*'max_video_seconds'"):
        start(decoder, videos_of(video, slow, limits=limits), Kept()).result(60)
    check_that_it_works(decoder)


def test_a_broken_video_is_the_error_of_its_request(decoder: ImageDecoder, video: bytes) -> None:
    for wrong, message in (
        (picture()[1], "video 1 is neither a video file"),
        (video[:60], "video 1"),
        (b"", "video 1 is empty"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            start(decoder, videos_of(video, wrong), Kept()).result(60)
    check_that_it_works(decoder)


def test_hostile_videos_have_typed_errors(decoder: ImageDecoder, video: bytes) -> None:
    from tests.support.video_files import mutated

    draw = np.random.default_rng(11)
    outcomes = []
    for data in (mutated(video, draw) for _ in range(40)):
        outcome = start(decoder, videos_of(data, num_frames=4), Kept())
        outcomes.append(outcome.exception(60))
    assert {type(outcome) for outcome in outcomes} == {type(None), InvalidArgument}
    check_that_it_works(decoder)


def test_an_interrupted_video_goes_on_at_its_next_frame(
    decoder: ImageDecoder, video: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(decoder, videos_of(video, num_frames=6), Kept()).result(60)
    monkeypatch.setattr(decoding, "LONG_SECONDS", 0.0)
    turns = []
    take = decoder._take
    monkeypatch.setattr(decoder, "_take", lambda: turns.append(1) or take())
    kept = Kept()
    others = [decoder._long.acquire(blocking=False) for _ in range(4)]
    assert all(others)
    future = start(decoder, videos_of(video, num_frames=6), kept)
    # It gives up its regular permit and waits for one of the others.
    until(lambda: bool(turns) and decoder._regular._value == 2)
    assert 0 < kept.pictures < 6
    for _ in others:
        decoder._long.release()
    images = future.result(60)
    assert len(turns) > 1
    for one, other in zip(images, whole, strict=True):
        np.testing.assert_array_equal(one.rgb, other.rgb)


def test_other_requests_are_decoded_while_slow_ones_run() -> None:
    """Slow requests give up their regular permits, so a fast request is decoded soon."""
    decoder = ImageDecoder(LIMITS, permits=1)
    endless = check_images([ENDLESS], [], None, LIMITS)
    slow = [start(decoder, endless, Kept()) for _ in range(8)]
    try:
        for seed in range(5):
            check_that_it_works(decoder, seed)
        assert not any(one.done() for one in slow)
    finally:
        decoder.close()  # Otherwise its processes fail the tests that follow.
    assert any(isinstance(one.exception(60), Unavailable) for one in slow if not one.cancelled())


@pytest.mark.parametrize("slow_seconds", [0.2, math.inf])
def test_a_slow_request_leaves_its_regular_permit_and_later_gets_a_lower_priority(
    monkeypatch: pytest.MonkeyPatch, slow_seconds: float
) -> None:
    """A clip also takes long to decode, and should not get a lower priority at once."""
    monkeypatch.setattr("vlora.vision.decoding.SLOW_SECONDS", slow_seconds)
    decoder = ImageDecoder(LIMITS, permits=1)
    start(decoder, check_images([ENDLESS], [], None, LIMITS), Kept())
    (server,) = fork_servers()
    if slow_seconds < math.inf:
        lowered = min(server.nice() + SLOW_NICENESS, 19)
        until(lambda: [process.nice() for process in server.children()] == [lowered])
    else:
        check_that_it_works(decoder)
        assert {process.nice() for process in server.children()} == {server.nice()}
    decoder.close()


def test_parallel_requests_get_their_own_pixels(decoder: ImageDecoder) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: check_that_it_works(decoder, seed), range(100)))


def test_a_decoder_or_a_fork_server_that_was_killed_is_replaced(decoder: ImageDecoder) -> None:
    check_that_it_works(decoder)
    (server,) = fork_servers()

    def kept() -> list[psutil.Process]:
        check_that_it_works(decoder)
        return server.children()

    for whole in (False, True):
        # A decoder that was slow, as on a busy machine, is not kept.
        victims = [server] * whole + until(kept)
        victims[0].kill()
        until(lambda: not any(is_alive(process) for process in victims))  # noqa: B023
        # A process can count as ended before its connections are closed.
        until(lambda: all(idle.has_reply() for idle in decoder._idle))
        check_that_it_works(decoder)


def test_ctrl_c_does_not_end_the_decoders(decoder: ImageDecoder) -> None:
    check_that_it_works(decoder)
    (server,) = fork_servers()
    for process in (server, *server.children()):
        process.send_signal(signal.SIGINT)
    check_that_it_works(decoder)
    assert fork_servers() == [server]


def test_a_closed_decoder_refuses() -> None:
    decoder = ImageDecoder(LIMITS)
    decoder.close()
    with pytest.raises(Unavailable):
        decode(decoder, picture()[1])


def test_the_processes_end_with_the_one_that_started_them() -> None:
    code = """
import sys, threading
from tests.support.hostile_images import jpeg_with_scans
from vlora.config import Limits
from tests.support.decoding import Kept, start
from vlora.vision.decoding import ImageDecoder
from vlora.vision.images import check_images
decoder = ImageDecoder(Limits())
request = check_images([jpeg_with_scans(2000, 3000)], [], None, Limits())
start(decoder, request, Kept())
print("decoding", flush=True)
threading.Event().wait()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"decoding\n"
        started = psutil.Process(parent.pid)
        until(lambda: len(started.children(recursive=True)) == 2)
        children = started.children(recursive=True)
        parent.kill()
    until(lambda: not any(is_alive(child) for child in children))


def test_large_pictures_wait_for_each_other_in_their_order_and_never_delay_small_ones() -> None:
    pool = PixelPool(100e6)
    pool.reserve(80_000_000, lambda: None)  # Alone it may exceed the share of large pictures.
    reserved: list[int] = []

    def reserve(pixels: int) -> None:
        pool.reserve(pixels, lambda: None)
        reserved.append(pixels)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(reserve, 70_000_000)
        until(lambda: len(pool._waiting[False]) == 1)
        threads.submit(reserve, 5_000_000)
        until(lambda: len(pool._waiting[False]) == 2)
        for _ in range(5):
            reserve(decode_worker.SMALL_PIXELS)
        # There is space for the second one.
        assert reserved == [decode_worker.SMALL_PIXELS] * 5
        pool.release(80_000_000)


def test_a_request_of_many_large_images_holds_the_pixels_of_one_at_a_time(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others decode beside it. A request is refused for its sizes before anything is decoded."""
    held: list[float] = []
    reserve = decoder._pixels.reserve

    def noted(pixels: int, check: Callable[[], None]) -> None:
        reserve(pixels, check)
        held.append(sum(decoder._pixels._held.values()))

    monkeypatch.setattr(decoder._pixels, "reserve", noted)
    images = [flat_png(2500, 2000)] * 6
    assert len(decode(decoder, *images)) == 6
    assert held == [5e6] * 6
    held.clear()
    with pytest.raises(InvalidArgument, match="with image 5 the request has"):
        decode(decoder, *images, limits=replace(LIMITS, max_request_megapixels=26))
    assert held == []


def test_a_clip_holds_the_frames_that_are_needed_together(decoder: ImageDecoder) -> None:
    """It continues after an interruption with the first frame that is not complete."""
    rgb = [picture(seed)[0] for seed in range(5)]
    content = io.BytesIO()
    first, *rest = map(Image.fromarray, rgb[:3])
    first.save(content, "PNG", save_all=True, append_images=rest)
    kept = Kept(together=2)
    kept.images, kept.sizes = [DecodedImage(rgb[0], True), DecodedImage(rgb[1], True)], []
    clip = [content.getvalue(), picture(3)[1], picture(4)[1]]
    frames = start(decoder, check_images([], clip, None, LIMITS), kept).result(60)
    for frame, expected in zip(frames, rgb, strict=True):
        np.testing.assert_array_equal(frame.rgb, expected)


@pytest.mark.parametrize("refusals", [3, decode_worker.SEAL_TRIES])
def test_a_file_whose_pages_are_in_use_is_sealed_as_soon_as_they_are_free(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [errno.EBUSY] * refusals

    def seal(file: int, command: int, seals: int) -> int:
        if answers:
            raise OSError(answers.pop(), "busy")
        return real(file, command, seals)

    real = fcntl.fcntl
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    monkeypatch.setattr(decode_worker.fcntl, "fcntl", seal)
    try:
        if refusals < decode_worker.SEAL_TRIES:
            decode_worker._seal(file)
            assert real(file, fcntl.F_GET_SEALS) == decode_worker.SEALS
        else:
            with pytest.raises(OSError, match="busy"):
                decode_worker._seal(file)
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        ("kill", Internal, "decoder of image 0"),
        ("suspend", Unavailable, "decoder of image 0 does not run"),
    ],
)
def test_a_decoder_that_is_killed_or_stopped_while_it_decodes_is_replaced(
    decoder: ImageDecoder,
    monkeypatch: pytest.MonkeyPatch,
    harm: str,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr("vlora.vision.decoding.MAX_IDLE_POLLS", 4)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(decode, decoder, ENDLESS)
        (server,) = fork_servers()
        (process,) = until(server.children)
        getattr(process, harm)()
        with pytest.raises(error, match=message):
            future.result(30)
    check_that_it_works(decoder)


def test_a_decoder_that_takes_no_data_is_ended_and_replaced(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlora.vision.decoding.TRANSFER_SECONDS", 0.2)
    (server,) = fork_servers()
    until(lambda: check_that_it_works(decoder) or server.children())
    for process in server.children():
        process.suspend()
    with pytest.raises(Unavailable, match="decoder of image 0 does not run"):
        decode(decoder, picture()[1] + bytes(4_000_000))
    monkeypatch.undo()
    check_that_it_works(decoder)
