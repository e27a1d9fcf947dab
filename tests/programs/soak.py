"""A soak: two replicas behind Envoy under an open loop of requests, while parts of them fail.

Of the requests for 64 adapters, 10 % are cancelled, 5 % are bad, some are sent slowly, and some
clients vanish. Meanwhile adapters are replaced and removed, a model process is frozen and another
one killed, /dev/shm and the disk are full, a server is killed, and the replicas restart in turn.

Every request must end in the right answer or in a typed error, on the client's side and by the
servers' counters. After the faults, memory, open files and shared memory must not grow.

usage: python -m tests.programs.soak --requests 10000 --rate 40 --seed 0 --json figures.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.support.polling import until
from tests.support.replicas import Serving, two_replicas
from tests.support.soak_clients import (
    ADAPTERS,
    STOPPED,
    Adapters,
    Clients,
    Planned,
    plan,
)
from vlora.launcher.processes import model_processes
from vlora.load.figures import summarize
from vlora.load.run import Asking, Measurement, Record, send
from vlora.load.trace import TracedRequest
from vlora.net import get

TIMEOUT = 120.0
NOTICE_SECONDS = 3.0  # Time to the end of a broken model, and to the launcher's look at it.
SHM_BYTES, DISK_BYTES = 256 << 20, 64 << 20
POOL_BYTES = 4_000_000
POLL_SECONDS = 0.5
SHOW_SECONDS = 5.0
CURVE_POINTS = 60
# Growth from the warm, loaded servers to the idle ones at the end. Allocators keep some memory; a
# leak of 4 KiB a request shows in 10,000. Files of the connections of a burst may remain open.
MAX_GROWTH_BYTES, MAX_GROWTH_SHARE, MAX_GROWTH_FILES = 16 << 20, 0.05, 16
# Regions of shared memory keep the size of the largest burst.
MAX_GROWTH_SHM = 16 << 20
RETRYABLE = ("UNAVAILABLE", "INTERNAL", "CUT")
BAD = ("INVALID_ARG", "NOT_FOUND")
COUNTERS = ("vlora:requests_finished_total", "vlora:requests_aborted_total")
_SAMPLE = re.compile(r"(\S+?)\{(.*)\} (\S+)")


class Window(NamedTuple):
    """Time of a fault, and the codes of errors that requests may have meanwhile."""

    name: str
    start: float
    end: float
    codes: Sequence[str] = ()


def overlaps(span: tuple[float, float], start: float, end: float) -> bool:
    return span[0] <= end and start <= span[1]


class Faults:
    """Faults of the servers, one after the other, each when the one before is mended.

    windows: times of those that have ended. done: when all have ended, or None.
    """

    def __init__(self, serving: Serving, names: Sequence[str], seconds: float, disk: Path) -> None:
        self.serving, self._names, self._seconds = serving, names, seconds
        self._root = Path(f"/proc/{serving.process.pid}/root")
        self._disk = disk
        self.windows: list[Window] = []
        self.current = ""
        self.done: float | None = None
        self.error: BaseException | None = None
        self.abandoned = threading.Event()  # Set to end a run without waiting for repairs.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        self._started = time.perf_counter()
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        for number, name in enumerate(self._names):
            at = self._started + self._seconds * (0.1 + 0.5 * number / len(self._names))
            if self._ended.wait(max(0.0, at - time.perf_counter())):
                return
            self.current, begun = name, time.perf_counter()
            codes: Sequence[str] = ()
            try:
                codes = FAULTS[name](self)
                until(lambda: self.abandoned.is_set() or self._all_serve(), 240, pause=0.2)
            except BaseException as error:
                self.error = error
                return
            finally:
                time.sleep(1.0)  # Requests of the time before may still end.
                self.windows.append(Window(name, begun, time.perf_counter(), codes))
            self.current = ""
        self.done = time.perf_counter()

    def _all_serve(self) -> bool:
        assert self.serving.process.poll() is None, "the launcher has ended"
        page = get(self.serving.address("metrics"), 30, direct=True).decode()
        return all(f'replica="{number}"' in page for number in (0, 1))

    def _server(self) -> psutil.Process:
        return sorted(self.serving.servers(), key=lambda one: one.pid)[0]

    def _model(self) -> psutil.Process:
        models = model_processes(self._server().pid)
        return next(process for process, name in models.items() if name == "lmm")

    def _kill(self, process: psutil.Process) -> None:
        starts = sum("starting the server" in line for line in self.serving.lines)
        process.kill()
        self.serving.wait_for("starting the server", starts + 1)

    def freeze(self) -> Sequence[str]:
        """Stop a model's process for longer than the second after which Triton gives it up."""
        model = self._model()
        model.suspend()
        time.sleep(2.0)
        model.resume()
        time.sleep(NOTICE_SECONDS)
        return RETRYABLE

    def kill_model(self) -> Sequence[str]:
        self._kill(self._model())
        return RETRYABLE

    def kill_server(self) -> Sequence[str]:
        self._kill(self._server())
        return RETRYABLE

    def drain(self) -> Sequence[str]:
        words = "all replicas have been restarted"
        ended = sum(words in line for line in self.serving.lines)
        self.serving.process.send_signal(signal.SIGUSR1)
        self.serving.wait_for(words, ended + 1)
        return ()

    def fill_shm(self) -> Sequence[str]:
        with filled(self._root / "dev/shm/filler"):
            time.sleep(3.0)
        time.sleep(NOTICE_SECONDS)
        return RETRYABLE

    def fill_disk(self) -> Sequence[str]:
        """Kill a server while the disk is full, so that it cannot be started for some seconds."""
        with filled(self._root / str(self._disk.relative_to("/")) / "filler"):
            self._server().kill()
            time.sleep(4.0)
        return RETRYABLE


