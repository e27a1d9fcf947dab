"""Tests of what the services of all models do with requests that wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.polling import until
from tests.support.services import MAX_BYTES, LmmSetting, Setting, UnarySetting, VisionSetting
from vlora.errors import Cancelled, InvalidArgument, Unavailable
from vlora.serving.tensors import strings


@pytest.fixture(params=[LmmSetting, UnarySetting, VisionSetting])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    created: Setting = request.param()
    yield created
    created.close()


def test_a_request_that_is_late_superseded_or_cancelled_ends_before_its_work(
    setting: Setting,
) -> None:
    working = setting.occupy()
    ended = [setting.wait(deadline_ms=20)]
    assert "past its deadline: 'deadline_ms' = 20" in ended[0].error.message
    ended += [setting.wait(stream_id="s")]
    newer = setting.wait(stream_id="s", supersede=True)
    ended += [setting.wait("x" * 16)]
    assert setting.cancel("x" * 16).answer == {}
    if setting.service.asks_clients:
        ended += [setting.wait()]
        ended[-1].cancelled = True
    assert all(isinstance(one.error, Cancelled) for one in ended)
    assert (setting.table.expired, setting.table.superseded) == (1, 1)
    before = setting.begun
    setting.gate.set()
    until(lambda: setting.begun == before + 1)
    assert not any(one.failure for one in (*working, newer))


def test_a_full_queue_rejects_a_request_with_its_length_before_reading_it(setting: Setting) -> None:
    working = setting.occupy()
    waiting = []
    while (refused := setting.wait()).failure is None:
        waiting.append(refused)
    assert isinstance(refused.failure, Unavailable)
    assert refused.failure.message == f"the queue is full: {setting.full} requests are waiting"
    unreadable = setting.ask(image=strings([b"x"]), sampling_parameters=np.zeros(7))
    assert unreadable.error.message == refused.failure.message
    before = setting.begun
    setting.gate.set()
    until(lambda: setting.begun == before + len(waiting))
    until(lambda: setting.wait().failure is None)
    assert not any(one.failure for one in (*working, *waiting))


def test_the_bytes_of_requests_are_limited(setting: Setting) -> None:
    assert isinstance(setting.wait(size=MAX_BYTES).error, InvalidArgument)
    setting.occupy()
    setting.wait(size=6000)
    held = setting.table.bytes
    refused = setting.wait(size=6000).error
    assert isinstance(refused, Unavailable)
    assert f"hold {held} bytes" in refused.message
    assert "the limit is 10000 ('max_in_flight_bytes')" in refused.message
    assert setting.table.bytes == held > 6000
    setting.gate.set()
    until(lambda: setting.wait(size=6000).failure is None)


def test_closing_ends_the_requests_that_wait(setting: Setting) -> None:
    setting.occupy()
    waiting = [setting.wait() for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(setting.service.close)
        assert all(isinstance(one.error, Unavailable) for one in waiting)
        assert isinstance(setting.wait().failure, Unavailable)
        setting.gate.set()
        closing.result(30)
