"""A server under attack: healthy clients with known answers, and hostile clients.

Quiet and hostile phases alternate on one server under the same healthy load, so that a slow machine
affects both. Hostile clients send images that keep a codec busy, numbers of absurd size, and
uploads that never end. Meanwhile an adapter folder is replaced by versions that are too large, lack
their head, are broken, or are half written. Another is exchanged for one of two versions, by
renames and removals while it is read, and each answer must be that of one version. For a while
files cannot be opened.

usage: python -m tests.programs.hostile_hour --cycles 5 --seconds 30 --json figures.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support.hostile_images import flat_png, jpeg_with_scans, run_length_bmp, tiff_with_tile
from tests.support.make_adapters import ATTENTION, FEED_FORWARD, AdapterSpec, make_adapters
from tests.support.triton_client import Asker, Refused, asking, picture, serving, to_inputs
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

VICTIM, EXCHANGED = "victim", "exchanged"
HEALTHY_CLIENTS = 4
PAUSE_SECONDS = 0.02
"""Pause of a client between two requests."""

BOMB_SECONDS = 300.0
"""Time limit of a hostile request. Decoding a bomb takes long, because it has a low priority."""

POOL = {"adapter_pool_bytes": 4_000_000, "kv_cache_tokens": 4096}
"""Options with which the large version of the adapter exceeds the pool."""

HEAD = {
    "tasks": ["classify", "vqa"],
    "head": {"labels": ["cat", "dog"], "tasks": ["classify"]},
}
VERSIONS = (
    AdapterSpec("sound", 8, ATTENTION, description=HEAD, labels=("cat", "dog")),
    AdapterSpec("other", 8, ATTENTION, description=HEAD, labels=("cat", "dog")),
    AdapterSpec("headless", 8, ATTENTION),
    AdapterSpec("large", 256, ATTENTION + FEED_FORWARD, description=HEAD, labels=("cat", "dog")),
)
SOUND = ("sound", "other")
WEIGHTS = "adapter_model.safetensors"

ABSURD: tuple[Any, ...] = (
    0, -1, 1e308, -1e308, 1e-308, 10**19, -(10**19), 2**63, 2**31, "1e400", "-0", "0x10", True,
    [], {}, None, "nan", "Infinity", "9" * 5000, 0.1 + 0.2, -(2**63), 2**64,
)  # fmt: skip
NUMBERS = (
    "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "max_tokens", "min_tokens", "logprobs", "priority", "deadline_ms", "stop_token_ids",
    "n", "temperature",
)  # fmt: skip
TEMPERATURES = (0, 1e-300, 0.01, 1, 100)


@dataclass
class Phase:
    """Healthy requests of some phases: seconds of each, and descriptions of wrong answers."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.seconds, percent))


@dataclass
class Figures:
    """The results of all cycles.

    outcomes: numbers of answers and errors of the hostile requests, by client and code.
    descriptors, megabytes: open file descriptors and resident memory of each model's process after
        each cycle.
    """

    quiet: Phase
    hostile: Phase
    outcomes: Counter[str]
    descriptors: dict[str, list[int]]
    megabytes: dict[str, list[int]]

    def ratio(self, percent: float) -> float:
        """Return a percentile of healthy requests in hostile phases over that in quiet phases."""
        return self.hostile.percentile(percent) / self.quiet.percentile(percent)

    def summary(self) -> dict[str, Any]:
        phases = {"quiet": self.quiet, "hostile": self.hostile}
        return {
            name: {
                "requests": len(phase.seconds),
                "wrong": len(phase.wrong),
                **{f"p{p}_ms": round(1e3 * phase.percentile(p), 1) for p in (50, 90, 99)},
            }
            for name, phase in phases.items()
        } | {
            **{f"p{p}_ratio": round(self.ratio(p), 2) for p in (50, 90, 99)},
            "outcomes": dict(sorted(self.outcomes.items())),
            "descriptors": self.descriptors,
            "megabytes": self.megabytes,
        }


