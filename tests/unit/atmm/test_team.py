"""Tests of the thread team that all kernels share: sizes, barriers, failures, forked children."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.atmm_problems import compiled
from vlora import native

pytestmark = compiled


@pytest.fixture(params=["own", "openmp"])
def cpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the kernels' shared runtime, with each kind of threads."""
    core = native.kernels().runtime
    if not core.set_thread_source(request.param):
        pytest.skip("this process has no OpenMP")
    assert core.thread_source() == request.param
    yield core
    core.set_thread_source("auto")


def test_every_thread_of_a_region_reaches_its_barriers(cpu: Any) -> None:
    for threads in (1, 2, 5, 3, 2, 4):
        assert cpu.count_barriers(threads, 20, -1) == 20 * threads


def test_every_piece_is_computed_once(cpu: Any) -> None:
    for threads in (1, 2, 7, 3):
        for pieces in (0, 1, 2, 1000):
            assert cpu.sum_pieces(threads, pieces) == pieces * (pieces - 1) // 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_threads_failure_ends_the_region_and_reaches_the_caller(cpu: Any, failing: int) -> None:
    for _ in range(10):
        with pytest.raises(RuntimeError, match=f"thread {failing}"):
            cpu.count_barriers(3, 5, failing)
        assert cpu.count_barriers(3, 5, -1) == 15


def test_callers_at_the_same_time_do_not_wait_for_each_other(cpu: Any) -> None:
    with ThreadPoolExecutor(4) as callers:
        met = list(callers.map(lambda _: cpu.count_barriers(3, 50, -1), range(40)))
    assert {count % 50 for count in met} == {0}
    assert set(met) <= {50, 150}


def test_teams_of_changing_size_keep_their_threads(cpu: Any) -> None:
    def tasks() -> set[str]:
        return {path.name for path in Path("/proc/self/task").iterdir()}

    cpu.count_barriers(6, 1, -1)
    before = tasks()
    for threads in (2, 6, 3, 5, 2, 6):
        cpu.count_barriers(threads, 1, -1)
    assert tasks() <= before  # Threads of earlier tests may end meanwhile.


CHILD = """
import os, sys, torch
from tests.support.atmm_problems import check, group_of
from vlora import native
from vlora.atmm.types import Segment
core = native.kernels().runtime
core.set_thread_source(sys.argv[1])
assert core.count_barriers(3, 4, -1) == 12
group = group_of(512, [700], [64])
child = os.fork()
for _ in range(3):
    assert core.count_barriers(3, 4, -1) == 12
    check(torch.zeros(40, 700), torch.randn(40, 512), [Segment(0, 40, 0)], group, "cpu", threads=3)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
else:
    os._exit(0)
"""


@pytest.mark.parametrize("kind", ["own", "openmp"])
def test_a_forked_child_has_a_team_of_its_own(kind: str) -> None:
    # torch with several threads does not survive a fork, so the child uses one.
    script = CHILD.replace("child = os.fork()", "torch.set_num_threads(1); child = os.fork()")
    done = subprocess.run(
        [sys.executable, "-c", script, kind], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
