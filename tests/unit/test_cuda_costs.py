"""Tests of the CUDA kernels' costs, counted while the emulation runs them on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.support.count_launches import EmulatedCounts as Counts
from vlora.atmm.cuda.choice import KernelChoice
from vlora.atmm.cuda.operator import Operator
from vlora.atmm.cuda.segments import DeviceSegments
from vlora.atmm.cuda.tables import DeviceGroup
from vlora.atmm.types import LoraPair, Segment

THREADS = 256
"""Threads of a block of the row kernels; a block of the expand computes as many columns."""
LANES = 32


def call(
    emulated: Operator,
    d_outs: Sequence[int],
    segments: Sequence[Segment] | DeviceSegments,
    choice: KernelChoice,
    rank: int = 64,
) -> Callable[[], Counts]:
    """Prepare a call in bf16 on 40 rows; calling the result runs it and returns its counts."""
    group = DeviceGroup(64, d_outs, torch.bfloat16, emulated.device)
    group.append([LoraPair(values(rank, 64), values(d_out, rank)) for d_out in d_outs])
    group.ready()
    if not isinstance(segments, DeviceSegments):
        segments = emulated.segments(segments)

    def run() -> Counts:
        before = Counts.of(emulated.library)
        emulated.apply(values(40, sum(d_outs)), values(40, 64), segments, group, choice)
        after = Counts.of(emulated.library)
        return Counts(*(getattr(after, n) - getattr(before, n) for n, _ in Counts._fields_))

    return run


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


RANK, VECTOR = 64, 8
ACCESSES = RANK + THREADS * VECTOR
"""Accesses to shared memory of a block of the expand, if each lane reads its part once."""


def test_the_expand_computes_no_blocks_beyond_a_projections_columns(emulated: Operator) -> None:
    """Keys and values of grouped attention have fewer columns than queries. A lane reads its part
    of the intermediate once.
    """
    accesses = [
        call(emulated, columns, [Segment(0, 1, 0)], KernelChoice(), RANK)().shared_accesses
        for columns in ((256,), (256, 256, 256), (8 * 256, 256, 256))
    ]
    assert accesses == [ACCESSES, 3 * ACCESSES, 10 * ACCESSES]


OWN = tuple(Segment(row, 1, 0) for row in range(40))
LIVE = Segment(0, 40, 0, -1)


@pytest.mark.parametrize(
    ("segments", "launches"),
    [
        (OWN, 1),
        ((*OWN, LIVE), 1),
        # Three waves: one shrink, and an expand for each wave.
        ((LIVE, LIVE, LIVE), 4),
    ],
    ids=["own adapters", "mixture", "three segments of a row"],
)
def test_the_row_kernels_need_one_launch(
    emulated: Operator, segments: Sequence[Segment], launches: int
) -> None:
    assert call(emulated, (72, 40, 40), segments, KernelChoice())().launches == launches


def test_a_tile_is_found_in_two_reads_among_a_thousand_problems(emulated: Operator) -> None:
    library = emulated.library
    choice = KernelChoice(
        next(iter(library.tiles_of("shrink", "bf16"))),
        next(iter(library.tiles_of("expand", "bf16"))),
        slices=1,
        rows_up_to=0,
    )
    real = emulated.segments([Segment(0, 10, 0), Segment(10, 30, 0)])
    rounds = []
    for capacity in (32, 1024):
        empty = torch.zeros(capacity - 2, 4, dtype=torch.int32)
        padded = DeviceSegments(torch.cat((real.tensor, empty)), (capacity,), 1, 40)
        rounds.append(call(emulated, (72,), padded, choice)().warp_counts)
    few, many = rounds
    assert few > 0
    assert many == 2 * few