FAULTS: dict[str, Callable[[Faults], Sequence[str]]] = {
    "freeze": Faults.freeze,
    "kill-model": Faults.kill_model,
    "shm": Faults.fill_shm,
    "disk": Faults.fill_disk,
    "kill-server": Faults.kill_server,
    "drain": Faults.drain,
}
OWN_MOUNTS = ("shm", "disk")  # Faults that need small file systems, which only root can mount.


@contextmanager
def filled(path: Path) -> Iterator[None]:
    """Fill the file system of a file, which must be a small one."""
    assert shutil.disk_usage(path.parent).total <= SHM_BYTES, "this would fill a real disk"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        yield
    finally:
        path.unlink()


def mounting(disk: Path) -> list[str]:
    """Return the words of a command line that give a program two small file systems; [] if that is
    not allowed.
    """
    sizes = ((Path("/dev/shm"), SHM_BYTES), (disk, DISK_BYTES))
    mounts = [f"mount -t tmpfs -o size={size} tmpfs {path}" for path, size in sizes]
    script = " && ".join([*mounts, f"export TMPDIR={disk}", 'exec "$@"'])
    words = ["unshare", "--mount", "sh", "-c", script, "sh"]
    with suppress(OSError):
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    return []


# -- the servers' side -----------------------------------------------------------------------


