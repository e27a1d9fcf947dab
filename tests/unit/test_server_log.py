"""Tests of Triton's log: its file, and the errors in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora.errors import ServerError
from vlora.launcher import server_log
from vlora.launcher.repository import ServerOptions
from vlora.launcher.run_folder import kept_log, run_folder
from vlora.launcher.server import TritonServer
from vlora.launcher.server_log import (
    broken_adapters,
    read_end,
    why_it_did_not_start,
    why_it_failed,
)

AT = "1121 21:14:16.534550 16819"
LOG = f"""W{AT} metrics.cc:650] "DCGM unable to start: DCGM initialization error"
E{AT} server.cc:241] "CudaDriverHelper has not been initialized."
W{AT} process.py:339] "[lmm] adapter 'bad one': vlora.json has the unknown key 'task'"
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
    assert why_it_did_not_start(LOG + "Error: bad option") == "Error: bad option"
    wrong = "tritonserver: unrecognized option '--nonsense'"
    assert why_it_did_not_start(f"{wrong}\nUsage: tritonserver\n--on-error: stop\n") == wrong
    assert why_it_did_not_start(LOG).splitlines()[-1] == f"I{AT} server.cc:631]"


def test_each_adapter_that_failed_to_load_is_named_once() -> None:
    assert broken_adapters(LOG + LOG) == ["bad one"]


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


def test_a_log_that_is_kept_is_in_a_folder_of_this_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = kept_log(8000)
    with run_folder(), server_log.create(path) as log:
        log.write(b"text")
    assert path.read_text() == "text"
    assert path.parent.stat().st_mode & 0o777 == 0o700
