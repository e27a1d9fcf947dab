"""`vlora watch`: ask about the video of cameras, each with an adapter of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from vlora.cli.common import Command, console, make_table, option, print_plain, report_errors
from vlora.errors import ServerError, VLoraError

if TYPE_CHECKING:
    from vlora.watch.config import Camera, Cameras
    from vlora.watch.desk import AlertDesk
    from vlora.watch.run import Watch, Watched

app = typer.Typer(add_completion=False)
LINE_SECONDS = 10.0  # Interval of the lines where the output is no terminal.
SHOW_SECONDS = 0.5  # Interval of updates of the live table.
WIDTH = 120  # Columns of the summary where the output is no terminal.
CLOSE_SECONDS = 5.0  # Time at the end for events that wait for their sinks.
MAX_CHECKS = 8  # Cameras that --check tries at the same time.

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
Check = Annotated[bool, option(None, "Read FILE, try server and cameras once, and end.", "--check")]


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

    FILE names the cameras: RTSP, HTTP and HLS streams, video files, devices and folders. Each has
    its adapter, question, gate and alerts; docs/video.md lists the keys. A changed FILE takes
    effect within two seconds, camera by camera. Passwords come from variables of the environment.
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
            await _until_the_end(watch, desk, seconds)
    return watch.watched()


async def _until_the_end(watch: Watch, desk: AlertDesk, seconds: float | None) -> None:
    """Run until all sources have ended, a signal, or for so many seconds."""
    running = asyncio.create_task(watch.run())
    showing = asyncio.create_task(_show(watch, desk))
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


async def _show(watch: Watch, desk: AlertDesk) -> None:
    from vlora.watch.table import line

    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_SECONDS)
            print_plain(line(watch.watched(), sum(desk.counts()["events"].values())))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(live_table(watch.watched()), refresh=True)
            await asyncio.sleep(SHOW_SECONDS)


def live_table(watched: Sequence[Watched]) -> Table:
    from vlora.watch.table import LIVE_HEADS, RIGHT, live_row

    table = make_table(LIVE_HEADS, RIGHT)
    for one in watched:
        table.add_row(*live_row(one))
    return table


def print_summary(watched: Sequence[Watched]) -> None:
    from vlora.watch.table import RIGHT, SUMMARY_HEADS, summary_row

    table = make_table(SUMMARY_HEADS, RIGHT)
    for one in watched:
        table.add_row(*summary_row(one))
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)


def check_once(cameras: Cameras) -> bool:
    """Try the server and each camera. Return whether any failed."""
    from vlora.watch.desk import removed_sinks

    faults = [asyncio.run(_server_fault(cameras.server))]
    print_plain(f"server {cameras.server}: {faults[0] or 'ready'}")
    streams = {one.stream: one for one in cameras.cameras.values()}
    with ThreadPoolExecutor(MAX_CHECKS) as pool:
        tried = dict(zip(streams, pool.map(_camera_fault, streams.values()), strict=True))
    for name, camera in cameras.cameras.items():
        fault, shown = tried[camera.stream]
        faults.append(fault)
        print_plain(f"{name}: {fault or shown}")
    for sentence in (*cameras.doubled(), *removed_sinks(cameras.sinks, cameras.retention)):
        print_plain(sentence)
    return any(faults)


async def _server_fault(address: str) -> str:
    from vlora.watch.asking import Analytics

    async with Analytics(address) as analytics:
        try:
            await analytics.check()
        except ServerError as error:
            return str(error)
    return ""


def _camera_fault(camera: Camera) -> tuple[str, str]:
    """Return why no frame of a camera can be read, or "" and the size of its first frame."""
    from vlora.watch.camera import open_source
    from vlora.watch.counts import StreamCounts
    from vlora.watch.ring import PacketRing

    try:
        source = open_source(camera, PacketRing(0.0, 0.0), StreamCounts())
        try:
            frame = next(source.frames(lambda: 0.0), None)
        finally:
            source.close()
    except (ServerError, VLoraError) as error:
        return str(error), ""
    if frame is None:
        return f"{camera.shown_url} has no frames", ""
    width, height = frame.size
    return "", f"{camera.shown_url} shows {width} x {height}"