class Watch:
    """Reads the servers' counters and sizes in a thread, also across restarts.

    counts: sums over all servers. read: times of the readings. curve: sums of the sizes, with the
    seconds since the start.
    """

    def __init__(self, serving: Serving, faults: Faults, seconds: float, is_private: bool) -> None:
        self._serving, self._faults, self._seconds = serving, faults, seconds
        self._is_private = is_private
        self._last: dict[tuple[str, str], float] = {}
        self.counts: Counter[str] = Counter()
        self.read: list[float] = []
        self.curve: list[dict[str, float]] = []
        self.warm: dict[str, Any] | None = None
        self.before = self.sizes()
        self.count()
        self.counts.clear()
        self._started = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            with suppress(OSError):  # The launcher's page may be slow.
                self.count()
            if (
                time.perf_counter()
                >= self._started + len(self.curve) * self._seconds / CURVE_POINTS
            ):
                self.curve.append(self._totals())
            done, end = self._faults.done, self._started + self._seconds
            if done and not self.warm and time.perf_counter() > done + 0.2 * (end - done):
                self.warm = self.sizes()

    def _totals(self) -> dict[str, float]:
        found = self.sizes()
        shared, _ = found.pop("shared memory", (0, 0))
        return {
            "seconds": round(time.perf_counter() - self._started, 1),
            "processes": len(found),
            "mib": sum(size for size, _ in found.values()) >> 20,
            "files": sum(files for _, files in found.values()),
            "shm_mib": shared >> 20,
        }

    def count(self) -> None:
        page = get(self._serving.address("metrics"), 10, direct=True).decode()
        for line in page.splitlines():
            found = _SAMPLE.fullmatch(line)
            if found and found[1] in (*COUNTERS, "vlora:request_errors_total"):
                value, key = float(found[3]), (found[1], found[2])
                before = self._last.get(key, 0.0)
                code = re.search(r'code="(\w+)"', found[2])
                # A restarted server counts from 0.
                self.counts[code[1] if code else found[1]] += round(
                    value - before if value >= before else value
                )
                self._last[key] = value
        self.read.append(time.perf_counter())

    def sizes(self) -> dict[str, Any]:
        """Return private bytes and open files of each process, and bytes of shared memory."""
        launcher = psutil.Process(self._serving.process.pid)
        found: dict[str, Any] = {}
        for process in (launcher, *launcher.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                memory = process.memory_info()
                name = f"{process.name()} {process.pid}"
                found[name] = (memory.rss - memory.shared, process.num_fds())
        if self._is_private:
            used = shutil.disk_usage(f"/proc/{launcher.pid}/root/dev/shm").used
            found["shared memory"] = (used, 0)
        return found


def growth(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each process of both that has grown by more than its bound."""
    for name in before.keys() & after.keys():
        (size, files), (more, more_files) = before[name], after[name]
        is_shared = name == "shared memory"
        bound = MAX_GROWTH_SHM if is_shared else MAX_GROWTH_BYTES + MAX_GROWTH_SHARE * size
        if more - size > bound:
            yield f"{name} grew from {size >> 20} to {more >> 20} MiB"
        if more_files - files > MAX_GROWTH_FILES:
            yield f"{name} had {files} open files, then {more_files}"


# -- the whole -------------------------------------------------------------------------------


@dataclass
class Soak:
    """One run. report: what was found; faults: sentences, none of which should be there."""

    seed: int
    requests: int
    rate: float
    skipped: dict[str, str]
    clients: Clients
    adapters: Adapters
    faults: Faults
    watch: Watch
    trace: list[TracedRequest]
    planned: list[Planned]
    measurement: Measurement
    interrupted: bool = False
    found: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Send all requests, and return the report. Ctrl-C ends the run and reports the rest."""
        parts = (self.adapters, self.faults, self.watch)
        try:
            for part in parts:
                part.begin()
            asyncio.run(self._send())
        except KeyboardInterrupt:
            self.interrupted = True
            self.faults.abandoned.set()
        finally:
            for part in parts:
                part.stop()
        time.sleep(3.0)  # Connections are closed, and metrics written once more.
        end: dict[str, Any] = {}
        try:
            self.watch.count()
            end = self.watch.sizes()
        except (OSError, psutil.NoSuchProcess) as error:
            self.found.append(f"the servers have ended: {error}")
        return self._report(end)

    async def _send(self) -> None:
        asking = Asking(ADAPTERS, timeout=TIMEOUT)
        await self.clients.open()
        try:
            show = _Progress(self.requests, self.faults)
            work = (asking, self.trace, self.planned, self.measurement, show)
            await send(self.clients, *work)
        finally:
            await self.clients.close()

    def verdict(self, planned: Planned, record: Record) -> str | None:
        """Return what is wrong with the end of a request; None if nothing is."""
        kind, code = planned.kind, record.error
        if code is None:
            return None if self.interrupted else "lost: it has no end"
        if (
            code == ""
            or (kind == "bad" and code in BAD)
            or (kind in STOPPED and code == "CANCELLED")
        ):
            return None
        span = self.clients.spans[planned.place]
        if code == "NOT_FOUND" and any(
            name == record.adapter and overlaps(span, *times)
            for name, *times in self.adapters.removals
        ):
            return None
        near = [one for one in self.faults.windows if overlaps(span, one.start, one.end)]
        if any(code in one.codes for one in near):
            return None
        during = f" during {', '.join(one.name for one in near)}" if near else ""
        return f"{'lost: ' if code == 'TIMEOUT' else ''}{kind} ended with {code}{during}"

    def _count_faults(self, sent: Sequence[tuple[Planned, Record]]) -> Iterator[str]:
        """Compare the servers' counts with the clients'; they may differ by what ended near faults,
        because a server that is killed has counted more than was read.
        """
        windows = [one for one in self.faults.windows if one.codes or one.name == "drain"]
        unsure = {
            plan.place
            for plan, _ in sent
            if plan.place not in self.clients.spans
            or any(
                overlaps(self.clients.spans[plan.place], one.start - 2 * POLL_SECONDS, one.end)
                for one in windows
            )
        }
        sure = [(plan, one) for plan, one in sent if plan.place not in unsure]
        answered = sum(one.error == "" for _, one in sure)
        accepted = sum(plan.kind != "bad" for plan, _ in sent)
        ended = sum(self.watch.counts[name] for name in COUNTERS)
        if not answered <= ended <= accepted + len(unsure):
            yield (
                f"the servers have ended {ended} requests, not {answered} to"
                f" {accepted + len(unsure)} as the clients know"
            )
        refused = sum(one.error in BAD for _, one in sent)
        counted = sum(self.watch.counts[code] for code in BAD)
        if abs(counted - refused) > len(unsure):
            yield f"the servers count {counted} bad requests, the clients {refused}"

    def _report(self, end: dict[str, Any]) -> dict[str, Any]:
        pairs = list(zip(self.planned, self.measurement.records, strict=True))
        sent = [(plan, record) for plan, record in pairs if record.lag is not None]
        wrong = Counter(text for pair in sent if (text := self.verdict(*pair)))
        self.found += [f"{number} × {text}" for text, number in wrong.items()]
        self.found += self._count_faults(sent)
        if self.faults.error is not None:
            self.found.append(f"{self.faults.current}: {self.faults.error!r}"[:1000])
        elif self.faults.done is None and not self.interrupted:
            self.found.append("the run ended before all faults: lower --rate or send more")
        warm = self.watch.warm or {}
        if not warm:
            self.skipped["growth"] = "the run ended too early after the faults"
        self.found += growth(warm, end)
        shared = {"shared memory": self.watch.before.get("shared memory", (0, 0))}
        self.found += growth(shared, end)
        outcomes = Counter(f"{plan.kind}: {record.error or 'answered'}" for plan, record in sent)
        return {
            "meta": {"seed": self.seed, "requests": self.requests, "rate": self.rate},
            "skipped": self.skipped,
            "interrupted": self.interrupted,
            "summary": summarize(self.measurement.records),
            "outcomes": dict(sorted(outcomes.items())),
            "messages": self.measurement.messages,
            "faults": [one._asdict() for one in self.faults.windows],
            "servers": dict(self.watch.counts),
            "printed": self.faults.serving.lines,
            "adapter_changes": sum(map(len, self.adapters.changes.values())),
            "adapter_removals": len(self.adapters.removals),
            "curve": self.watch.curve,
            "sizes": {"before": self.watch.before, "warm": warm, "end": end},
            "wrong": self.found,
        }


class _Progress:
    """Prints a line every SHOW_SECONDS."""

    def __init__(self, requests: int, faults: Faults) -> None:
        self._requests, self._faults = requests, faults
        self._started = self._shown = time.perf_counter()
        self._sent = 0
        self._ended: Counter[str] = Counter()

    def __call__(self, record: Record) -> None:
        if record.error is None:
            self._sent += 1
        else:
            self._ended[record.error or "answered"] += 1
        now = time.perf_counter()
        if now >= self._shown + SHOW_SECONDS:
            self._shown = now
            counts = ", ".join(f"{number} {code}" for code, number in self._ended.most_common())
            fault = f"; fault: {self._faults.current}" if self._faults.current else ""
            sent = f"{self._sent} of {self._requests} sent"
            print(f"{now - self._started:.0f} s: {sent}, {counts}{fault}", flush=True)


@contextmanager
def soak(
    checkpoint: Path, folder: Path, seed: int, requests: int, rate: float, faults: Sequence[str]
) -> Iterator[Soak]:
    """Start the replicas in a folder, learn the reference answers, and yield the run."""
    # The path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="soak-") as disk:
        yield from _started(checkpoint, folder, Path(disk), seed, requests, rate, faults)


def _started(
    checkpoint: Path,
    folder: Path,
    disk: Path,
    seed: int,
    requests: int,
    rate: float,
    faults: Sequence[str],
) -> Iterator[Soak]:
    before = mounting(disk)
    reason = "needs to mount a small file system, which is not allowed here"
    skipped = {name: reason for name in faults if name in OWN_MOUNTS and not before}
    adapters = Adapters(checkpoint, folder / "adapters", seed)
    options = ["--model", str(checkpoint), "--adapters", str(adapters.root)]
    options += ["--set", "deterministic=true", "--set", "kv_cache_tokens=8192"]
    options += ["--set", f"adapter_pool_bytes={POOL_BYTES}"]
    with two_replicas(folder, options, before) as serving:
        trace, planned = plan(seed, requests, rate)
        clients = Clients(serving, adapters, seed)
        asyncio.run(clients.learn(Asking(timeout=TIMEOUT)))
        chosen = [name for name in faults if name not in skipped]
        failing = Faults(serving, chosen, trace[-1].at, disk)
        watch = Watch(serving, failing, trace[-1].at, bool(before))
        measured = Measurement.of(trace, ADAPTERS)
        about = (seed, requests, rate, skipped)
        yield Soak(*about, clients, adapters, failing, watch, trace, planned, measured)


def summary(report: dict[str, Any]) -> str:
    """Return the report as one line, and a line for each thing that is wrong."""
    figures, wrong = report["summary"], report["wrong"]
    errors = ", ".join(f"{number} {code}" for code, number in figures["errors"].items())
    faults = ", ".join(
        f"{one['name']} {one['end'] - one['start']:.0f} s" for one in report["faults"]
    )
    skipped = "".join(f"; {name} skipped: {why}" for name, why in report["skipped"].items())
    line = (
        f"soak of seed {report['meta']['seed']}: {figures['sent']} requests,"
        f" {figures['answered']} answered, {errors}; faults: {faults}{skipped}:"
        f" {len(wrong)} wrong"
    )
    every = max(1, len(report["curve"]) // 10)
    curve = [" ".join(f"{value} {key}" for key, value in one.items()) for one in report["curve"]]
    return "\n".join([line, *curve[::every], *wrong])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--hours", type=float, metavar="HOURS", help="instead of --requests")
    parser.add_argument("--rate", type=float, default=40.0, metavar="N", help="requests per second")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    text = f"faults, separated by commas; default: {','.join(FAULTS)}"
    parser.add_argument("--faults", default=",".join(FAULTS), metavar="NAMES", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    text = "empty folder to keep the servers' logs in; default: a temporary one"
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help=text)
    given = parser.parse_args()
    requests = round(given.hours * 3600 * given.rate) if given.hours else given.requests
    faults = [name for name in given.faults.split(",") if name]
    if unknown := [name for name in faults if name not in FAULTS]:
        parser.error(f"unknown fault '{unknown[0]}'; choose from {', '.join(FAULTS)}")
    from tools.demo.build import build

    print(f"seed {given.seed}: {requests} requests, {given.rate:g} per second", flush=True)
    kept = given.folder and nullcontext(given.folder)
    with kept or tempfile.TemporaryDirectory() as name:
        checkpoint = build(Path(name) / "checkpoint")
        with soak(checkpoint, Path(name), given.seed, requests, given.rate, faults) as run:
            report = run.run()
    print(summary(report))
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    return 130 if report["interrupted"] else int(bool(report["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
