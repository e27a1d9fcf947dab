"""Tests of a server's processes: their ends, and the removal of what a killed run left behind."""

from __future__ import annotations

import errno
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.polling import until
from vlora import draining
from vlora.errors import ServerError
from vlora.launcher import gateway_process, server
from vlora.launcher.gateway_process import GatewayProcess
from vlora.launcher.guard import guarded
from vlora.launcher.processes import children, end, ended_with, how_it_ended, is_alive, start_tied
from vlora.launcher.run_folder import run_folder
from vlora.launcher.server import TritonServer, with_absolute_paths
from vlora.server_run import RUN_VARIABLE, SHARED_MEMORY, shared_memory_prefix
from vlora.serving.model_process import Lifeline

SOURCE = Path(__file__).resolve().parents[2] / "backend_src"
SLEEP = "import time; time.sleep(60)"


@contextmanager
def python(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a Python process that runs `code` and ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_that_does_not_end_is_killed_and_its_status_is_read() -> None:
    with python(SLEEP) as process:
        known = psutil.Process(process.pid)
        assert is_alive(known)
        end([known], grace_seconds=0.1)
        # The process is a zombie: it has not been collected yet.
        assert not is_alive(known)
        assert how_it_ended(known) == "signal SIGKILL"
        assert process.wait(30) == -signal.SIGKILL
    assert how_it_ended(known) == ""
    assert children(process.pid) == set()
    assert ended_with(-signal.SIGFPE) == "signal SIGFPE"
    with python("import os; os._exit(70)") as process:
        known = psutil.Process(process.pid)
        until(lambda: not is_alive(known))
        assert how_it_ended(known) == "status 70"


TIED = """
import sys, threading, time
from vlora.launcher.processes import start_tied
made = []
def make():
    made.append(start_tied([sys.executable, "-u", "-c", sys.argv[1]], {}, open(sys.argv[2], "wb")))
    while not open(sys.argv[2]).read():
        time.sleep(0.01)
thread = threading.Thread(target=make)
thread.start()
thread.join()
print(made[0].pid, flush=True)
made[0].wait()
"""
COUNT = "import time\nfor i in range(6000): print(i); time.sleep(0.01)"


def test_a_tied_process_outlives_the_thread_that_started_it_but_not_the_parent(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with python(TIED, COUNT, str(log)) as parent:
        tied = psutil.Process(int(line(parent)))
        count = len(log.read_text().split())
        until(lambda: len(log.read_text().split()) > count + 10)
        assert is_alive(tied)
        parent.kill()
        until(lambda: not is_alive(tied))


# -- a model and its server ----------------------------------------------------------------------

SERVER = """
import subprocess, sys
model = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(model.pid, flush=True)
model.wait()
"""
MODEL = """
import time
from vlora.server_run import RUN_VARIABLE, SHARED_MEMORY, shared_memory_prefix
from vlora.serving.model_process import Lifeline
lifeline = Lifeline("lmm")
lifeline.on_drain(lambda seconds: print(0 < seconds <= 50, lifeline.hands_over, flush=True))
print(lifeline.hands_over, flush=True)
time.sleep(60)
"""


def test_a_model_drains_when_its_server_stops_and_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / secrets.token_hex(8)
    folder.mkdir()
    region = SHARED_MEMORY / f"{shared_memory_prefix(folder)}region"
    with python(SERVER, MODEL, **{RUN_VARIABLE: str(folder)}) as server:
        model = psutil.Process(int(line(server)))
        assert line(server) == "False"
        assert draining.unfinished(folder) == [f"lmm.{model.pid}"]
        draining.begin(folder, seconds=50, hand_over=True)
        assert line(server) == "True True"
        until(lambda: draining.unfinished(folder) == [])
        region.touch()
        server.kill()
        until(lambda: not is_alive(model))
        until(lambda: not region.exists())


def test_a_server_whose_models_cannot_be_notified_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space is left on the device")

    monkeypatch.setattr(draining, "begin", fail)
    server = TritonServer()
    server._folder = tmp_path / secrets.token_hex(8)
    server._process = subprocess.Popen(["sleep", "60"])
    try:
        server.stop()
        assert not server.is_running
    finally:
        server.kill()


# -- what a killed run leaves --------------------------------------------------------------------

KILLED = """
import os, signal, subprocess, sys
from contextlib import nullcontext
from pathlib import Path
from vlora.launcher.guard import guarded
from vlora.launcher.run_folder import run_folder
from vlora.server_run import shared_memory_prefix
guard = guarded if sys.argv[3] == "guarded" else nullcontext
with run_folder(Path(sys.argv[1])) as folder, guard(folder):
    region = shared_memory_prefix(folder) + "region"
    (Path("/dev/shm") / region).touch()
    program = [sys.argv[2], "-c", "import time; time.sleep(60)", region]
    model = subprocess.Popen(program, executable=sys.executable)
    print(folder.name, model.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_run(root: Path, program: str, guard: str = "unguarded") -> tuple[Path, psutil.Process]:
    """Return the folder of a run that was killed, and the process that it left."""
    with python(KILLED, str(root), program, guard) as run:
        name, pid = line(run).split()
        run.wait()
    return root / name, psutil.Process(int(pid))


def test_the_next_start_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    left, model = killed_run(tmp_path, "/somewhere/triton_python_backend_stub")
    assert is_alive(model)
    assert list(SHARED_MEMORY.glob(f"{shared_memory_prefix(left)}*"))
    with run_folder(tmp_path) as folder:
        assert folder != left
        assert not left.exists()
        assert not is_alive(model)
        assert not list(SHARED_MEMORY.glob(f"{shared_memory_prefix(left)}*"))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_guard_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    left, model = killed_run(tmp_path, "/somewhere/triton_python_backend_stub", "guarded")
    until(lambda: not is_alive(model) and not left.exists())
    assert not list(SHARED_MEMORY.glob(f"{shared_memory_prefix(left)}*"))


def test_a_guard_ends_with_its_block(tmp_path: Path) -> None:
    with run_folder(tmp_path) as folder:
        before = children(os.getpid())
        with guarded(folder):
            (guard,) = children(os.getpid()) - before
            until(lambda: "vlora.launcher.guard" in guard.cmdline())
        assert not is_alive(guard)


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    """Running runs, other folders, and other processes that name a dead run are not touched."""
    notes = tmp_path / "notes"
    notes.mkdir()
    foreign = SHARED_MEMORY / f"{shared_memory_prefix(Path(secrets.token_hex(4)))}region"
    foreign.touch()
    left, bystander = killed_run(tmp_path, "less")
    try:
        with run_folder(tmp_path) as one, run_folder(tmp_path) as other:
            assert one.exists()
            assert other.exists()
        assert not left.exists()
        assert is_alive(bystander)
        assert notes.exists()
        assert foreign.exists()
    finally:
        bystander.kill()
        foreign.unlink()


def test_runs_that_start_and_end_at_the_same_time_do_not_remove_each_other(tmp_path: Path) -> None:
    def run(_: int) -> None:
        with run_folder(tmp_path) as folder:
            (folder / "file").touch()
            assert (folder / "lock").exists()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(40)))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_folder_of_runs_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    open_to_all = tmp_path / "runs"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for root, message in (
        (tmp_path / "file" / "runs", r"cannot create .*file/runs .*TMPDIR"),
        (open_to_all, r"other users can write to.*TMPDIR"),
    ):
        with pytest.raises(ServerError, match=message), run_folder(root):
            pass


@pytest.fixture
def lifeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lifeline]:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    created = Lifeline("lmm")
    yield created
    created.close()


def _once(error: Exception, function: Any) -> tuple[Any, threading.Event]:
    """Return a function that raises an error at its first call, and an event that is set then."""
    failed = threading.Event()

    def call(*arguments: Any, **options: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise error
        return function(*arguments, **options)

    return call, failed


def test_a_look_or_a_thread_that_fails_is_repeated(
    lifeline: Lifeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[float] = []
    lifeline.on_drain(drained.append)
    look, failed = _once(OSError(errno.EMFILE, "no file is left"), draining.seconds_left)
    monkeypatch.setattr(draining, "seconds_left", look)
    assert failed.wait(30)
    start, failed = _once(RuntimeError("can't start new thread"), threading.Thread)
    monkeypatch.setattr(threading, "Thread", start)
    draining.begin(tmp_path, seconds=50)
    assert failed.wait(30)
    until(lambda: draining.unfinished(tmp_path) == [])
    assert len(drained) == 1


def test_a_model_that_is_loaded_while_the_server_stops_drains_as_well(
    lifeline: Lifeline, tmp_path: Path
) -> None:
    assert draining.seconds_left(tmp_path) is None
    draining.begin(tmp_path, seconds=-1)
    assert draining.seconds_left(tmp_path) == 0, "never negative"
    until(lambda: lifeline.draining)
    drained: list[float] = []
    lifeline.on_drain(drained.append)
    until(lambda: draining.unfinished(tmp_path) == [])
    assert len(drained) == 1


SEALED = """
import time
from vlora.serving import model_process
def fail(folder):
    raise PermissionError("the memory belongs to another user")
model_process.release_shared_memory = fail
model_process.Lifeline("lmm")
print("watching", flush=True)
time.sleep(60)
"""


def test_a_model_ends_with_its_server_even_if_the_shared_memory_cannot_be_released(
    tmp_path: Path,
) -> None:
    with python(SERVER, SEALED, **{RUN_VARIABLE: str(tmp_path)}) as server:
        model = psutil.Process(int(line(server)))
        assert line(server) == "watching"
        server.kill()
        until(lambda: not is_alive(model), 30)


@pytest.mark.parametrize(
    ("program", "environment"), [("nul\0", {}), ("true", {"A": 1}), ("missing", {})]
)
def test_whatever_keeps_a_process_from_starting_is_raised(
    program: str, environment: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = []

    def start() -> None:
        try:
            start_tied([program], environment, None)
        except BaseException as error:
            raised.append(error)

    if program == "missing":
        monkeypatch.setattr(sys, "executable", "/missing")
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(raised[0], OSError | TypeError | ValueError)


def test_a_gateway_that_cannot_be_started_for_the_moment_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    said: list[str] = []
    started = threading.Event()

    def start(*_: Any) -> subprocess.Popen[bytes]:
        calls.append(len(calls))
        if len(calls) == 2:
            raise BlockingIOError(errno.EAGAIN, "no process is left")
        seconds = 60 if len(calls) == 3 else 0
        process = subprocess.Popen(["sleep", str(seconds)])
        if seconds:
            started.set()
        return process

    monkeypatch.setattr(gateway_process, "start_tied", start)
    monkeypatch.setattr(gateway_process, "FIRST_WAIT_SECONDS", 0.01)
    with GatewayProcess("127.0.0.1", 0, None, said.append) as gateway:
        gateway.start("127.0.0.1:1", "http://127.0.0.1:2")
        assert started.wait(30)
        assert "the gateway cannot be started: no process is left" in said
        until(lambda: gateway._process is not None and gateway._process.poll() is None)


def test_relative_paths_in_arguments_of_triton_start_at_the_working_folder_of_the_user() -> None:
    here = Path.cwd()
    given = [
        "--grpc-server-cert=a.crt",
        "--grpc-server-key",
        "b.key",
        "--trace-config=t,file=c",
    ]
    kept = [
        "--http-restricted-api=logging:my-key=x",
        "--log-info",
        "true",
        "--log-file=/d",
    ]
    assert with_absolute_paths([*given, *kept]) == [
        *(f"--grpc-server-cert={here}/a.crt", "--grpc-server-key", f"{here}/b.key"),
        *(f"--trace-config=t,file={here}/c", *kept),
    ]


def test_the_weights_of_the_served_model_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: queue.Queue[Path] = queue.Queue()
    monkeypatch.setattr(server, "read_ahead", lambda folder, limit: read.put(folder))
    version = tmp_path / "lmm" / "1"
    version.mkdir(parents=True)
    server.begin_to_read(tmp_path, {})  # The models report that there is no `model.json`.
    (version / "model.json").write_text('{"model": "own"}')
    server.begin_to_read(tmp_path, {})
    assert read.get(timeout=10) == version / "own"
    server.begin_to_read(tmp_path, {"VLORA_MODEL": str(tmp_path / "other")})
    assert read.get(timeout=10) == tmp_path / "other"