class HostileHour:
    """Healthy and hostile clients of one server. All their threads end with each phase."""

    def __init__(self, server: TritonServer, ask: Asker, adapters: Path, versions: Path) -> None:
        """Prepare clients. adapters: served folder. versions: folder of the files of `VERSIONS`."""
        self._server = server
        self._ask = ask
        self._adapters = adapters
        self._versions = versions
        self._stop = threading.Event()
        self._outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        cases = list(itertools.product(NUMBERS, ABSURD, TEMPERATURES))
        random.Random(0).shuffle(cases)
        self._numbers = itertools.cycle(cases)
        self._questions = list(self._healthy_questions())
        self._answers = [self._answer(question) for question in self._questions]
        self._of_versions = {self._ask_about(version) for version in SOUND}
        bombs = [
            [jpeg_with_scans(2000, 3000)],
            [run_length_bmp(3000, 1000)],
            [tiff_with_tile(16, 16384)],
            [flat_png(3200, 3125)] * 64,
        ]
        # The clients share the cores with the server, so they prepare their requests only once.
        prepared = [to_inputs({"image": bomb})[0] for bomb in bombs]
        models = ("video_analytics", "lmm_unary")
        self._next_bomb = itertools.cycle(itertools.product(models, prepared))

    def run(self, cycles: int, seconds: float) -> Figures:
        """Alternate quiet and hostile phases of this duration."""
        models = self._server.models
        left: tuple[dict[str, list[int]], ...] = ({m: [] for m in models}, {m: [] for m in models})
        figures = Figures(Phase(), Phase(), self._outcomes, *left)
        hostile = [
            *[self._send_bombs] * 2,
            self._send_numbers,
            self._replace_adapter,
            self._ask_victim,
            self._exchange_adapter,
            self._ask_exchanged,
            self._use_up_files,
            *[self._upload_slowly] * 2,
        ]
        for _ in range(cycles):
            self._phase(figures.quiet, [], seconds)
            self._phase(figures.hostile, hostile, seconds)
            for model, pid in models.items():
                process = psutil.Process(pid)
                figures.descriptors[model].append(process.num_fds())
                figures.megabytes[model].append(process.memory_info().rss >> 20)
        return figures

    def _phase(self, phase: Phase, hostile: Sequence[Callable[[], None]], seconds: float) -> None:
        self._stop.clear()
        measured = threading.Event()
        clients = [lambda: self._be_healthy(phase, measured)] * HEALTHY_CLIENTS
        threads = [threading.Thread(target=one) for one in (*clients, *hostile)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        measured.set()
        self._stop.set()
        for thread in threads:
            thread.join()

    # -- healthy clients ---------------------------------------------------------------------

    @staticmethod
    def _healthy_questions() -> Iterator[dict[str, Any]]:
        keys = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        image = picture((10, 90, 200))
        for adapter in ({}, {"lora_name": "attention-r4"}, {"lora_name": "all-r8"}):
            sampling = {"sampling_parameters": {**keys, **adapter}}
            yield {"model": "lmm_unary", "text_input": "what is it?", **sampling}
            yield {"model": "video_analytics", "text_input": "what?", "image": image, **sampling}
        yield {"model": "visual_retrieval", "text_input": "what?", "image": image, **sampling}
        head = {"sampling_parameters": {"lora_name": "head-r8"}, "task": "classify"}
        yield {"model": "video_analytics", "text_input": "", "image": image, **head}

    def _answer(self, question: dict[str, Any]) -> tuple[Any, ...]:
        values = dict(question)
        model = values.pop("model")
        if model == "visual_retrieval":
            responses = self._ask.stream(model, **values)
            return ("".join(response["text_output"] for response in responses),)
        response = self._ask.once(model, **values)
        if model == "lmm_unary":
            return (response["text_output"],)
        result = json.loads(response["result"])
        return result["text"], json.dumps(result["images"])

    def _be_healthy(self, phase: Phase, measured: threading.Event) -> None:
        order = random.sample(range(len(self._questions)), len(self._questions))
        for index in itertools.cycle(order):
            start = time.monotonic()
            try:
                right = self._answer(self._questions[index]) == self._answers[index]
                fault = "" if right else f"question {index}: another answer"
            except Exception as error:
                fault = f"question {index}: {error!r}"
            if measured.is_set():
                return
            with self._lock:
                phase.seconds.append(time.monotonic() - start)
                if fault:
                    phase.wrong.append(fault)
            time.sleep(PAUSE_SECONDS)

    # -- hostile clients ---------------------------------------------------------------------

    def _hostile(
        self, name: str, model: str, right: Collection[str] | None = None, **values: Any
    ) -> None:
        """Send a request, and count its outcome: answered, an error's code, or what was wrong.

        right: texts that are right answers; None for any.
        """
        try:
            answer = self._ask.once(model, timeout=BOMB_SECONDS, **values)
            is_right = right is None or answer["text_output"] in right
            outcome = "answered" if is_right else f"uncoded: wrong {answer['text_output']!r}"
        except Refused as error:
            known = [code for code in CODES if f"{code}: " in error.message]
            outcome = known[0] if known else f"uncoded: {error.message[:200]}"
            if outcome == "INTERNAL":
                outcome = error.message[:200]
        with self._lock:
            self._outcomes[f"{name} {outcome}"] += 1

    def _send_bombs(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                model, bomb = next(self._next_bomb)
            self._hostile("bomb", model, text_input="?", image=bomb)

    def _send_numbers(self) -> None:
        while not self._stop.is_set():
            key, value, temperature = next(self._numbers)
            keys = {"max_tokens": 3, "temperature": temperature, key: value}
            self._hostile("number", "lmm_unary", text_input="hello", sampling_parameters=keys)
            time.sleep(PAUSE_SECONDS)

    def _ask_victim(self) -> None:
        for task in itertools.cycle(("classify", "vqa", None)):
            if self._stop.is_set():
                return
            keys = {"lora_name": VICTIM, "max_tokens": 4, "temperature": 0}
            question = {"text_input": "hello", "task": task, "sampling_parameters": keys}
            self._hostile("victim", "lmm_unary", **question)
            time.sleep(PAUSE_SECONDS)

    @staticmethod
    def _about(adapter: str) -> dict[str, Any]:
        keys = {"lora_name": adapter, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return {"text_input": "what is it?", "task": "vqa", "sampling_parameters": keys}

    def _ask_about(self, adapter: str) -> str:
        return str(self._ask.once("lmm_unary", **self._about(adapter))["text_output"])

    def _ask_exchanged(self) -> None:
        while not self._stop.is_set():
            self._hostile("exchanged", "lmm_unary", self._of_versions, **self._about(EXCHANGED))
            time.sleep(PAUSE_SECONDS)

    def _exchange_adapter(self) -> None:
        """Exchange the folder many times in a row, then leave it as long as the server waits."""
        folder, staged, old = (self._adapters / n for n in (EXCHANGED, ".staged", ".old"))
        for count, version in enumerate(itertools.cycle(SOUND)):
            shutil.copytree(self._versions / version, staged)
            if count % 3:
                folder.rename(old)
                staged.rename(folder)
                shutil.rmtree(old)
            else:
                shutil.rmtree(folder)
                staged.rename(folder)
            # The server reads a folder whose files have not changed for a second.
            if self._stop.wait(0.01 if count % 20 else random.uniform(0.9, 1.9)):
                return

    def _replace_adapter(self) -> None:
        """Put one version after another into the folder, at last a valid one."""
        folder = self._adapters / VICTIM
        for place in itertools.cycle(
            (
                lambda: self._copy("sound", folder),
                lambda: self._copy("large", folder),
                lambda: self._copy("headless", folder),
                lambda: self._write_slowly(folder),
                lambda: (folder / WEIGHTS).write_bytes(b"\xff" * 4096),
                lambda: (folder / "adapter_config.json").write_text('{"peft_type": '),
                lambda: self._put_fifo(folder / WEIGHTS),
                lambda: self._put_sparse(folder / WEIGHTS),
                lambda: self._put_loop(folder / "adapter_config.json"),
                lambda: shutil.rmtree(folder, ignore_errors=True),
            )
        ):
            place()
            # The server reads a folder whose files have not changed for a second.
            if self._stop.wait(1.5):
                self._copy("sound", folder)
                return

    def _copy(self, version: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._versions / version, folder)

    def _write_slowly(self, folder: Path) -> None:
        self._copy("sound", folder)
        content = (folder / WEIGHTS).read_bytes()
        with (folder / WEIGHTS).open("wb") as file:
            for first in range(0, len(content) // 2, len(content) // 20):
                file.write(content[first : first + len(content) // 20])
                file.flush()
                if self._stop.wait(0.1):
                    return

    def _put_fifo(self, path: Path) -> None:
        self._copy("sound", path.parent)
        path.unlink()
        os.mkfifo(path)

    def _put_sparse(self, path: Path) -> None:
        self._copy("sound", path.parent)
        path.unlink()
        with path.open("wb") as file:
            file.truncate(2**40)

    def _put_loop(self, path: Path) -> None:
        self._copy("sound", path.parent)
        path.unlink()
        path.symlink_to(path.name)

    def _use_up_files(self) -> None:
        """Leave the engine's process without file descriptors for half of the time."""
        engine = psutil.Process(self._server.models["lmm"])
        soft, hard = engine.rlimit(resource.RLIMIT_NOFILE)
        while not self._stop.wait(1.0):
            engine.rlimit(resource.RLIMIT_NOFILE, (engine.num_fds(), hard))
            self._stop.wait(1.0)
            engine.rlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _upload_slowly(self) -> None:
        """Send a request byte by byte over HTTP, and over gRPC's port."""
        body = b"POST /v2/models/lmm/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n{"
        urls = itertools.cycle([(self._ask.http_url, body), (self._ask.grpc_url, PREFACE)])
        for url, start in urls:
            host, port = url.rsplit(":", 1)
            try:
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    connection.sendall(start)
                    for _ in range(100):
                        if self._stop.wait(0.1):
                            return
                        connection.sendall(b" ")
            except OSError:
                # The server may close the connection.
                if self._stop.wait(0.1):
                    return


CODES = ("INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "UNSUPPORTED", "INTERNAL")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@contextmanager
def hostile_hour(
    checkpoint: Path, adapters: Path, scratch: Path, **options: Any
) -> Iterator[HostileHour]:
    """Start a server with copies of some adapters in `scratch`, and yield its `HostileHour`.

    options: keys of `model.json`.
    """
    versions = make_adapters(checkpoint, scratch / "versions", VERSIONS, seed=9)
    served = scratch / "adapters"
    shutil.copytree(adapters, served)
    for name, version in ((VICTIM, "sound"), (EXCHANGED, "sound"), *zip(SOUND, SOUND, strict=True)):
        shutil.copytree(versions / version, served / name)
    paths = {"model": str(checkpoint), "adapters": str(served)}
    server_options = ServerOptions(
        model_json={**paths, **POOL, **options}, log=scratch / "tritonserver.log"
    )
    with serving(server_options) as server, asking(server) as ask:
        yield HostileHour(server, ask, served, versions)


def main() -> None:
    """Run the cycles and print the figures."""
    from tools.demo.build import build

    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.hostile_hour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cycles", type=int, default=5, metavar="N", help="pairs of phases")
    parser.add_argument(
        "--seconds", type=float, default=30, metavar="SECONDS", help="duration of a phase"
    )
    parser.add_argument(
        "--decode-seconds",
        type=float,
        default=10,
        metavar="SECONDS",
        help="the server's limit max_decode_seconds",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        checkpoint = build(scratch / "checkpoint")
        adapters = make_adapters(checkpoint, scratch / "given")
        limits = {"max_decode_seconds": arguments.decode_seconds}
        with hostile_hour(checkpoint, adapters, scratch, limits=limits) as hour:
            figures = hour.run(arguments.cycles, arguments.seconds)
    text = json.dumps(figures.summary(), indent=1)
    print(text)
    print("\n".join(sorted({*figures.quiet.wrong, *figures.hostile.wrong})[:20]))
    if arguments.json:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
