"""Test of ATMM's CUDA kernels on small data of odd sizes, short enough for a sanitizer.

Kernels must compute correctly under a sanitizer, too. The results of merges and of vision task
heads are not compared.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.atmm_problems import expected
from vlora.atmm.cuda.choice import KernelChoice
from vlora.atmm.cuda.operator import DTYPES, MergedParts, Operator
from vlora.atmm.cuda.tables import DeviceGroup
from vlora.atmm.types import HeadMatrix, LoraPair, MergeUpdate, Segment

TILES = 3
"""Maximum number of pairs (shrink tile, expand tile) to call for each dtype."""
SEGMENTS = [
    Segment(0, 1, 0),
    Segment(1, 37, 1, -1),
    Segment(38, 3, 2),
    Segment(1, 20, 0),
    Segment(41, 70, 1),
]
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-4}
"""Maximum error of y, relative to its largest element."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("d_in", "d_out"), [(136, 72), (131, 67)])
def test_every_kernel_computes_the_lora_product(
    operator: Operator, dtype: torch.dtype, d_in: int, d_out: int
) -> None:
    group = DeviceGroup(d_in, [d_out], dtype, operator.device)
    pairs = [
        LoraPair(_drawn(operator, dtype, r, d_in), _drawn(operator, dtype, d_out, r))
        for r in (8, 33, 64)
    ]
    for pair in pairs:
        group.append([pair])
    group.ready()
    x = _drawn(operator, dtype, 111, d_in) * d_in**0.5
    before = _drawn(operator, dtype, 111, d_out)
    want = expected(before, x, SEGMENTS, SimpleNamespace(d_outs=[d_out], pairs=[pairs]))
    for choice in _choices(operator, dtype, TILES if d_in % 8 == 0 else 0):
        y = before.clone()
        operator.apply(y, x, operator.segments(SEGMENTS), group, choice)
        error = (y.double() - want).abs().max() / want.abs().max()
        assert error < TOLERANCE[dtype], choice
    operator.check()


def test_merges_and_heads_are_called(operator: Operator) -> None:
    for dtype in TOLERANCE:
        base = torch.randn(130 * 67, device=operator.device).to(dtype)
        a, b = (torch.randn(*shape, device=operator.device) for shape in ((9, 67), (130, 9)))
        MergedParts(operator, [MergeUpdate(0, LoraPair(a, b))])(torch.empty_like(base), base)
    heads = DeviceGroup(100, [1], torch.float32, operator.device)
    heads.put_head(0, HeadMatrix(torch.randn(7, 100), torch.randn(7)))
    heads.ready()
    x = torch.randn(5, 100, device=operator.device)
    scores = torch.zeros(5, 7, device=operator.device)
    operator.apply(scores, x, operator.segments([Segment(0, 5, 0)]), heads, heads=True)
    operator.check()


def _choices(operator: Operator, dtype: torch.dtype, tiles: int) -> list[KernelChoice]:
    found = [KernelChoice(row_block=block, row_slices=s) for block in (1, 4) for s in (1, 3)]
    if dtype == torch.float32:
        return found
    shrinks = list(operator.library.tiles_of("shrink", DTYPES[dtype]))
    expands = list(operator.library.tiles_of("expand", DTYPES[dtype]))
    return found + [
        KernelChoice(
            shrinks[i % len(shrinks)], expands[i % len(expands)], 1 + i % 2, rows_up_to=i % 4
        )
        for i in range(min(tiles, max(len(shrinks), len(expands))))
    ]


def _drawn(operator: Operator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device=operator.device) / shape[-1] ** 0.5).to(dtype)
