"""Tests of the estimate of a generation run's remaining time."""

from __future__ import annotations

import pytest

from vlora.generation.time_left import TimeLeft


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
