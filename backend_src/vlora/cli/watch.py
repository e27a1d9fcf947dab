"""`vlora watch`: ask about the video of cameras, each with an adapter of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import shorten
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vlora.cli.common import Command, console, make_table, option, print_plain, report_errors
from vlora.errors import ServerError, VLoraError
from vlora.file_names import printable

if TYPE_CHECKING:
    from vlora.watch.asking import Analytics
    from vlora.watch.config import Camera, Cameras
    from vlora.watch.desk import AlertDesk
    from vlora.watch.run import Watch, Watched
    from vlora.watch.sinks import SinkOptions

app = typer.Typer(add_completion=False)
LINE_SECONDS = 10.0  # Interval of the lines where the output is no terminal.
SHOW_SECONDS = 0.5  # Interval of updates of the live table.
STATE_WIDTH = 8  # Least columns of a state, such as `running`, in the live table.
WIDTH = 120  # Columns of the summary where the output is no terminal.
CLOSE_SECONDS = 5.0  # Time at the end for events that wait for their sinks.
CHECK_DEADLINE_MS = 120_000.0  # All cameras are tried at once, so their answers may be late.

# Packages that the extra `watch` installs, by the names of their imports.
PACKAGES = ("av", "fastapi", "grpc", "httptools", "pydantic", "tritonclient", "uvicorn", "yaml")

File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of cameras.")]
Grpc = Annotated[
    str | None,
    option("HOST:PORT", "gRPC address of the server. Default: `server` of FILE.", "--grpc"),
]
Page = Annotated[
    str | None, option("HOST:PORT", "Address of the page. Default: `page` of FILE.", "--page")
]
Log = Annotated[
    Path | None, option("FILE", "Append a JSON line for each answer to this file.", "--jsonl")
]
Seconds = Annotated[
    float | None, option("SECONDS", "End after this time. Default: on Ctrl-C.", min=0.1)
]
Check = Annotated[
    bool, option(None, "Try the server, sinks and each camera once, and end.", "--check")
]


def check_installed() -> None:
    """Raise ServerError if a package of the extra `watch` is missing."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ServerError(
                f"the package {name} is missing; install it with: pip install 'vlora[watch]'"
            )


@app.command(cls=Command)
def watch(
    file: File,
    grpc: Grpc = None,
    page: Page = None,
    jsonl: Log = None,
    seconds: Seconds = None,
    check: Check = False,
) -> None:
    """Ask a V-LoRA server about the video of cameras until Ctrl-C.

    FILE names the cameras: RTSP, HTTP and HLS streams, video files, devices and
    folders. Each has its adapter, question, gate and alerts; docs/video.md lists
    the keys. A changed FILE takes effect within two seconds, camera by camera.
    Passwords come from variables of the environment.
    """
    with report_errors():
        check_installed()
        from vlora.watch.config import read_cameras

        cameras = read_cameras(file).changed(grpc, page)
        failed = check_once(cameras) if check else run(file, cameras, jsonl, seconds)
        if failed:
            raise typer.Exit(1)


def run(file: Path, cameras: Cameras, jsonl: Path | None, seconds: float | None) -> bool:
    """Watch the cameras, and print a summary. Return whether any had errors and no answers."""
    with ExitStack() as stack:
        log = None if jsonl is None else stack.enter_context(open_log(jsonl))

        def record(answer: dict[str, Any]) -> None:
            if log is not None:
                log.write(json.dumps(answer) + "\n")
                log.flush()

        watched = asyncio.run(watch_cameras(file, cameras, record, seconds))
    print_summary(watched)
    counts = [one.counts for one in watched]
    return any(one.errors and not one.answered for one in counts)


def open_log(path: Path) -> IO[str]:
    try:
        return path.open("a")
    except OSError as error:
        raise ServerError(f"cannot write {path}: {error.strerror}") from error


async def watch_cameras(
    file: Path | None,
    cameras: Cameras,
    record: Callable[[dict[str, Any]], None],
    seconds: float | None,
) -> Sequence[Watched]:
    """Watch until all sources have ended, a signal, or for so many seconds. Return all cameras."""
    from vlora.watch.asking import Analytics
    from vlora.watch.desk import open_desk, removed_sinks
    from vlora.watch.page import WatchPage
    from vlora.watch.run import Watch

    async with Analytics(cameras.server) as analytics:
        await analytics.check()
        with ExitStack() as stack:
            desk = open_desk(cameras.sinks, cameras.retention)
            stack.callback(desk.close, CLOSE_SECONDS)
            for sentence in removed_sinks(cameras.sinks, cameras.retention, clean=True):
                print_plain(sentence)
            watch = Watch(file, cameras, analytics, desk, print_plain, record)
            if cameras.page is not None:
                page = WatchPage(cameras.page, watch.views, desk)
                stack.callback(page.close)
                print_plain(f"page: {page.url}")
            await _until_the_end(watch, desk, seconds, shows_table(cameras.sinks))
    return watch.watched()


async def _until_the_end(
    watch: Watch, desk: AlertDesk, seconds: float | None, is_table: bool
) -> None:
    """Run until all sources have ended, a signal, or for so many seconds."""
    running = asyncio.create_task(watch.run())
    showing = asyncio.create_task(_show(watch, desk, is_table))
    loop = asyncio.get_running_loop()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, running.cancel)
    try:
        await asyncio.wait([running, showing], timeout=seconds, return_when="FIRST_COMPLETED")
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()
    finally:
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(one)
        showing.cancel()
        await asyncio.wait([showing])
    if not showing.cancelled():
        showing.result()


