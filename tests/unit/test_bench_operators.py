"""Tests that the compared operators are correct, and tests of timing and roofline."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
from peft.tuners.lora import LoraConfig
from peft.tuners.lora.layer import Linear as PeftLinear

from benchmarks.frame import GRIDS
from benchmarks.lora_operators import (
    BASELINES,
    Atmm,
    Einsum,
    InFloat32,
    KernelCell,
    LoraOperator,
    PeftLoop,
    load_grid,
    static_tiles,
)
from benchmarks.machine import Roofline, interleaved
from tests.support.fakes import Clock
from vlora.atmm.search.timing import Timing

TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2}
OPERATORS: list[LoraOperator] = [Atmm(), *BASELINES]


def random_generator() -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))


def cell(rows: int, popularity: str, rank: int | str = "mixed", dtype: str = "fp32") -> KernelCell:
    return KernelCell("decode", 7, rows, 96, rank, popularity, False, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("popularity", ["identical", "distinct", "zipf"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@torch.inference_mode()
def test_an_operator_equals_float64(
    operator: LoraOperator, rows: int, popularity: str, dtype: str
) -> None:
    shape = cell(rows, popularity, dtype=dtype)
    check(operator, shape, TOLERANCE[dtype])


@torch.inference_mode()
def test_static_tiles_equal_float64() -> None:
    for dtype in ("fp32", "bf16"):
        for operator in static_tiles(dtype):
            check(operator, cell(3, "zipf", dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("inner", BASELINES, ids=lambda operator: operator.name)
@torch.inference_mode()
def test_a_baseline_in_fp32_is_exact_for_bf16_weights(inner: LoraOperator) -> None:
    check(InFloat32(inner), cell(3, "zipf", dtype="bf16"), TOLERANCE["fp32"])


def check(operator: LoraOperator, shape: KernelCell, tolerance: float) -> None:
    generator = random_generator()
    pairs, x = shape.draw_pairs(generator), shape.draw_rows(generator)
    x = x.to(operator.dtype or x.dtype)
    y = torch.randn(x.shape, generator=generator).to(x.dtype)
    expected = y.double()
    for segment in shape.segments:
        rows = slice(segment.start, segment.start + segment.length)
        a, b = pairs[segment.slot]
        expected[rows] += x[rows].double() @ a.double().T @ b.double().T
    operator.prepare(pairs, shape)(y, x)
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance


@torch.inference_mode()
def test_the_peft_loop_computes_what_peft_computes() -> None:
    shape, generator = cell(4, "zipf", rank=8), random_generator()
    pairs, x = shape.draw_pairs(generator), shape.draw_rows(generator)
    base = torch.nn.Linear(shape.width, shape.width, bias=False)
    base.weight.zero_()
    config = LoraConfig(r=8, lora_alpha=8)
    layer = PeftLinear(base, "0", config=config, r=8, lora_alpha=8)
    for slot, pair in enumerate(pairs):
        if slot:
            layer.update_layer(str(slot), r=8, lora_alpha=8, config=config)
        layer.lora_A[str(slot)].weight.copy_(pair.a)
        layer.lora_B[str(slot)].weight.copy_(pair.b)
    rows = x.view(shape.requests, shape.rows, shape.width)
    names = [str(slot) for slot in shape.slots]
    expected = layer(rows, adapter_names=names)
    y = torch.zeros_like(x)
    PeftLoop().prepare(pairs, shape)(y, x)
    torch.testing.assert_close(y.view_as(expected), expected)


def test_einsum_is_left_out_with_a_reason_where_it_would_gather_too_much() -> None:
    large = KernelCell("prefill", 8, 512, 4096, 64, "distinct", False, "fp32")
    assert Einsum().why_not(large) == "gathers 8.0 GiB, above 1"
    assert Einsum().why_not(cell(1, "zipf")) is None


def test_popularity_decides_which_requests_share_an_adapter() -> None:
    assert cell(2, "identical").adapters == 1
    assert cell(2, "distinct").adapters == 7
    zipf = cell(2, "zipf")
    assert 1 < zipf.adapters < 7
    assert set(zipf.slots) == set(range(zipf.adapters))
    assert sum(segment.length for segment in zipf.segments) == zipf.total_rows


def test_the_flops_and_bytes_of_a_cell_count_both_products() -> None:
    shape = KernelCell("decode", 2, 3, 100, 8, "distinct", False, "fp32")
    assert shape.flops == 2 * 6 * 8 * (100 + 100)
    assert shape.adapter_bytes == 2 * 8 * (100 + 100) * 4


def test_the_quick_grid_is_a_part_of_the_full_grid() -> None:
    quick, full = (
        load_grid(GRIDS / "kernels.json", ["fp32"], quick=quick) for quick in (True, False)
    )
    assert set(quick) < set(full)
    regimes = {(c.regime, c.cold) for c in quick}
    assert regimes >= {("decode", False), ("decode", True), ("prefill", False)}


def test_a_timing_has_median_and_noise() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0))
    assert timing.median == 3
    assert timing.noise == pytest.approx(2 / 3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the benchmarks, which the candidates advance."""
    made = Clock(0.0)
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def test_a_slow_candidate_gets_fewer_samples_spread_over_the_rounds(clock: Clock) -> None:
    def take(seconds: float) -> None:
        clock.now += seconds

    candidates = {"fast": partial(take, 0.001), "slow": partial(take, 0.01)}
    timings = interleaved(candidates, rounds=9, warm=False, budget=0.02)
    assert len(timings["fast"].samples) == 9
    assert len(timings["slow"].samples) == 3
    assert timings["slow"].median > timings["fast"].median


def test_a_sample_with_a_lead_begins_with_a_call_that_does_not_count(clock: Clock) -> None:
    counts = {"short": 0, "long": 0}

    def take(name: str, first: float, second: float) -> None:
        counts[name] += 1
        # Every other call is slow, as if its code were not cached and its threads asleep.
        clock.now += first if counts[name] % 2 else second

    candidates = {
        "short": partial(take, "short", 0.004, 0.001),
        "long": partial(take, "long", 0.01, 0.01),
    }
    timings = interleaved(candidates, rounds=5, warm=False, lead=True, budget=1.0)
    assert counts["short"] == 2 + 5 * 2
    assert timings["short"].median < 0.004
    # A long call has no lead: cold caches at its beginning add little to its time.
    assert counts["long"] == 2 + 5


def test_the_limit_is_the_larger_of_arithmetic_and_traffic() -> None:
    sizes: list[int] = []

    def bandwidth(size: int, seconds: float) -> float:
        sizes.append(size)
        return 10.0 if size > 1 << 27 else 100.0

    roofline = Roofline(lambda dtype, seconds: 1000.0, bandwidth, cold_bytes=1 << 28)
    assert roofline.seconds(5000, ((200, False),), "fp32") == 5.0
    assert roofline.seconds(100, ((200, False), (300, False)), "fp32") == 5.0
    assert roofline.seconds(100, ((200, True), (300, False)), "fp32") == 20.0 + 3.0
    assert sizes == [1 << 14, 1 << 28]
