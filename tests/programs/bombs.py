"""Healthy requests beside one hostile request at a time, drawn within the limits of a gateway.

Each bomb is drawn from formats, sizes, compressibility and numbers of images, or is a body of
another kind. With --videos, it is a request with mutated video files, or with files that name a
file and an address that nothing may open, to the gateway or to Triton's HTTP. A healthy client asks
about pictures meanwhile. The longest waits are listed.

usage: python -m tests.programs.bombs --count 200 --seed 1 --json waits.json
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from tests.support.gateway import Gateway, running
from tests.support.hostile_images import flat_png, jpeg_with_scans, run_length_bmp, tiff_with_tile
from tests.support.polling import until
from tests.support.triton_client import picture, serving
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

Bomb = Callable[[random.Random], tuple[str, dict[str, Any]]]

CHAT, GENERATE = "/v1/chat/completions", "/v2/models/video_analytics/generate"
MAX_BODY = 60 * 1024**2
MEGAPIXELS = (0.1, 1, 4, 10, 25, 39)
NUMBERS = (1, 2, 8, 64)
NOISY_MEGAPIXELS = 2.0  # Larger noise takes long to draw.


def encoded(draw: random.Random, format: str, megapixels: float) -> bytes:
    """Return one picture, flat or noisy."""
    if noisy := draw.random() < 0.3:
        megapixels = min(megapixels, NOISY_MEGAPIXELS)
    width = int((megapixels * 1e6 * draw.choice((0.2, 1, 5))) ** 0.5)
    height = int(megapixels * 1e6 / width)
    shape = (height, width, 3)
    pixels = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, shape, np.uint8)
    image = Image.fromarray(pixels) if noisy else Image.new("RGB", (width, height), (9, 90, 200))
    options: dict[str, dict[str, Any]] = {
        "JPEG": {"progressive": draw.random() < 0.5},
        "TIFF": {"compression": draw.choice(("tiff_lzw", "tiff_adobe_deflate", "packbits"))},
        "WEBP": {"lossless": draw.random() < 0.5, "method": 0},
        "PNG": {"compress_level": 1},
    }
    content = io.BytesIO()
    image.save(content, format, **options.get(format, {}))
    return content.getvalue()


SPECIAL: dict[str, Callable[[random.Random], bytes]] = {
    "scans": lambda draw: jpeg_with_scans(draw.choice((500, 2000, 5000)), draw.choice((50, 3000))),
    "runs": lambda draw: run_length_bmp(draw.choice((1000, 6000)), draw.choice((1000, 3000))),
    "tile": lambda draw: tiff_with_tile(16, draw.choice((2048, 8192, 16384))),
    "flat": lambda draw: flat_png(3200, 3125),
}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", *SPECIAL)


def image_bomb(draw: random.Random) -> tuple[str, dict[str, Any]]:
    format, megapixels, count = draw.choice(FORMATS), draw.choice(MEGAPIXELS), draw.choice(NUMBERS)
    data = SPECIAL[format](draw) if format in SPECIAL else encoded(draw, format, megapixels)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    if (count := min(count, MAX_BODY // len(url))) == 0:
        return image_bomb(draw)  # The gateway takes no such body.
    what = f"{count} x {format} of {len(data)} bytes, up to {megapixels:g} megapixels"
    return what, chat([{"type": "image_url", "image_url": {"url": url}}] * count)


def clip_bomb(draw: random.Random) -> tuple[str, dict[str, Any]]:
    format, megapixels = draw.choice(("JPEG", "WEBP")), draw.choice(MEGAPIXELS)
    frame = base64.b64encode(encoded(draw, format, megapixels)).decode()
    count = max(1, min(draw.choice((2, 16, 64)), MAX_BODY // len(frame)))
    url = "data:video/jpeg;base64," + ",".join([frame] * count)
    what = f"a clip of {count} {format} frames of {megapixels:g} megapixels"
    return what, chat([{"type": "video_url", "video_url": {"url": url}}])


def body_bomb(draw: random.Random) -> tuple[str, dict[str, Any]]:
    size = draw.choice((2**16, 2**20, 2**24, 2**25, MAX_BODY))
    kind = draw.choice(("text", "key", "value", "url", "commas", "escapes"))
    body = chat([{"type": "text", "text": "?"}])
    if kind == "text":
        body = chat([{"type": "text", "text": "a " * (size // 2)}])
    elif kind == "url":
        url = "data:image/png;base64," + "A" * size
        body = chat([{"type": "image_url", "image_url": {"url": url}}])
    elif kind == "commas":
        body["stop"] = [0] * min(size // 4, 200_000)
    else:
        values = {"key": {"a" * size: 1}, "value": {"seed": "9" * size}}
        body |= values.get(kind, {"user": '"\\' * (size // 4)})
    return f"a body with {kind} of {size} bytes", body


class Videos:
    """Source of requests with one to four video files, mutated or `traps`, for both doors.

    large: whether some files have the size of a camera's pictures.
    """

    def __init__(self, draw: random.Random, traps: Mapping[str, bytes], *, large: bool) -> None:
        from tests.support.video_files import mutated, pictures, video

        kinds = ("h264 mp4", "h264 ts", "h265 mkv", "vp9 webm", "av1 mkv", "mjpeg mov")
        self._files = {kind: video(*kind.split()) for kind in kinds}
        if large:
            frames = pictures(24, 1920, 1080)
            self._files |= {f"1080p {k}": video(*k.split(), frames=frames) for k in kinds}
        self._traps = traps
        self._mutated = partial(mutated, draw=np.random.default_rng(draw.randrange(2**32)))

    def __call__(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        known = self._traps if draw.random() < 0.2 else self._files
        kinds = draw.choices([*known], k=draw.choice((1, 1, 1, 2, 4)))
        files = [
            known[kind] if draw.random() < 0.2 else self._mutated(known[kind]) for kind in kinds
        ]
        texts = [base64.b64encode(data).decode() for data in files]
        sampling = {"media_io_kwargs": {"video": {"num_frames": draw.choice((1, 2, 4, 12, -1))}}}
        what = f"{', '.join(kinds)} of {sum(map(len, files))} bytes, {sampling}"
        if draw.random() < 0.5:
            inputs: dict[str, Any] = {"text_input": "?", "task": "video", "video": texts}
            return what, inputs | {"sampling_parameters": json.dumps(sampling)}
        urls = [{"url": f"data:video/mp4;base64,{text}"} for text in texts]
        return what, chat([{"type": "video_url", "video_url": url} for url in urls]) | sampling


def chat(parts: list[dict[str, Any]]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"model": "base", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


class Healthy:
    """A client that asks one question after another. worst: longest wait since `restart`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.worst, self.answered = 0.0, 0
        self.faults: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.02):
            number += 1
            colour = (number % 251, number // 251 % 251, 77)
            url = "data:image/png;base64," + base64.b64encode(picture(colour)).decode()
            body = chat([{"type": "image_url", "image_url": {"url": url}}])
            start = time.monotonic()
            status, answer = self._gateway.http(CHAT, json.dumps(body).encode())
            self.worst = max(self.worst, time.monotonic() - start)
            if status != 200:
                self.faults.append(f"{status}: {answer[:200]}")
            self.answered += 1

    def settle(self) -> None:
        """Wait until the question that waits now has been answered."""
        before = self.answered
        until(lambda: self.answered > before, seconds=60)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def attack(
    gateway: Gateway, triton: Gateway, count: int, draw: random.Random, kinds: Sequence[Bomb]
) -> list[dict[str, Any]]:
    """Send bombs one after another. Return what each was, its answer, and the longest wait.

    triton: the server's HTTP address, for bombs with its inputs.
    """
    healthy, found = Healthy(gateway), []
    try:
        for number in range(count):
            what, body = draw.choice(kinds)(draw)
            door, path = (gateway, CHAT) if "messages" in body else (triton, GENERATE)
            content = json.dumps(body).encode()
            time.sleep(0.2)
            healthy.worst, start = 0.0, time.monotonic()
            try:
                status, answer = door.http(path, content)
            except OSError as error:  # It took too long, or was closed.
                status, answer = 0, repr(error)
            seconds = time.monotonic() - start
            healthy.settle()
            line = {"wait": round(healthy.worst, 3), "seconds": round(seconds, 2), "bomb": what}
            line |= {"door": path, "status": status, "answer": answer[:300]}
            found.append(line | {"answer_bytes": len(answer)})
            print(number, json.dumps(found[-1]), answer[:160] if status >= 500 else "", flush=True)
    finally:
        healthy.close()
    assert not healthy.faults, healthy.faults[:5]
    return found


def resources(server: TritonServer) -> dict[str, tuple[int, int]]:
    """Return memory in MiB and number of descriptors of each process, by its number and name."""
    root = psutil.Process(server.pid)
    return {
        f"{process.pid} {process.name()}": (process.memory_info().rss >> 20, process.num_fds())
        for process in (root, *root.children(recursive=True))
    }


def main() -> None:
    """Attack the demo model, and print the worst ten waits."""
    from tools.demo.build import build

    parser = argparse.ArgumentParser(prog="python -m tests.programs.bombs", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--videos", action="store_true", help="send video files only")
    parser.add_argument("--decode-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = {"model": str(build(scratch / "checkpoint"))}
        limits = {"max_decode_seconds": arguments.decode_seconds}
        options = ServerOptions(model_json=model | {"limits": limits}, log=scratch / "server.log")
        draw, kinds = random.Random(arguments.seed), [image_bomb] * 3 + [clip_bomb, body_bomb]
        with ExitStack() as stack:
            if arguments.videos:
                from tests.support.video_traps import Trap, lures

                trap = stack.enter_context(closing(Trap(scratch)))
                kinds = [Videos(draw, lures(trap), large=True)]
            server = stack.enter_context(serving(options))
            gateway = stack.enter_context(running(server.grpc_url, scratch))
            before = resources(server)
            triton = Gateway(gateway.process, server.http_url, gateway.log)
            found = attack(gateway, triton, arguments.count, draw, kinds)
            print(
                f"memory in MiB and descriptors of each process: {before}, then {resources(server)}"
            )
            assert not arguments.videos or not trap.sprung(), "a file or an address was opened"
    worst = sorted(found, key=lambda line: -line["wait"])[:10]
    print("\n".join(f"{line['wait']:7.3f} s  {line['bomb']}" for line in worst))
    print(Counter((line["door"], line["status"]) for line in found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