def shows_table(sinks: Sequence[SinkOptions]) -> bool:
    """Return whether the output is a terminal to which no sink writes, as it would over a table."""
    writes = any(one.kind == "jsonl" and str(one.path) == "-" for one in sinks)
    return console.is_terminal and not writes


async def _show(watch: Watch, desk: AlertDesk, is_table: bool) -> None:
    from vlora.watch.table import line, overload_now

    if not is_table:
        while True:
            await asyncio.sleep(LINE_SECONDS)
            print_plain(line(watch.watched(), desk.counts()))
            if sentence := overload_now(watch.watched()):
                print_plain(sentence)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            # The totals come first, because a terminal cuts a table of many cameras at its end.
            lines = (line(watch.watched(), desk.counts()), overload_now(watch.watched()))
            totals = Text("\n".join(filter(None, lines)))
            live.update(Group(totals, live_table(watch.watched())), refresh=True)
            await asyncio.sleep(SHOW_SECONDS)


def live_table(watched: Sequence[Watched]) -> Table:
    from vlora.watch.table import LIVE_HEADS, RIGHT, live_row, shown_heads

    rows = [live_row(one) for one in watched]
    heads = shown_heads(rows)
    table = make_table(heads, RIGHT)
    table.collapse_padding = True
    for column in table.columns:  # Texts are cut, so that each camera has one line.
        column.no_wrap = column.header not in ("state", "answer")
    for row in rows:
        cells = dict(zip(LIVE_HEADS, row, strict=True))
        table.add_row(
            *(Text(printable(cells[head]), no_wrap=True, overflow="ellipsis") for head in heads)
        )
    return table


def print_summary(watched: Sequence[Watched]) -> None:
    from vlora.watch.table import RIGHT, SUMMARY_HEADS, overload, summary_row

    table = make_table(SUMMARY_HEADS, RIGHT)
    for one in watched:
        table.add_row(*summary_row(one))
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    if sentence := overload(watched):
        print_plain(sentence)


def check_once(cameras: Cameras) -> bool:
    """Try the server, sinks, page and each camera. Return whether any failed."""
    return asyncio.run(_check_all(cameras))


async def _check_all(cameras: Cameras) -> bool:
    from vlora.watch.asking import Analytics
    from vlora.watch.desk import removed_sinks

    async with Analytics(cameras.server) as analytics:
        fault = await _fault_of(analytics.check())
        print_plain(f"server {cameras.server}: {fault or 'ready'}")
        faults = [fault]
        for name, fault in _setting_faults(cameras):
            print_plain(f"{name}: {fault}")
            faults.append(fault)
        asked = None if faults[0] else analytics
        streams = {one.stream: one for one in cameras.cameras.values()}
        # The questions of a stream share its picture.
        pictures = {
            stream: asyncio.create_task(asyncio.to_thread(_first_picture, one))
            for stream, one in streams.items()
        }
        tries = [
            asyncio.create_task(_try_camera(one, pictures[one.stream], asked))
            for one in cameras.cameras.values()
        ]
        for name, one in zip(cameras.cameras, tries, strict=True):
            faults.append(await _fault_of(one))
            print_plain(f"{name}: {faults[-1] or one.result()}")
    for sentence in (*cameras.doubled(), *removed_sinks(cameras.sinks, cameras.retention)):
        print_plain(sentence)
    return any(faults)


async def _fault_of(work: Awaitable[Any]) -> str:
    """Return the message of the error of `work`; "" if it has none."""
    try:
        await work
    except (ServerError, VLoraError) as error:
        return str(error)
    return ""


def _setting_faults(cameras: Cameras) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with sinks and page, such as a password that the environment lacks."""
    settings: dict[str, Callable[[], Any]] = {f"sink {s.name}": s.open for s in cameras.sinks}
    if cameras.page is not None:
        settings["page"] = cameras.page.address
    for name, open_setting in settings.items():
        try:
            open_setting()
        except ServerError as error:
            yield name, str(error)


async def _try_camera(camera: Camera, picture: Awaitable[Any], analytics: Analytics | None) -> str:
    """Ask about the first picture of a camera. Return what it shows and the answer.

    picture: see `_first_picture`. Raises ServerError and VLoraError.
    """
    size, file = await picture
    shown = f"{camera.shown_url} shows {size[0]} x {size[1]}"
    if analytics is None:
        return shown
    # As many frames as in a chunk, because their tokens have to fit into the context.
    patient = camera.model_copy(update={"deadline_ms": CHECK_DEADLINE_MS})
    began = time.monotonic()
    result = await analytics.ask(patient, f"check-{uuid.uuid4().hex}", [file] * camera.frames)
    answer = shorten(result["text"], 60, placeholder="…") or "(nothing)"
    return f"{shown}, answered in {time.monotonic() - began:.2f} s: {answer}"


def _first_picture(camera: Camera) -> tuple[tuple[int, int], bytes]:
    """Return the size of the first frame, and what is sent of it as JPEG. Raises SourceError."""
    from vlora.watch.camera import open_source
    from vlora.watch.counts import StreamCounts
    from vlora.watch.pixels import View, encoded
    from vlora.watch.ring import PacketRing
    from vlora.watch.sources import SourceError

    source = open_source(camera, PacketRing(0.0, 0.0), StreamCounts())
    try:
        for frame in source.frames(lambda: 0.0):
            return frame.size, encoded(frame.read(View.of(camera.regions, camera.size)))
    finally:
        source.close()
    raise SourceError(f"{camera.shown_url} has no frames")
