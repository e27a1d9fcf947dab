"""Every implementation of the operator against float64, on fresh random data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlora.atmm import backends, op, tiles
from vlora.atmm.device import Device
from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import Head, LoraPair, MergeUpdate, Segment, Segments

FP32, BF16 = torch.float32, torch.bfloat16


def implementations() -> list[str]:
    try:
        return ["reference", *tiles.isas()]
    except ImportError:
        return ["reference"]


compiled = pytest.mark.skipif(
    implementations() == ["reference"], reason="the compiled core was not built"
)


@pytest.fixture(params=implementations())
def backend(request: pytest.FixtureRequest) -> Iterator[backends.Backend]:
    """Every implementation in turn: the reference, and each instruction set of this CPU."""
    if request.param == "reference":
        yield "reference"
        return
    with tiles.isa(request.param):
        yield "cpu"


@pytest.fixture(autouse=True)
def fresh_numbers() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))


def group_of(
    d_in: int, d_outs: Sequence[int], ranks: Sequence[int | None], dtype: torch.dtype = FP32
) -> LoraGroup:
    """Random pairs that keep values near 1; rank None: not targeted."""
    group = LoraGroup(d_in, d_outs, dtype)
    for rank in ranks:
        group.append(
            [
                LoraPair(
                    (torch.randn(rank, d_in) / d_in**0.5).to(dtype),
                    (torch.randn(d_out, rank) / rank**0.5).to(dtype),
                )
                if rank
                else None
                for d_out in d_outs
            ]
        )
    return group


def expected(
    y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup
) -> torch.Tensor:
    """The semantics, in float64."""
    result = y.double().clone()
    column = 0
    for d_out, pairs in zip(group.d_outs, group.pairs, strict=True):
        for segment in segments:
            pair = pairs[segment.slot]
            if pair is not None:
                rows = slice(segment.start, segment.start + segment.length)
                low = x[rows].double() @ pair.a.double().T
                result[rows, column : column + d_out] += segment.sign * low @ pair.b.double().T
        column += d_out
    return result


def check(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    group: LoraGroup,
    backend: backends.Backend,
    **options: int,
) -> None:
    want = expected(y, x, segments, group)
    got = y.clone(memory_format=torch.preserve_format)
    op.apply(got, x, segments, group, backend=backend, **options)
    # bf16: the intermediate and the sum are each rounded to 8 bits.
    tolerance = 2e-5 if group.dtype == FP32 else 4e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(len(y), dtype=torch.bool)
    for segment in segments:
        untouched[segment.start : segment.start + segment.length] = False
    assert torch.equal(got[untouched], y[untouched])


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[int], list[int | None], list[Segment], int, int]:
    """(d_in, d_outs, ranks, segments, rows, padding of the rows)."""
    d_in = draw(st.sampled_from([1, 2, 7, 16, 33, 100, 257, 513, 1024]))
    widths = st.sampled_from([1, 5, 15, 16, 17, 48, 63, 64, 130, 512])
    d_outs = draw(st.lists(widths, min_size=1, max_size=3))
    rank = st.one_of(st.none(), st.integers(1, 40), st.sampled_from([64, 65, 127, 128, 255, 256]))
    ranks = draw(st.lists(rank, min_size=1, max_size=5))
    slot = st.integers(0, len(ranks) - 1)
    segments, row = [], draw(st.integers(0, 3))
    length = st.one_of(st.integers(0, 9), st.sampled_from([16, 25, 31, 64, 97, 130]))
    for _ in range(draw(st.integers(0, 6))):
        rows = draw(length)
        segments.append(Segment(row, rows, draw(slot), draw(st.sampled_from([1, -1]))))
        if draw(st.booleans()):  # own and -live
            segments.append(Segment(row, rows, draw(slot), -1))
        row += rows + draw(st.sampled_from([0, 0, 1]))
    return d_in, d_outs, ranks, segments, row, draw(st.sampled_from([0, 1, 3, 16]))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=problems(), threads=st.sampled_from([1, 2, 3]))
def test_any_problem_equals_float64(
    problem: tuple[int, list[int], list[int | None], list[Segment], int, int],
    threads: int,
    backend: backends.Backend,
    dtype: torch.dtype,
) -> None:
    d_in, d_outs, ranks, segments, rows, padding = problem
    group = group_of(d_in, d_outs, ranks, dtype)
    x = torch.randn(rows, d_in + padding).to(dtype)[:, padding:]
    y = torch.randn(rows, sum(d_outs) + padding).to(dtype)[:, padding:]
    check(y, x, segments, group, backend, threads=threads)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rows", [0, 1, 3, 8192])
def test_long_and_short_steps_equal_float64(
    rows: int, backend: backends.Backend, dtype: torch.dtype
) -> None:
    group = group_of(96, [64, 32], [16, 33], dtype)
    half = rows // 2
    segments = [Segment(0, half, 0), Segment(half, rows - half, 1), Segment(0, rows, 0, -1)]
    x, y = torch.randn(rows, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    check(y, x, segments, group, backend, threads=2)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rank", [300, 512])
def test_ranks_beyond_a_row_of_scratch_equal_float64(
    rank: int, backend: backends.Backend, dtype: torch.dtype
) -> None:
    group = group_of(128, [80], [rank], dtype)
    for rows in (2, 40):
        x, y = torch.randn(rows, 128).to(dtype), torch.randn(rows, 80).to(dtype)
        check(y, x, [Segment(0, rows, 0)], group, backend)


@compiled
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 12, 50])
def test_every_configuration_equals_float64(rows: int, dtype: torch.dtype) -> None:
    group = group_of(300, [130, 40], [9, 64, None], dtype)
    segments = [Segment(1, rows, 0), Segment(rows + 1, rows, 1, -1), Segment(0, rows, 2)]
    x = torch.randn(2 * rows + 2, 300).to(dtype)
    y = torch.randn(2 * rows + 2, 170).to(dtype)
    for isa in tiles.isas():
        with tiles.isa(isa):
            name = "fp32" if dtype == FP32 else "bf16"
            every = 1 if isa.startswith("avx512") else 5
            for index in range(0, len(tiles.configs("apply", name)), every):
                check(y, x, segments, group, "cpu", config=index)


def test_an_adapter_with_nan_leaves_other_rows_alone(backend: backends.Backend) -> None:
    for dtype in (FP32, BF16):
        group = group_of(64, [48], [20, 8, 33], dtype)
        bad = group.pairs[0][1]
        assert bad is not None
        broken = LoraGroup(64, [48], dtype)
        for slot in range(3):
            pair = group.pairs[0][slot]
            assert pair is not None
            if slot == 1:
                pair = LoraPair(torch.full_like(pair.a, torch.nan), pair.b * torch.inf)
            broken.append([pair])
        segments = [Segment(0, 5, 0), Segment(5, 1, 1), Segment(6, 30, 2), Segment(36, 9, 1)]
        x, y = torch.randn(45, 64).to(dtype), torch.randn(45, 48).to(dtype)
        x[40] = torch.nan
        got = y.clone()
        op.apply(got, x, segments, broken, backend=backend)
        assert got[5].isnan().all()
        assert got[36:].isnan().all()
        sound = [Segment(0, 5, 0), Segment(6, 30, 2)]
        rows = [*range(5), *range(6, 36)]
        want = expected(y, x, sound, group)
        tolerance = 2e-5 if dtype == FP32 else 4e-2
        torch.testing.assert_close(got[rows].double(), want[rows], rtol=tolerance, atol=tolerance)


def test_unaligned_addresses_are_served(backend: backends.Backend) -> None:
    for dtype in (FP32, BF16):
        group = group_of(130, [66], [12, 40], dtype)
        x = torch.randn(40 * 130 + 1).to(dtype)[1:].view(40, 130)
        y = torch.randn(40 * 66 + 1).to(dtype)[1:].view(40, 66)
        check(y, x, [Segment(0, 7, 0), Segment(7, 33, 1)], group, backend)


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (Segment(0, 1, 2), "slot 2 is not one of the 2 adapters"),
        (Segment(0, 1, -1), "slot"),
        (Segment(3, 2, 0), "outside the 4 rows"),
        (Segment(-1, 2, 0), "start|outside"),
        (Segment(0, -1, 0), "length|outside"),
        (Segment(0, 1, 0, 2), "sign"),
    ],
)
def test_a_wrong_segment_is_refused(
    segment: Segment, reason: str, backend: backends.Backend
) -> None:
    group = group_of(16, [8], [4, 4])
    y = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=reason):
        op.apply(y, torch.randn(4, 16), [Segment(0, 4, 0), segment], group, backend=backend)
    assert not y.any()


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (torch.zeros(4, 15), torch.zeros(4, 8), "do not fit"),
        (torch.zeros(4, 16), torch.zeros(4, 9), "do not fit"),
        (torch.zeros(3, 16), torch.zeros(4, 8), "do not fit"),
        (torch.zeros(4, 16).double(), torch.zeros(4, 8), "float64"),
        (torch.zeros(4, 16), torch.zeros(4, 8).bfloat16(), "bfloat16"),
    ],
)
def test_a_wrong_shape_is_refused(
    x: torch.Tensor, y: torch.Tensor, reason: str, backend: backends.Backend
) -> None:
    with pytest.raises(ValueError, match=reason):
        op.apply(y, x, [Segment(0, 1, 0)], group_of(16, [8], [4]), backend=backend)


@compiled
def test_columns_that_do_not_lie_side_by_side_are_refused() -> None:
    group = group_of(16, [8], [4])
    with pytest.raises(ValueError, match="side by side"):
        op.apply(torch.zeros(8, 4).T, torch.zeros(4, 16), [], group, backend="cpu")


def test_a_pair_that_does_not_fit_its_group_is_refused() -> None:
    group = LoraGroup(16, [8])
    with pytest.raises(ValueError, match="do not fit a projection"):
        group.append([LoraPair(torch.zeros(4, 16), torch.zeros(8, 5))])
    with pytest.raises(ValueError, match="the group is"):
        group.append([LoraPair(torch.zeros(4, 16).bfloat16(), torch.zeros(8, 4).bfloat16())])
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        LoraGroup(16, [8], torch.float16)


def test_heads_of_many_classes_equal_float64(backend: backends.Backend) -> None:
    group = HeadGroup(200)
    for classes in (1, 5, 300, 16):
        group.append(Head(torch.randn(classes, 200) / 14, torch.randn(classes)))
    group.append(None)
    x = torch.randn(40, 200)
    segments = [Segment(0, 1, 0), Segment(1, 9, 1), Segment(12, 20, 2), Segment(39, 1, 3)]
    got = op.heads(x, segments, group, backend=backend)
    assert got.shape == (40, 300)
    want = torch.zeros(40, 300, dtype=torch.float64)
    for segment in segments:
        head = group.heads[segment.slot]
        assert head is not None
        rows = slice(segment.start, segment.start + segment.length)
        want[rows, : len(head.bias)] = x[rows].double() @ head.weight.double().T + head.bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no head"):
        op.heads(x, [Segment(0, 1, 4)], group, backend=backend)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_merged_slabs_equal_float64_within_one_rounding(
    backend: backends.Backend, dtype: torch.dtype, in_place: bool, sign: int
) -> None:
    shapes = [(5, 7, 3), (130, 128, 16), (64, 192, 300), (1, 1, 1), (97, 1056, 33)]
    base = torch.randn(sum(o * i for o, i, _ in shapes) + 11).to(dtype)
    updates, offset = [], 3
    want = base.double().clone()
    for d_out, d_in, rank in shapes:
        pair = LoraPair(torch.randn(rank, d_in) / rank**0.5, torch.randn(d_out, rank))
        updates.append(MergeUpdate(offset, pair))
        delta = pair.b.double() @ pair.a.double()
        want[offset : offset + d_out * d_in] += sign * delta.flatten()
        offset += d_out * d_in
    out = base.clone() if in_place else torch.full_like(base, 7.0)
    op.merge(out, out if in_place else base, updates, sign, threads=2, backend=backend)
    inside = slice(3, offset)
    if dtype == FP32:
        torch.testing.assert_close(out[inside].double(), want[inside], rtol=1e-5, atol=1e-5)
    else:
        # round(fp32(base) + B A), within one unit in the last place.
        torch.testing.assert_close(out[inside].double(), want[inside], rtol=2**-8, atol=1e-5)
    rest = torch.cat((out[:3], out[offset:]))
    assert torch.equal(rest, torch.cat((base[:3], base[offset:])) if in_place else rest * 0 + 7)


@compiled
@pytest.mark.parametrize("size", [64, 4096])
def test_every_merge_configuration_equals_the_reference(size: int) -> None:
    base = torch.randn(96 * size)
    update = MergeUpdate(0, LoraPair(torch.randn(20, size), torch.randn(96, 20)))
    want, got = torch.empty_like(base), torch.empty_like(base)
    op.merge(want, base, [update], backend="reference")
    for index, _ in enumerate(tiles.configs("merge", "fp32")):
        got.zero_()
        op.merge(got, base, [update], backend="cpu", config=index)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_wrong_merges_are_refused(backend: backends.Backend) -> None:
    slab = torch.zeros(100)
    pair = LoraPair(torch.zeros(2, 10), torch.zeros(10, 2))
    wrong: list[tuple[Callable[[], None], str]] = [
        (lambda: op.merge(slab, slab, [MergeUpdate(1, pair)], backend=backend), "do not fit"),
        (lambda: op.merge(slab, slab[1:], [], backend=backend), "not alike"),
        (
            lambda: op.merge(
                slab, slab, [MergeUpdate(0, LoraPair(pair.a.bfloat16(), pair.b))], backend=backend
            ),
            "fp32 factors",
        ),
    ]
    for call, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            call()


@compiled
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_with_pinned_tiles_a_rows_output_is_the_same_in_any_batch(dtype: torch.dtype) -> None:
    group = group_of(700, [130, 64], [8, 24, 64], dtype)
    x, y = torch.randn(90, 700).to(dtype), torch.randn(90, 194).to(dtype)

    def run(segments: Sequence[Segment], rows: slice, threads: int) -> torch.Tensor:
        part = y[rows].clone()
        op.apply(part, x[rows], segments, group, backend="cpu", threads=threads)
        return part

    for isa in tiles.isas():
        for pinned in (None, tiles.configs("apply", "fp32")[0]["name"]):
            with tiles.isa(isa), tiles.pinned(pinned):
                together = run(
                    [Segment(0, 40, 0), Segment(40, 20, 1), Segment(60, 30, 2)], slice(0, 90), 2
                )
                for row, slot in ((0, 0), (17, 0), (39, 0), (40, 1), (59, 1), (60, 2), (89, 2)):
                    alone = run([Segment(0, 1, slot)], slice(row, row + 1), 1)
                    assert torch.equal(alone[0], together[row]), (isa, pinned, row)
                some = run([Segment(0, 13, 0)], slice(20, 33), 1)
                assert torch.equal(some, together[20:33])


@compiled
def test_the_table_chooses_by_bucket_and_counts() -> None:
    names = [config["name"] for config in tiles.configs("apply", "fp32")]
    shape = {"d_in": 64, "d_out": 32, "rank": 16, "segments": 1}
    try:
        tiles.use(
            {
                tiles.key("apply", "fp32", rows=1, **shape): names[3],
                tiles.key("apply", "fp32", rows=64, **shape): names[-1],
            }
        )
        tiles.reset_counters()
        group = group_of(64, [32], [16, 200])
        for rows, slot in ((1, 0), (50, 0), (2, 0), (1, 1)):
            y = torch.zeros(rows, 32)
            op.apply(y, torch.randn(rows, 64), [Segment(0, rows, slot)], group, backend="cpu")
        assert tiles.counters() == {"hits": 2, "misses": 2, "defaults": 0}
        with pytest.raises(ValueError, match="no configuration is named 'none such'"):
            tiles.use({1: "none such"})
    finally:
        tiles.clear()
    tiles.reset_counters()
    op.apply(y, torch.randn(1, 64), [Segment(0, 1, 0)], group, backend="cpu")
    assert tiles.counters() == {"hits": 0, "misses": 0, "defaults": 1}


@compiled
def test_keys_have_128_bits_and_differ_by_bucket_only() -> None:
    shape = {"d_in": 4096, "d_out": 4096, "rank": 64, "segments": 8}
    assert tiles.key("apply", "fp32", rows=33, **shape) == tiles.key(
        "apply", "fp32", rows=64, **shape
    )
    keys = {
        tiles.key(operation, dtype, rows=rows, **shape)
        for operation in ("apply", "merge")
        for dtype in ("fp32", "bf16")
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
    }
    assert len(keys) == 32
    assert all(0 <= key < 1 << 128 for key in keys)


@compiled
def test_tables_of_both_dtypes_are_loaded_together_and_wrong_ones_left_out(tmp_path: Path) -> None:
    name = tiles.configs("apply", "fp32")[0]["name"]
    shape = {"rows": 1, "d_in": 64, "d_out": 32, "rank": 16, "segments": 1}
    start = f"{Device.here().name}-{tiles.isas()[0]}-"
    for dtype in ("fp32", "bf16"):
        entries = {f"{tiles.key('apply', dtype, **shape):032x}": name}
        text = json.dumps({"version": tiles.VERSION, "entries": entries})
        (tmp_path / f"{start}{dtype}.json").write_text(text)
    try:
        assert len(tiles.load_for_this_cpu(tmp_path)) == 2
        tiles.reset_counters()
        for dtype in (FP32, BF16):
            group = group_of(64, [32], [16], dtype)
            x, y = torch.randn(1, 64).to(dtype), torch.zeros(1, 32, dtype=dtype)
            op.apply(y, x, [Segment(0, 1, 0)], group, backend="cpu")
        assert tiles.counters()["hits"] == 2
        (tmp_path / f"{start}fp32.json").write_text(json.dumps({"version": 99, "entries": {}}))
        assert tiles.load_for_this_cpu(tmp_path) == []
        assert tiles.load_for_this_cpu(tmp_path / "none") == []
    finally:
        tiles.clear()


def test_the_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.default.cache_clear()
    try:
        monkeypatch.setenv(backends.VARIABLE, "reference")
        assert backends.default() == "reference"
        backends.default.cache_clear()
        monkeypatch.setenv(backends.VARIABLE, "gpu")
        with pytest.raises(ValueError, match="'cpu' or 'reference'"):
            backends.default()
    finally:
        backends.default.cache_clear()


def test_without_the_core_the_reference_serves_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ImportError("not built")

    monkeypatch.delenv(backends.VARIABLE, raising=False)
    monkeypatch.setattr(backends, "native", missing)
    backends.default.cache_clear()
    try:
        assert backends.default() == backends.default() == "reference"
        assert len(caplog.records) == 1
        assert "not built" in caplog.text
        group = group_of(16, [8], [4])
        check(torch.zeros(3, 8), torch.randn(3, 16), [Segment(0, 3, 0)], group, "reference")
    finally:
        backends.default.cache_clear()


def test_segments_are_a_tuple_that_keeps_the_cores_copy() -> None:
    segments = Segments([Segment(0, 1, 0)])
    assert segments == (Segment(0, 1, 0),)
    assert Segments.of(segments) is segments
    assert Segments.of([Segment(0, 1, 0)]) == segments
