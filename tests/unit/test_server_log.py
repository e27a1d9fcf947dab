"""Extraction of error messages from Triton's log."""

from __future__ import annotations

from pathlib import Path

from vlora.launcher import server_log
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
    assert why_it_did_not_start(LOG + failed + "\\n\\nAt:\\n  x.py(1)") == failed
    assert why_it_did_not_start(LOG + "Error: bad option") == "Error: bad option"
    assert why_it_did_not_start(LOG).splitlines()[-1] == f"I{AT} server.cc:631]"


def test_each_adapter_that_failed_to_load_is_named_once() -> None:
    assert broken_adapters(LOG + LOG) == ["bad one"]


def test_no_more_than_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    """A server logs for months; its last errors are wanted, not all of it."""
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
