"""Analyse live video: several streams at once, one chunk per second and stream.

Every second each stream sends a few frames of that second to the ensemble `video_analytics` and
prints the answer. --jsonl also writes all answers to a file. The server cancels a chunk that passes
its deadline, or that still waits when the next chunk of its stream arrives. The client counts
these chunks as dropped.

sources:
  a video file (needs the package av), a folder of frames in the order of their names, or
  `camera`: a synthetic camera that knows the true motion, so that answers can be checked

examples:
  python clients/video_analytics.py camera --streams 4 --seconds 10
  python clients/video_analytics.py clip.mp4 --adapter actions --jsonl answers.jsonl
  python clients/video_analytics.py frames/ --fps 25 --send raw
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run as a file

import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

from clients import common
from clients.common import ClientError
from clients.frames import Chunk, encode_frame, open_source
from clients.shared_frames import SharedFrames
from clients.stream_log import StreamLog, describe, summarise

MODEL = "video_analytics"
CHUNK_SECONDS = 1.0
DRAIN_SECONDS = 10.0
# Refusals of an invalid request, whose retry would fail too, and drops of a superseded or late one.
REFUSAL = re.compile(r"\b(INVALID_ARG|NOT_FOUND|UNSUPPORTED): ")
DROP = re.compile(r"\bCANCELLED: .*(superseded|past its deadline)")
MAX_IN_FLIGHT = 4  # Maximum number of unanswered chunks of one stream. Further chunks are dropped.


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "a video file, a folder of frames, or `camera`"
    parser.add_argument("source", metavar="SOURCE", help=text)
    text = "text, if the task needs one"
    parser.add_argument("prompt", nargs="?", default="", metavar="PROMPT", help=text)
    common.add_server_arguments(parser)
    parser.set_defaults(task="video")
    for name, word, default, text in (
        ("--streams", "N", 1, "number of streams (default: 1)"),
        ("--seconds", "SECONDS", 10, "seconds to run (default: 10)"),
        ("--fps", "N", 30, "frames per second of a folder or of the camera (default: 30)"),
        ("--frames", "N", 6, "frames sent of each second (default: 6)"),
    ):
        parser.add_argument(
            name, type=common.positive_number, default=default, metavar=word, help=text
        )
    parser.add_argument(
        "--send",
        choices=("png", "jpeg", "raw"),
        default="jpeg",
        help="format of the frames; raw sends pixels in shared memory, which needs a server on this"
        " machine with --allow-shared-memory (default: jpeg)",
    )
    text = "drop a chunk that has no answer after this time (default: 4000)"
    parser.add_argument("--deadline-ms", type=common.positive_number, metavar="MS", help=text)
    text = "also write every answer to this file"
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help=text)
    return parser.parse_args(arguments)


class Analysis:
    """All streams of one run, which share one connection."""

    def __init__(self, options: argparse.Namespace, client: Any, file: IO[str] | None) -> None:
        self._options = options
        self._client = client
        self._file = file
        self._shared: SharedFrames | None = None
        self._opening = asyncio.Lock()
        self._calls: set[asyncio.Future[Any]] = set()
        self._run = uuid.uuid4().hex
        self._deadline = options.deadline_ms or 1e3 * CHUNK_SECONDS * MAX_IN_FLIGHT
        self._knows_truth = options.task == "video" and options.adapter is None
        self.logs = [StreamLog() for _ in range(options.streams)]

    async def run(self) -> None:
        """Play every stream to its end, or until an error that the user can correct."""
        try:
            async with asyncio.TaskGroup() as streams:
                for stream in range(self._options.streams):
                    streams.create_task(self._play(stream))
        except ExceptionGroup as group:
            raise _first_leaf(group) from None
        finally:
            # Requests in flight may read the shared memory.
            if self._calls:
                await asyncio.wait(self._calls, timeout=DRAIN_SECONDS)
            if self._shared is not None:
                await self._shared.close()

    async def _play(self, stream: int) -> None:
        """Send one chunk per second. The streams start at different moments of a second."""
        options, log = self._options, self.logs[stream]
        chunks = open_source(options.source, options.fps, options.frames, stream).chunks()
        loop = asyncio.get_running_loop()
        start = loop.time() + CHUNK_SECONDS * stream / options.streams
        async with asyncio.TaskGroup() as requests:
            for second in range(options.seconds):
                chunk = await asyncio.to_thread(next, chunks)
                await asyncio.sleep(start + second * CHUNK_SECONDS - loop.time())
                if log.in_flight >= MAX_IN_FLIGHT:
                    log.dropped += 1
                    continue
                log.in_flight += 1
                requests.create_task(self._ask(stream, second, chunk))

    async def _ask(self, stream: int, second: int, chunk: Chunk) -> None:
        log = self.logs[stream]
        record: dict[str, Any] = {"stream": stream, "chunk": second, "time": time.time()}
        slot = None
        try:
            slot, inputs = await self._inputs(chunk, stream)
            start = time.perf_counter()
            answer = await self._call(inputs, self._stream_id(stream))
            latency = time.perf_counter() - start
            log.latencies.append(latency)
            record |= {"latency_ms": round(latency * 1e3, 2)}
            record |= {"result": json.loads(common.first_string(answer, "result"))}
            if self._knows_truth and chunk.truth is not None:
                log.known += 1
                log.right += record["result"]["text"].strip() == chunk.truth
                record |= {"truth": chunk.truth}
        except InferenceServerException as error:
            if DROP.search(str(error.message())):
                log.dropped += 1
                self._write(record | {"dropped": common.explain(error)})
                return
            log.errors += 1
            record |= {"error": common.explain(error)}
            # All requests have the same adapter and task, so a first refusal ends the run.
            if REFUSAL.search(str(error.message())) and not any(log.latencies for log in self.logs):
                self._write(record)
                raise ClientError(common.explain(error)) from error
        finally:
            log.in_flight -= 1
            if slot is not None and self._shared is not None:
                self._shared.release(slot)
        self._write(record)
        print(describe(record), flush=True)

    def _sampling(self, stream: int) -> str:
        return common.sampling_parameters(
            self._options.adapter,
            stream_id=self._stream_id(stream),
            supersede=True,
            deadline_ms=self._deadline,
        )

    def _stream_id(self, stream: int) -> str:
        return f"{self._run}-{stream}"

    async def _call(self, inputs: list[Any], stream_id: str) -> Any:
        """Return the answer to one request. The request continues if its stream ends early."""
        headers = common.routing_headers(self._options.adapter, stream_id)
        seconds = common.ANSWER_SECONDS
        call = asyncio.ensure_future(
            self._client.infer(MODEL, inputs, headers=headers, client_timeout=seconds)
        )
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def _inputs(self, chunk: Chunk, stream: int) -> tuple[int | None, list[Any]]:
        """Return the request's slot of shared memory, or None, and its inputs."""
        options, metadata = self._options, json.dumps({"stream": stream})
        named = {"sampling": self._sampling(stream), "task": options.task, "metadata": metadata}
        if options.send == "raw":
            shared = await self._shared_frames(chunk)
            slot, frames_raw = shared.acquire(chunk.frames)
            return slot, [*common.request_inputs(options.prompt, **named), frames_raw]
        format = options.send.upper()
        encoded = await asyncio.to_thread(
            lambda: [encode_frame(frame, format) for frame in chunk.frames]
        )
        inputs = common.request_inputs(options.prompt, **named)
        return None, [*inputs, common.string_input("frames", encoded)]

    async def _shared_frames(self, chunk: Chunk) -> SharedFrames:
        async with self._opening:
            if self._shared is None:
                clip_bytes = sum(frame.nbytes for frame in chunk.frames)
                slots = self._options.streams * MAX_IN_FLIGHT
                self._shared = SharedFrames(self._client, slots, clip_bytes)
                await self._shared.open()
            return self._shared

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def _open_for_writing(path: Path) -> IO[str]:
    try:
        return path.open("w")
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from error


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def analyse(options: argparse.Namespace) -> int:
    """Run all streams. Return 1 if any chunk had an error, otherwise 0. Raises ClientError.

    SIGTERM stops the run like Ctrl-C: no further chunk is sent, and answers in flight are awaited.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with ExitStack() as stack:
        file = stack.enter_context(_open_for_writing(options.jsonl)) if options.jsonl else None
        async with grpcclient.InferenceServerClient(options.url) as client:
            analysis = Analysis(options, client, file)
            show_summary = True
            try:
                await analysis.run()
            except ClientError:
                show_summary = any(log.latencies for log in analysis.logs)
                raise
            finally:
                if show_summary:
                    print(summarise(analysis.logs))
    return int(any(log.errors for log in analysis.logs))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    open_source(options.source, options.fps, options.frames, 0)
    common.connect(options.url, MODEL).close()
    try:
        return asyncio.run(analyse(options))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    common.run_main(main)
