"""Tests of ATMM's CUDA kernels behind `vlora.atmm.op`: tiles, segments, adapters and faults.

Each test runs on the emulation: the same kernels compiled for the host, with loops in place of
tensor cores. It also runs on a GPU if there is one and `make cuda` has been run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.atmm_problems import emulation, expected
from tests.support.drawing import drawn
from vlora.atmm.cuda import library as c
from vlora.atmm.cuda.choice import KernelChoice
from vlora.atmm.cuda.library import CudaError, Library
from vlora.atmm.cuda.operator import DTYPES, DeviceFault, Operator
from vlora.atmm.cuda.segments import DeviceSegments, SegmentBounds, bounds_of
from vlora.atmm.cuda.tables import MIN_SLOTS, DeviceGroup
from vlora.atmm.types import LoraPair, MergeUpdate, Segment

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
"""Maximum error relative to the largest true value: the intermediate and y are rounded to the
storage type."""
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def fresh_numbers() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))


class Case:
    """Fresh random data of mixed ranks, and the float64 result for any segments."""

    ranks = (8, 64, 5, 128, None, 33)

    def __init__(
        self,
        operator: Operator,
        dtype: torch.dtype,
        rows: int,
        d_in: int = 136,
        d_outs: Sequence[int] = (72, 264),
    ) -> None:
        self.operator, self.dtype, self.d_in, self.d_outs = operator, dtype, d_in, d_outs
        self.group = DeviceGroup(d_in, d_outs, dtype, operator.device)
        self.slots: list[list[LoraPair | None]] = []
        for rank in self.ranks:
            self.append(rank)
        self.x = self.draw(rows, d_in) * d_in**0.5
        self.before = self.draw(rows, sum(d_outs))

    def append(self, rank: int | None) -> None:
        """Add a slot with a pair of this rank for each projection; None for no pairs."""
        pairs = self.drawn_pairs(rank)
        self.slots.append(pairs)
        self.group.append(pairs)
        self.group.ready()

    def drawn_pairs(self, rank: int | None) -> list[LoraPair | None]:
        if rank is None:
            return [None] * len(self.d_outs)
        return [LoraPair(self.draw(rank, self.d_in), self.draw(d, rank)) for d in self.d_outs]

    @property
    def pairs(self) -> list[tuple[LoraPair | None, ...]]:
        return list(zip(*self.slots, strict=True))

    def draw(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape) / shape[-1] ** 0.5
        return values.to(self.operator.device, self.dtype)

    def run(
        self, segments: Sequence[Segment] | DeviceSegments, choice: KernelChoice | None = None
    ) -> torch.Tensor:
        if not isinstance(segments, DeviceSegments):
            segments = self.operator.segments(segments)
        # NaN in every type: nothing may depend on previous content.
        self.operator.workspaces[-1][c.HEADER_BYTES :] = 0xFF
        y = self.before.clone()
        self.operator.apply(y, self.x, segments, self.group, choice)
        self.operator.synchronize()
        return y

    def check(self, y: torch.Tensor, segments: Sequence[Segment]) -> None:
        desired = expected(self.before, self.x, segments, self)
        error = (y.double() - desired).abs().max() / desired.abs().max()
        assert error < TOLERANCE[self.dtype]


def in_turn(lengths: Sequence[int]) -> list[Segment]:
    """Return contiguous segments, with alternating slots and signs."""
    segments, start = [], 0
    for i, length in enumerate(lengths):
        segments.append(Segment(start, length, i % len(Case.ranks), -1 if i % 3 == 1 else 1))
        start += length
    return segments


def by_tiles(library: Library, dtype: torch.dtype, rows_up_to: int = 0) -> list[KernelChoice]:
    """Yield every tile of the type at least once, with different slices."""
    shrinks = list(library.tiles_of("shrink", DTYPES[dtype]))
    expands = list(library.tiles_of("expand", DTYPES[dtype]))
    return [
        KernelChoice(
            shrinks[i % len(shrinks)],
            expands[i % len(expands)],
            slices=(1, 2, 7)[i % 3],
            rows_up_to=rows_up_to,
        )
        for i in range(max(len(shrinks), len(expands)))
    ]


by_rows_or_tiles = pytest.mark.parametrize("by", ["rows", "tiles"])


def choice_of(by: str, library: Library, dtype: torch.dtype) -> KernelChoice:
    """Return row kernels or the first tiles."""
    return KernelChoice() if by == "rows" else by_tiles(library, dtype)[0]


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(
    ("lengths", "rows_up_to"),
    [
        ((1,) * 9, 0),
        ((1, 0, 17, 130, 3), 0),
        ((200,), 0),
        ((1, 40, 1, 1, 8, 9, 70, 3), 8),  # Short and long segments use their own kernels.
    ],
)
def test_every_tile_equals_float64(
    operator: Operator, dtype: torch.dtype, lengths: tuple[int, ...], rows_up_to: int
) -> None:
    case, segments = Case(operator, dtype, sum(lengths)), in_turn(lengths)
    if rows_up_to:
        segments += [Segment(0, sum(lengths), 1, -1), Segment(5, 20, 3)]
    for choice in by_tiles(operator.library, dtype, rows_up_to):
        case.check(case.run(segments, choice), segments)


@drawn(dtype=[*SIXTEEN_BITS, torch.float32], row_block=c.ROW_BLOCKS, slices=[1, 3, 32])
def test_the_row_kernels_equal_float64_for_any_number_of_slices(
    operator: Operator, dtype: torch.dtype, row_block: int, slices: int
) -> None:
    case, segments = Case(operator, dtype, 24, d_in=1096), in_turn((1, 1, 2, 5, 1, 14))
    choice = KernelChoice(row_block=row_block, row_slices=slices)
    case.check(case.run(segments, choice), segments)


@by_rows_or_tiles
def test_own_and_live_segments_of_the_same_rows_are_added_in_order(
    operator: Operator, by: str
) -> None:
    segments = [Segment(0, 33, slot, sign) for slot, sign in ((0, 1), (1, -1), (3, 1))] * 4
    segments += [Segment(20, 13, 2), Segment(33, 4, 5)]
    case = Case(operator, torch.bfloat16, 40)
    choice = choice_of(by, operator.library, torch.bfloat16)
    y = case.run(segments, choice)
    case.check(y, segments)
    assert len(operator.segments(segments).ends) > c.MAX_WAVES  # More than one call is needed.
    assert torch.equal(y, case.run(segments, choice))


def test_hundreds_of_empty_segments_change_nothing(operator: Operator) -> None:
    case, segments = Case(operator, torch.bfloat16, 40), in_turn((1, 30, 9))
    real = operator.segments(segments)
    empty = torch.zeros(700, 4, dtype=torch.int32, device=operator.device)
    padded = DeviceSegments(torch.cat((real.tensor, empty)), (703,), 1, 40)
    for choice in (
        KernelChoice(),
        KernelChoice(row_block=4),
        *by_tiles(operator.library, torch.bfloat16, 1),
    ):
        assert torch.equal(case.run(padded, choice), case.run(real, choice))
    operator.check()


@pytest.mark.parametrize(
    ("segments", "bounds"),
    [
        ([Segment(0, 1, 3)], SegmentBounds(1, 1, 2)),
        ([Segment(2, 1, 0), Segment(3, 2, 5), Segment(9, 1, 4, -1)], SegmentBounds(1, 4, 2)),
        ([Segment(0, 40, 1)], SegmentBounds(1, 2, 32)),
        (
            [Segment(0, 3, 0), Segment(3, 37, 2), Segment(0, 40, 1, -1)],
            SegmentBounds(2, 4, 32),
        ),
    ],
)
def test_bounded_segments_are_divided_and_filled_up_but_give_the_same(
    operator: Operator, segments: list[Segment], bounds: SegmentBounds
) -> None:
    found, tensor = bounds_of(operator.library, segments)
    assert found == bounds
    case = Case(operator, torch.bfloat16, 40)
    for more in (found, replace(found, longest=32)):
        case.check(case.run(more.on(tensor.to(operator.device))), segments)
    if bounds.waves == 1:
        wider = torch.cat((tensor, torch.zeros(5, 4, dtype=torch.int32)))
        filled = replace(found, capacity=len(wider)).on(wider.to(operator.device))
        case.check(case.run(filled), segments)
    operator.check()


def test_tables_stay_where_they_are_until_they_are_full(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlora.atmm.cuda.tables.MIN_SLOTS", 8)
    case = Case(operator, torch.bfloat16, 12)
    layout = case.group.layout
    for slot in (6, 0, 7):
        pairs = case.drawn_pairs(16)
        case.slots[slot : slot + 1] = [pairs]
        case.group.put(slot, pairs)
        case.group.ready()
        assert case.group.layout == layout
    case.append(200)
    assert case.group.layout != layout
    segments = [*in_turn((1, 2, 3)), Segment(6, 2, 0), Segment(8, 2, 7), Segment(10, 2, 8)]
    case.check(case.run(segments), segments)


# ---- invalid arguments ---------------------------------------------------------------------------

SOUND = [Segment(0, 3, 0), Segment(20, 12, 1)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ((10, 5, 6, 1), "slot 6, which has A without B"),
        ((10, 5, MIN_SLOTS, 1), f"unknown slot {MIN_SLOTS}"),
        ((10, 5, -1, 1), "unknown slot -1"),
        ((10, 5, 2**31 - 1, 1), "unknown slot 2147483647"),
        ((30, 11, 1, 1), "starts at row 30, outside"),
        ((2**31 - 1, 5, 1, 1), "starts at row 2147483647, outside"),
        ((-1, 5, 1, 1), "starts at row -1, outside"),
        ((10, -5, 1, 1), "outside"),
        ((10, 25, 1, 1), "has 25 rows"),
        ((10, 5, 1, 2), "the sign 2"),
        ((2, 5, 1, 1), "starts at row 2: it overlaps"),
    ],
)
@by_rows_or_tiles
def test_an_invalid_segment_alone_is_skipped_and_reported_at_the_next_check(
    operator: Operator, by: str, bad: tuple[int, int, int, int], says: str
) -> None:
    case = Case(operator, torch.bfloat16, 40)
    rows = [(s.start, s.length, s.slot, s.sign) for s in SOUND]
    tensor = torch.tensor([rows[0], bad, rows[1]], dtype=torch.int32, device=operator.device)
    choice = choice_of(by, operator.library, torch.bfloat16)
    case.check(case.run(DeviceSegments(tensor, (3,), 3, 20), choice), SOUND)
    with pytest.raises(DeviceFault, match=f"segment 1 .*{says}.* skipped"):
        operator.check()
    operator.check()  # Each fault is reported once.


@pytest.mark.parametrize(
    ("damage", "says", "tiles_only"),
    [
        (lambda a, b, rank: (a, 0, rank), "A without B", False),
        (lambda a, b, rank: (a, b, 136), "rank 136", False),
        (lambda a, b, rank: (a, b, -8), "rank -8", False),
        (lambda a, b, rank: (a, b, 63), "rank 63, not padded", True),
        (lambda a, b, rank: (a + 2, b, 56), "16 bytes", True),
        (lambda a, b, rank: (a, b + 2, 56), "16 bytes", True),
    ],
)
@by_rows_or_tiles
def test_an_invalid_adapter_alone_is_skipped(
    operator: Operator, by: str, damage, says: str, tiles_only: bool
) -> None:
    if by == "rows" and tiles_only:
        pytest.skip("the row kernels take it")
    case = Case(operator, torch.float16, 40)
    table = case.group.tables[1]
    table[1] = torch.tensor(damage(*table[1].tolist()), dtype=torch.int64)
    case.slots[1][1] = None
    choice = choice_of(by, operator.library, torch.float16)
    case.check(case.run(SOUND, choice), SOUND)
    with pytest.raises(DeviceFault, match=f"segment 1 in projection 1 .*{says}"):
        operator.check()


def test_unaligned_rows_and_widths_are_rejected_by_tiles_and_served_by_the_row_kernels(
    operator: Operator,
) -> None:
    case, segments = Case(operator, torch.float16, 30, 131, (67,)), in_turn((1, 20, 9))
    with pytest.raises(CudaError, match="not a multiple of 16 bytes"):
        case.run(segments, by_tiles(operator.library, torch.float16)[0])
    case.check(case.run(segments), segments)


def test_a_wrong_call_is_rejected_before_the_device_is_used(operator: Operator) -> None:
    library = operator.library
    tiles = c.TilesStruct(c.ROWS, c.ROWS, 1, 8, 1, 1)
    for call, says in (
        (None, "an argument is null"),
        (c.CallStruct(rows=1, d_in=8), "max_rank"),
        (c.CallStruct(rows=1, d_in=8, max_rank=8), "projection_count 0"),
        (c.CallStruct(rows=1, d_in=8, max_rank=8, projection_count=1), "waves 0"),
    ):
        with pytest.raises(CudaError, match=says):
            library.apply(call, tiles, 0)


def test_nothing_is_launched_before_the_kernels_are_loaded(tmp_path: Path) -> None:
    warm = emulation()
    copy = tmp_path / warm.path.name  # Another file has its own copy of the library's state.
    shutil.copyfile(warm.path, copy)
    cold = Library(copy)
    merges = (c.MergeStruct * 1)()
    merges[0].d_out = merges[0].d_in = merges[0].rank = 1
    values = torch.ones(1)
    call = c.MergeCallStruct(
        values.data_ptr(), values.data_ptr(), 1, cold.merge_blocks(merges), 1, c.TYPES["fp32"], 1
    )
    with pytest.raises(CudaError, match="call vlora_cuda_warm_up"):
        cold.merge(call, 0)


def test_a_merge_of_half_precision_weights_rounds_once(operator: Operator) -> None:
    base = torch.randn(300 * 140).to(operator.device, torch.float16)
    pair = LoraPair(torch.randn(37, 140), torch.randn(300, 37))
    pair = LoraPair(*(part.to(operator.device) for part in pair))
    out = torch.empty_like(base)
    operator.merge(out, base, [MergeUpdate(0, pair)], -1)
    desired = base.double() - (pair.b.double() @ pair.a.double()).flatten()
    torch.testing.assert_close(out.double(), desired, rtol=2**-11 * 1.01, atol=1e-5)


def test_a_replayed_graph_serves_other_segments(operator: Operator) -> None:
    if operator.library.emulated:
        pytest.skip("graphs need a GPU")
    case = Case(operator, torch.bfloat16, 40)
    capacity = torch.zeros(8, 4, dtype=torch.int32, device=operator.device)
    segments = DeviceSegments(capacity, (8,), 1, 40)
    y = case.before.clone()
    for choice in (KernelChoice(), by_tiles(operator.library, torch.bfloat16, rows_up_to=8)[0]):
        operator.apply(y, case.x, segments, case.group, choice)
        operator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operator.apply(y, case.x, segments, case.group, choice)
        for lengths in ((5, 9, 2), (1,) * 8, (40,), (1, 30, 1)):
            replayed = in_turn(lengths)
            rows = [(s.start, s.length, s.slot, s.sign) for s in replayed]
            capacity.zero_()
            capacity[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device=y.device)
            y.copy_(case.before)
            graph.replay()
            operator.check()
            case.check(y, replayed)
