"""The command line's parts that need no server."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from vlora.cli import _signals_as_interrupts


@pytest.fixture
def ctrl_c_ignored() -> Iterator[None]:
    """As a script's background process inherits it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_ignored")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_end_a_server_that_a_script_started(ending: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), _signals_as_interrupts():
        signal.raise_signal(ending)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
