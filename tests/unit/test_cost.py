"""Tests of the cost model: sums of parts, learned corrections, and stored profiles."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.replay import fork, without_adapters
from vlora.atmm import tiles
from vlora.backends import override
from vlora.engine import calibration
from vlora.engine.cost import AdapterSize, CostModel, Part, Profile, guess, rows_by_adapter
from vlora.engine.policies.base import Candidate
from vlora.ids import BASE

PROFILE = Profile(
    products=((1, 0.010), (8, 0.010), (16, 0.018)),
    head=0.25,
    answer=1e-4,
    position=1e-6,
    pair=1e-7,
    adapter_element=1e-9,
    adapter_element_row=1e-11,
    merge=(2e-3, 1e-12),
)
SIZES = {0: AdapterSize(100_000, 10**9), 1: AdapterSize(400_000, 4 * 10**9)}


def model(profile: Profile = PROFILE, held: int = BASE) -> CostModel:
    return CostModel(profile, lambda slot: SIZES[slot], merged_slot=lambda: held)


def test_products_are_interpolated_between_knots_and_extrapolated_after_them() -> None:
    costs = model()
    layers = [costs.products(rows, 1) - 1e-4 for rows in (1, 4, 8, 12, 16, 24)]
    assert layers == pytest.approx([0.010, 0.010, 0.010, 0.014, 0.018, 0.026])
    assert costs.products(16, 16) - costs.products(16, 1) == pytest.approx(0.2 * 0.008 + 15e-4)
    assert costs.products(16, 0) == pytest.approx(0.018 - 0.2 * 0.010)


def test_each_adapter_is_read_once_and_applied_to_its_rows() -> None:
    costs = model()
    base = costs.predict([Part(BASE, 4, 0, True), Part(BASE, 4, 0, True)], BASE)
    one = costs.predict([Part(0, 4, 0, True), Part(0, 4, 0, True)], BASE)
    two = costs.predict([Part(0, 4, 0, True), Part(1, 4, 0, True)], BASE)
    assert one - base == pytest.approx(1e-4 + 8e-6)
    assert two - base == pytest.approx(1e-4 + 4e-6 + 4e-4 + 16e-6)


def test_a_step_with_any_adapter_has_the_lora_calls_once() -> None:
    parts = [Part(0, 4, 0, True), Part(1, 4, 0, True), Part(BASE, 1, 0, True)]
    free, costly = model(), model(replace(PROFILE, lora_calls=3e-3))
    assert costly.predict(parts, BASE) - free.predict(parts, BASE) == pytest.approx(3e-3)
    for without_adapter in (parts[2:], []):
        assert costly.predict(without_adapter, BASE) == free.predict(without_adapter, BASE)
    assert costly.predict(parts[:1], 0) == free.predict(parts[:1], 0), "all rows are merged"
    assert without_adapters(costly).predict(parts, BASE) < free.predict(parts, BASE)


def test_the_live_adapter_is_subtracted_from_the_rows_of_others_only() -> None:
    rows = {0: 3, 1: 2, BASE: 5}
    assert rows_by_adapter(rows, BASE) == {0: 3, 1: 2}
    assert rows_by_adapter(rows, 0) == {1: 2, 0: 7}
    assert rows_by_adapter({0: 3}, 0) == {}


def test_attention_is_linear_in_positions_and_in_pairs_of_row_and_position() -> None:
    costs = model()
    assert costs.attention(1, 99) == pytest.approx(1e-4 + 99.5e-7)
    assert costs.attention(10, 0) == pytest.approx(1e-5 + 50e-7)


def test_switching_to_merged_weights_or_to_the_base_costs_no_merge() -> None:
    costs = model(held=1)
    assert costs.switch(BASE, 0) == pytest.approx(3e-3)
    assert [costs.switch(0, BASE), costs.switch(0, 0), costs.switch(0, 1)] == [0.0, 0.0, 0.0]


def test_undoing_a_merge_in_place_costs_as_much_as_the_merge() -> None:
    costs = replace(model(held=1), in_place=True)
    assert costs.switch(BASE, 0) == costs.switch(0, BASE) == pytest.approx(3e-3)
    assert costs.switch(0, 1) == pytest.approx(3e-3 + 6e-3)
    assert (costs.switch(1, 1), costs.switch(BASE, BASE)) == (0.0, 0.0)


def test_predictions_converge_to_the_times_of_each_kind_of_step() -> None:
    costs = model()
    decode, prompt = [Part(BASE, 1, 10, True)] * 4, [Part(BASE, 16, 0, True)]
    other = costs.predict(prompt, BASE)
    slow = 2 * costs.predict(decode, BASE)
    assert costs.record(decode, BASE, slow) == pytest.approx(slow / 2)
    assert costs.predict(prompt, BASE) == pytest.approx(2 * other), "before the first prompt step"
    for _ in range(200):
        costs.record(prompt, BASE, other)
        costs.record(decode, BASE, slow)
    assert costs.predict(decode, BASE) == pytest.approx(slow, rel=1e-3)
    assert costs.predict(prompt, BASE) == pytest.approx(other, rel=1e-3)
    assert costs.median_error < 0.01 < max(costs.corrections.errors)


def test_steps_with_a_merged_adapter_have_a_factor_of_their_own() -> None:
    costs = model(replace(PROFILE, lora_calls=3e-3))
    parts = [Part(0, 1, 10, True)] * 4
    unmerged, merged = (costs.predict(parts, live) for live in (BASE, 0))
    assert costs.saving(parts, 0) == pytest.approx([unmerged - merged] * 2)
    for _ in range(40):
        costs.record(parts, BASE, unmerged)
        costs.record(parts, 0, 1.5 * merged)
    assert costs.predict(parts, BASE) == pytest.approx(unmerged, rel=0.01)
    assert costs.predict(parts, 0) == pytest.approx(1.5 * merged, rel=0.02)
    measured, profiled = costs.saving(parts, 0)
    lost = pytest.approx(unmerged - 1.5 * merged, abs=0.02 * unmerged)
    assert measured * costs.corrections.pace.factor == lost
    assert profiled == pytest.approx(unmerged - merged)
    for _ in range(20_000):
        costs.record(parts, BASE, unmerged)
    assert costs.saving(parts, 0)[0] > 0.0, "a merge is tried again"


def test_a_slower_machine_corrects_all_kinds_of_steps_at_once() -> None:
    costs = model()
    kinds = [[Part(BASE, 1, 10, True)] * 4, [Part(BASE, 16, 0, True)], [Part(0, 1, 10, True)]]
    before = [costs.predict(parts, BASE) for parts in kinds]
    for _ in range(20):
        for parts, seconds in zip(kinds, before, strict=True):
            costs.record(parts, BASE, seconds)
    for _ in range(6):
        costs.record(kinds[0], BASE, 3 * before[0])
    for parts, seconds in zip(kinds, before, strict=True):
        assert costs.predict(parts, BASE) == pytest.approx(3 * seconds, rel=0.25)


def test_the_step_overhead_is_learned_as_a_line_over_the_requests() -> None:
    costs = model()
    assert costs.overhead(4) == 0.0
    for i in range(300):
        parts = [Part(BASE, 1, 10, True)] * (1 + i % 8)
        costs.record(parts, BASE, 0.01, 1e-3 + 2e-4 * len(parts))
    for count in (1, 4, 8, 16):
        overhead = costs.overhead(count) * costs.corrections.pace.factor
        assert overhead == pytest.approx(1e-3 + 2e-4 * count, rel=0.01)
    assert costs.predict([Part(BASE, 1, 10, True)] * 8, BASE) == pytest.approx(0.0126, rel=0.02)
    before = costs.overhead(8)
    costs.record([Part(BASE, 1, 10, True)] * 8, BASE, 0.01, 5.0)
    assert costs.overhead(8) < 1.25 * before, "a single outlier changes little"


def test_the_overhead_of_one_step_size_is_used_for_all_sizes() -> None:
    costs = model()
    for _ in range(30):
        costs.record([Part(BASE, 1, 10, True)] * 4, BASE, 0.01, 3e-3)
    expected = pytest.approx(3e-3 / costs.corrections.pace.factor)
    assert costs.overhead(1) == costs.overhead(8) == expected


def test_a_forked_model_learns_separately() -> None:
    costs = model()
    parts = [Part(0, 4, 0, True)]
    costs.record(parts, BASE, costs.predict(parts, BASE))
    before = costs.predict(parts, BASE)
    other = fork(costs)
    for _ in range(5):
        other.record(parts, BASE, 3 * before)
    assert costs.predict(parts, BASE) == before < other.predict(parts, BASE)


def test_predictions_of_merges_are_corrected() -> None:
    costs = model()
    for _ in range(30):
        costs.record_switch(costs.switch(BASE, 0), 6e-3)
    assert costs.switch(BASE, 0) == pytest.approx(6e-3, rel=1e-3)
    assert costs.switch(BASE, 1) == pytest.approx(12e-3, rel=1e-3)


@pytest.mark.parametrize("live", [BASE, 0, 1])
def test_the_predicted_steps_of_single_requests_are_those_of_their_parts(live: int) -> None:
    costs = model(replace(PROFILE, lora_calls=3e-3))
    for parts in ([Part(0, 3, 0, True)], [Part(BASE, 1, 10, True)] * 2):
        costs.record(parts, live, 0.02, 1e-3)
    ready = [
        Candidate("a", 0, missing=3, context=7),
        Candidate("b", BASE),
        Candidate("c", 1, missing=9),
        Candidate("d", 1, context=30),
    ]
    parts = [[Part(r.slot, r.missing, r.context, True)] for r in ready]
    assert costs.steps(ready, live) == pytest.approx([costs.predict(p, live) for p in parts])
    free = without_adapters(costs).steps(ready, live)
    cheaper = [f < s for f, s in zip(free, costs.steps(ready, live), strict=True)]
    assert cheaper == [r.slot != live for r in ready]


def test_a_guessed_profile_gives_positive_increasing_predictions() -> None:
    costs = CostModel(guess(10**8, 2, 10**7), lambda slot: SIZES[slot])
    short, long = (costs.predict([Part(0, rows, 0, True)], BASE) for rows in (1, 1000))
    assert 0 < short < long


def test_a_profile_is_measured_once_and_loaded_the_next_time(tmp_path: Path) -> None:
    assert calibration.load_or_measure(("key",), lambda: PROFILE, tmp_path) == PROFILE
    again = calibration.load_or_measure(("key",), lambda: pytest.fail("measured again"), tmp_path)
    assert again == PROFILE
    moved = replace(PROFILE, answer=2.0)
    assert calibration.load_or_measure(("key",), lambda: moved, tmp_path, force=True) == moved
    assert calibration.load_or_measure(("key",), lambda: PROFILE, tmp_path) == moved
    other = replace(PROFILE, answer=5.0)
    assert calibration.load_or_measure(("another",), lambda: other, tmp_path) == other


def test_a_profile_belongs_to_the_kernels_it_was_measured_with(tmp_path: Path) -> None:
    contexts = [override("atmm", "reference"), override("kernels", "reference")]
    others = [isa for isa in tiles.isas() if isa != tiles.current_isa("fp32")]
    contexts += [tiles.isa(isa) for isa in others if "avx512" not in isa]
    calibration.load_or_measure(("key",), lambda: PROFILE, tmp_path)
    for count, context in enumerate(contexts):
        moved = replace(PROFILE, answer=float(count))
        with context:
            assert calibration.load_or_measure(("key",), lambda: moved, tmp_path) == moved  # noqa: B023
    assert calibration.load_or_measure(("key",), lambda: moved, tmp_path) == PROFILE


@pytest.mark.parametrize("broken", ["", "{}", "[1]", json.dumps(asdict(PROFILE) | {"head": "x"})])
def test_an_invalid_stored_profile_is_measured_again(tmp_path: Path, broken: str) -> None:
    calibration.load_or_measure(("key",), lambda: PROFILE, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(broken)
    other = replace(PROFILE, answer=5.0)
    assert calibration.load_or_measure(("key",), lambda: other, tmp_path) == other


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert calibration.load_or_measure(("key",), lambda: PROFILE, tmp_path / "file") == PROFILE
