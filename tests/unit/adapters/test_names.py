"""Tests of adapter names: the hint for an unknown name, and the names that other threads see."""

from __future__ import annotations

import difflib
import threading
from typing import Any

import pytest

from tests.support.adapter_store import write_adapter
from vlora.adapters import catalog
from vlora.adapters.catalog import HINT_NEIGHBOURS, MAX_HINT_LENGTH, NameTable
from vlora.errors import NotFound


def table_of(count: int) -> NameTable:
    """Return a table of `count` names without their adapters."""
    kinds = ("vehicles", "defects", "license-plates")
    return NameTable({f"{kinds[i % 3]}-{i:05}-r16": None for i in range(count)}, {})  # type: ignore[misc]


def message(table: NameTable, name: str) -> str:
    with pytest.raises(NotFound) as caught:
        table.handle(name)
    return str(caught.value)


@pytest.mark.parametrize(
    "unknown", ["vehicles-00300-r1", "vehicles-0030-r16", "ehicles-00300-r16", "vehicels-00300-r16"]
)
def test_an_error_names_a_similar_adapter_among_thousands(unknown: str) -> None:
    (hint,) = difflib.get_close_matches(unknown, table_of(5000).names, n=1)
    assert f"did you mean '{hint}'" in message(table_of(5000), unknown)


@pytest.mark.parametrize("count", [50, 500, 5000])
def test_an_unknown_name_is_compared_with_few_names_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    compared = []
    ratio = difflib.SequenceMatcher.real_quick_ratio

    def counted(matcher: Any) -> float:
        compared.append(matcher)
        return ratio(matcher)

    monkeypatch.setattr(difflib.SequenceMatcher, "real_quick_ratio", counted)
    assert "did you mean" in message(table_of(count), "vehicles-00030-r1")
    assert 0 < len(compared) <= 4 * HINT_NEIGHBOURS
    compared.clear()
    assert "did you mean" not in message(table_of(count), "x" * (MAX_HINT_LENGTH + 1))
    assert not compared


def test_names_are_read_and_changed_while_an_error_is_being_written(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(1)
    writing, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> str:
        writing.set()
        assert go_on.wait(10)
        return " (slow)"

    monkeypatch.setattr(catalog, "known_names", slow)
    errors: list[str] = []

    def ask() -> None:
        with pytest.raises(NotFound) as caught:
            harness.store.handle("a9")
        errors.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    assert writing.wait(10)
    write_adapter(harness.root / "a9", 9)

    def others() -> None:
        harness.reread()
        harness.request(9)

    other = threading.Thread(target=others, daemon=True)
    other.start()
    other.join(10)
    assert not other.is_alive(), "others wait for the error"
    assert harness.resident() == {"a9"}
    go_on.set()
    asking.join()
    assert errors == ["unknown adapter 'a9' (slow)"], "of the names at the time of the request"
