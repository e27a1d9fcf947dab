"""Tests of a server's ports and processes, and of the removal of what a killed run left behind."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.polling import until
from vlora import draining, net
from vlora.errors import ServerError
from vlora.launcher.guard import guarded
from vlora.launcher.processes import children, end, ended_with, how_it_ended, is_alive
from vlora.launcher.run_folder import run_folder
from vlora.launcher.server import TritonServer
from vlora.net import choose_ports
from vlora.server_run import RUN_VARIABLE, SHARED_MEMORY, shared_memory_prefix

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


# -- ports ---------------------------------------------------------------------------------------


def test_chosen_ports_are_not_zero_and_different() -> None:
    chosen = choose_ports({"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    assert len(set(chosen.values())) == 3
    assert all(chosen.values())


def test_free_ports_are_not_those_that_the_kernel_gives_to_other_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another socket could get such a port before the server opens it."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(net, "EPHEMERAL_RANGE", file)
    file.write_text("24000\t60999\n")
    for _ in range(20):
        assert choose_ports({"grpc_port": 0})["grpc_port"] < 24000
    file.write_text("1024\t60999\n")
    assert choose_ports({"grpc_port": 0})["grpc_port"] >= 1024


def test_a_taken_port_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ip_local_port_range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(net, "EPHEMERAL_RANGE", file)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", choose_ports({"grpc_port": 0})["grpc_port"]))
        port = taken.getsockname()[1]
        monkeypatch.setattr(net, "FREE_PORTS", range(port, port + 1))
        assert choose_ports({"grpc_port": 0})["grpc_port"] not in (0, port)


@pytest.mark.parametrize("port", [99999, 65536, -1])
def test_an_invalid_port_is_rejected_with_the_valid_range(port: int) -> None:
    with pytest.raises(ServerError, match=rf"--http-port {port} is not a port.* 1 to 65535, or 0"):
        choose_ports({"http_port": port, "grpc_port": 0})


def test_equal_ports_are_rejected_with_both_options() -> None:
    with pytest.raises(ServerError, match="--http-port and --metrics-port are both 9000"):
        choose_ports({"http_port": 9000, "grpc_port": 9001, "metrics_port": 9000})


def test_a_port_in_use_is_rejected_with_the_option_that_sets_another() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} is already in use; .* --grpc-port N"):
            choose_ports({"http_port": 0, "grpc_port": port})


# -- processes -----------------------------------------------------------------------------------


def test_a_process_that_does_not_end_is_killed_and_its_status_is_read() -> None:
    with python(SLEEP) as process:
        known = psutil.Process(process.pid)
        assert is_alive(known)
        end([known], grace_seconds=0.1)
        # The process is a zombie: it has not been collected yet.
        assert not is_alive(known)
        assert how_it_ended(known) == "signal SIGKILL"
        assert process.wait(5) == -signal.SIGKILL
    assert how_it_ended(known) == ""
    assert children(process.pid) == set()
    assert ended_with(-signal.SIGFPE) == "signal SIGFPE"


def test_the_status_of_a_process_that_exits_is_read() -> None:
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
from vlora.serving.model_process import Lifeline
lifeline = Lifeline("lmm")
lifeline.on_drain(lambda seconds: print(0 < seconds <= 50, lifeline.draining, flush=True))
print(lifeline.draining, flush=True)
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
        draining.begin(folder, seconds=50)
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


def test_the_seconds_left_are_never_negative(tmp_path: Path) -> None:
    assert draining.seconds_left(tmp_path) is None
    draining.begin(tmp_path, seconds=-1)
    assert draining.seconds_left(tmp_path) == 0


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


def killed_run(root: Path, program: str, *options: str) -> tuple[Path, psutil.Process]:
    """Return the folder of a run that was killed, and the process that it left."""
    with python(KILLED, str(root), program, *(options or ("unguarded",))) as run:
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
    until(lambda: not is_alive(model))
    until(lambda: not left.exists())
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


def test_a_folder_of_runs_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ServerError, match=r"cannot create .*file/runs .*TMPDIR"),
        run_folder(tmp_path / "file" / "runs"),
    ):
        pass


def test_a_folder_of_runs_that_others_can_write_to_is_rejected(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ServerError, match=r"other users can write to.*TMPDIR"), run_folder(root):
        pass
