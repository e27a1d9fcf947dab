"""Tests of the estimate of a generation run's remaining time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.knowledge import ITEM, write_images, write_spec
from vlora.cli.generate import GenerationProgress, TimeLeft
from vlora.generation.fusion import Packed, RunState
from vlora.generation.spec import read_spec
from vlora.generation.trainer import Progress


def test_the_first_item_is_assumed_to_take_all_steps() -> None:
    left = TimeLeft(items=3, max_steps=100, now=0.0)
    assert str(left) == "time left not known yet"
    left.skip(50.0)
    left.add(20, 100, 70.0)  # One second per step; the 50 seconds before were no training.
    assert left.estimate == pytest.approx(3 * 100 - 20)
    assert str(left) == "about 5 min left"


def test_later_items_are_assumed_to_take_the_mean_of_the_earlier_ones() -> None:
    left = TimeLeft(items=3, max_steps=100, now=0.0)
    left.add(40, 100, 80.0)
    left.pack(2, 90.0)
    assert left.estimate == pytest.approx(2 * 40 * 2.0)
    left.add(30, 100, 150.0)
    assert left.estimate == pytest.approx((2 * 40 - 30) * 2.0)
    left.add(20, 100, 190.0)  # The next attempt for the same item.
    assert left.estimate == pytest.approx((2 * 40 - 40) * 2.0)


def test_items_that_an_earlier_process_packed_do_not_count() -> None:
    left = TimeLeft(items=4, max_steps=100, now=0.0)
    left.pack(1, 10.0)
    left.add(10, 100, 20.0)
    assert left.estimate == pytest.approx(90.0)


def test_a_merge_lasts_until_its_last_step() -> None:
    left = TimeLeft(items=1, max_steps=100, now=0.0)
    left.add(10, 100, 10.0)
    left.pack(0, 10.0)
    assert str(left) == "less than 1 min left"
    left.add(20, 200, 30.0)
    assert left.estimate == pytest.approx(180.0)


def test_progress_is_printed_line_by_line_if_the_output_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path)
    items = [{**ITEM, "name": name} for name in ("a", "b")]
    spec = read_spec(write_spec(tmp_path, items=items))
    with GenerationProgress(spec, shown=True) as progress:
        progress.status("reading a")
        progress.decided(RunState(("a", "b")))
        progress.report(Progress("a", None, 40, 400, 0.5, {"a": 0.25}))
        progress.decided(RunState(("b",), (Packed(1, 1, ("a",), {"a": 0.9}),)))
    assert capsys.readouterr().out.splitlines() == [
        "reading a",
        "0 of 2 items in 0 adapters, time left not known yet",
        "a alone: step 40/400: a 0.25; less than 1 min left",
        "1 of 2 items in 1 adapter, less than 1 min left",
    ]
