"""Healthy requests beside one hostile request at a time, drawn within the limits of a gateway.

Each bomb is drawn from formats, sizes, compressibility and numbers of images, or is a body of
another kind. A healthy client asks about pictures meanwhile. The longest waits are listed.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.gateway import Gateway, running
from tests.support.hostile_images import flat_png, jpeg_with_scans, run_length_bmp, tiff_with_tile
from tests.support.polling import until
from tests.support.triton_client import picture, serving
from vlora.launcher.repository import ServerOptions

CHAT = "/v1/chat/completions"
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


def chat(parts: list[dict[str, Any]]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"model": "base", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


class Healthy:
    """A client that asks one question after another. worst: longest wait since `restart`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.worst, self.answered, self.faults = 0.0, 0, []
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


def attack(gateway: Gateway, count: int, seed: int) -> list[dict[str, Any]]:
    """Send bombs one after another. Return what each was, its answer, and the longest wait."""
    healthy, found = Healthy(gateway), []
    draw = random.Random(seed)
    try:
        for number in range(count):
            kind = draw.choice((image_bomb, image_bomb, image_bomb, clip_bomb, body_bomb))
            what, body = kind(draw)
            content = json.dumps(body).encode()
            time.sleep(0.2)
            healthy.worst, start = 0.0, time.monotonic()
            try:
                status, answer = gateway.http(CHAT, content)
            except OSError as error:  # It took too long, or was closed.
                status, answer = 0, repr(error)
            seconds = time.monotonic() - start
            healthy.settle()
            line = {"wait": round(healthy.worst, 3), "seconds": round(seconds, 2), "bomb": what}
            found.append(line | {"status": status, "answer_bytes": len(answer)})
            print(number, json.dumps(found[-1]), answer[:160] if status >= 500 else "", flush=True)
    finally:
        healthy.close()
    assert not healthy.faults, healthy.faults[:5]
    return found


def main() -> None:
    """Attack the demo model, and print the worst ten waits."""
    from tools.demo.build import build

    parser = argparse.ArgumentParser(prog="python -m tests.programs.bombs", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--decode-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = {"model": str(build(scratch / "checkpoint"))}
        limits = {"max_decode_seconds": arguments.decode_seconds}
        options = ServerOptions(model_json=model | {"limits": limits}, log=scratch / "server.log")
        with serving(options) as server, running(server.grpc_url, scratch) as gateway:
            found = attack(gateway, arguments.count, arguments.seed)
    worst = sorted(found, key=lambda line: -line["wait"])[:10]
    print("\n".join(f"{line['wait']:7.3f} s  {line['bomb']}" for line in worst))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
