"""Extraction of error messages from Triton's log."""

from __future__ import annotations

from vlora.launcher.server_log import broken_adapters, why_it_did_not_start, why_it_failed

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
