"""Tests of task heads, and of the merge of all layers, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.atmm_problems import BF16, FP32, compiled
from tests.support.drawing import drawn
from vlora.atmm import op, tiles
from vlora.atmm.groups import HeadGroup
from vlora.atmm.types import CopiedPart, HeadMatrix, LoraPair, Merges, MergeUpdate, Segment
from vlora.backends import Backend


def test_heads_of_many_classes_equal_float64(backend: Backend) -> None:
    group = HeadGroup(200)
    for classes in (1, 5, 300, 16):
        group.append(HeadMatrix(torch.randn(classes, 200) / 14, torch.randn(classes)))
    group.append(None)
    x = torch.randn(40, 200)
    segments = [Segment(0, 1, 0), Segment(1, 9, 1), Segment(12, 20, 2), Segment(39, 1, 3)]
    actual = op.heads(x, segments, group, backend=backend)
    assert actual.shape == (40, 300)
    desired = torch.zeros(40, 300, dtype=torch.float64)
    for segment in segments:
        head = group.heads[segment.slot]
        assert head is not None
        rows = slice(segment.start, segment.start + segment.length)
        desired[rows, : len(head.bias)] = x[rows].double() @ head.weight.double().T + head.bias
    torch.testing.assert_close(actual.double(), desired, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no head"):
        op.heads(x, [Segment(0, 1, 4)], group, backend=backend)


@drawn(dtype=[FP32, BF16], in_place=[False, True], sign=[1, -1])
def test_merged_slabs_equal_float64_within_one_rounding(
    backend: Backend, dtype: torch.dtype, in_place: bool, sign: int
) -> None:
    shapes = [(5, 7, 3), (130, 128, 16), (64, 192, 300), (1, 1, 1), (97, 1056, 33)]
    copied = [CopiedPart(131401, 0), CopiedPart(131401, 5003), CopiedPart(136500, 64)]
    base = torch.randn(136600).to(dtype)
    updates, offset = [], 3
    desired = base.double().clone()
    for d_out, d_in, rank in shapes:
        pair = LoraPair(torch.randn(rank, d_in) / rank**0.5, torch.randn(d_out, rank))
        updates.append(MergeUpdate(offset, pair))
        delta = pair.b.double() @ pair.a.double()
        desired[offset : offset + d_out * d_in] += sign * delta.flatten()
        offset += d_out * d_in
    assert offset <= copied[0].offset
    out = base.clone() if in_place else torch.full_like(base, 7.0)
    merges = Merges(updates, copied)
    op.merge(out, out if in_place else base, merges, sign, threads=2, backend=backend)
    inside = slice(3, offset)
    # In bf16: round(fp32(base) + B A), within one unit in the last place.
    relative = 1e-5 if dtype == FP32 else 2**-8
    torch.testing.assert_close(out[inside].double(), desired[inside], rtol=relative, atol=1e-5)
    left = torch.ones(len(out), dtype=torch.bool)
    left[inside] = False
    for part in copied:
        elements = slice(part.offset, part.offset + part.size)
        assert torch.equal(out[elements], base[elements])
        left[elements] = False
    assert torch.equal(out[left], base[left] if in_place else base[left] * 0 + 7)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_values_that_are_not_finite_stay_where_they_are(
    backend: Backend, dtype: torch.dtype
) -> None:
    d_out, d_in = 13, 608
    integers = torch.int32 if dtype == FP32 else torch.int16
    odd = torch.randperm(d_out * d_in)[:300]
    base = torch.randn(d_out * d_in).to(dtype)
    # NaN of any sign and payload, quiet or signalling: all bits of the exponent and some others.
    low = 1 << (23 if dtype == FP32 else 7)
    top = 255 * low - (torch.rand(200) < 0.5) * 256 * low
    base.view(integers)[odd[:200]] = (top + torch.randint(1, low, (200,))).to(integers)
    base[odd[200:250]], base[odd[250:]] = torch.inf, -torch.inf
    pair = LoraPair(torch.randn(5, d_in), torch.randn(d_out, 5))
    out = torch.zeros_like(base)
    op.merge(out, base, [MergeUpdate(0, pair)], backend=backend)
    assert torch.equal(torch.isnan(out), torch.isnan(base))
    infinite = torch.isinf(base)
    assert torch.equal(torch.isinf(out), infinite)
    assert torch.equal(out[infinite], base[infinite])


@pytest.mark.parametrize("rank", [16, 17, 70])
def test_a_merge_loses_no_bits_of_its_factors(backend: Backend, rank: int) -> None:
    # Where factors are split into three bf16 numbers each, two of them would lose bits.
    d_out, d_in = 70, 200
    spread = 2.0 ** torch.randint(-20, 20, (rank, 1))
    signs = torch.randint(0, 2, (rank, d_in)) * 2 - 1
    pair = LoraPair(
        signs * (1 + torch.rand(rank, d_in)) * spread, (1 + torch.rand(d_out, rank)) / spread.T
    )
    out = torch.empty(d_out * d_in)
    op.merge(out, torch.zeros_like(out), [MergeUpdate(0, pair)], backend=backend)
    a, b = pair.a.double(), pair.b.double()
    assert ((out.double() - (b @ a).flatten()).abs() < 2**-21 * (b @ a.abs()).flatten()).all()


@compiled
@pytest.mark.parametrize("size", [64, 4096])
def test_every_merge_configuration_equals_the_reference(size: int) -> None:
    base = torch.randn(96 * size)
    update = MergeUpdate(0, LoraPair(torch.randn(20, size), torch.randn(96, 20)))
    desired, actual = torch.empty_like(base), torch.empty_like(base)
    op.merge(desired, base, [update], backend="reference")
    for index, _ in enumerate(tiles.configs("merge", "fp32")):
        actual.zero_()
        op.merge(actual, base, [update], backend="cpu", config=index)
        torch.testing.assert_close(actual, desired, rtol=1e-4, atol=1e-4)


def test_wrong_merges_are_rejected(backend: Backend) -> None:
    slab = torch.zeros(100)
    pair = LoraPair(torch.zeros(2, 10), torch.zeros(10, 2))
    half = LoraPair(pair.a.bfloat16(), pair.b)
    for base, updates, reason in (
        (slab, [MergeUpdate(1, pair)], "do not fit"),
        (slab[1:], [], "of the same length"),
        (slab, [MergeUpdate(0, half)], "A and B in fp32"),
    ):
        with pytest.raises(ValueError, match=reason):
            op.merge(slab, base, updates, backend=backend)
