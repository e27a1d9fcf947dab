"""Tests that the active weights are exactly the base's, or the base with one adapter merged."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch

from vlora.adapters.files import Adapter, AdapterInfo
from vlora.atmm import op
from vlora.atmm.types import LoraPair
from vlora.ids import BASE, MatrixId
from vlora.kernels import ops
from vlora.model.switcher import Switcher
from vlora.weights.slab import GROUPS, TARGETS, WeightSlab

HIDDEN, INNER, LAYERS = 48, 80, 2
SHAPES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (16, HIDDEN),
    "v_proj": (16, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}
TARGETED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "v_proj"),
    TARGETS,
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("o_proj",),
    ("up_proj",),
    ("k_proj", "down_proj"),
    ("lm_head",),
)
"""Targets of eight adapters."""


@pytest.fixture(autouse=True)
def one_thread(_restore_threads: None) -> None:
    """Use one thread: a second one would not pay off for these matrices."""
    torch.set_num_threads(1)


@dataclass
class AdapterList:
    """Adapters of a server, as the switcher needs them."""

    all: list[Adapter]

    @property
    def matrices(self) -> Collection[MatrixId]:
        return {matrix for adapter in self.all for matrix in adapter.pairs}

    def adapter(self, slot: int) -> Adapter:
        return self.all[slot]


def adapter(number: int, targets: Sequence[str], layers: Sequence[int] = range(LAYERS)) -> Adapter:
    rank = (4, 8, 16, 1)[number % 4]
    matrices = [(layer, target) for layer in layers for target in targets]
    if targets == ("lm_head",):
        matrices = [(-1, "lm_head")]
    pairs = {}
    for matrix in matrices:
        d_out, d_in = SHAPES.get(matrix[1], (100, HIDDEN))
        pairs[matrix] = LoraPair(torch.randn(rank, d_in), torch.randn(d_out, rank) * 0.1)
    name = f"a{number}"
    return Adapter(AdapterInfo(name, name, (rank,), tuple(targets), (), {}, (), ()), pairs, None)


def eight_adapters() -> AdapterList:
    torch.manual_seed(0)
    return AdapterList([adapter(number, targets) for number, targets in enumerate(TARGETED)])


def new_slab(dtype: torch.dtype = torch.float32) -> WeightSlab:
    slab = WeightSlab(LAYERS, SHAPES, dtype)
    slab.base.copy_(torch.randn(slab.elements))
    return slab


def state(switcher: Switcher) -> list[torch.Tensor]:
    return [view.clone() for view in switcher.active.views]


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


FUSED_GROUPS = [(layer, group) for layer in range(LAYERS) for group in GROUPS]


def merged_sums(slab: WeightSlab, base: torch.Tensor, adapter: Adapter) -> list[torch.Tensor]:
    """Return base + B A of each fused group in float64."""
    sums = []
    for layer, group in FUSED_GROUPS:
        parts = []
        for target in group:
            part = slab.region(layer, target).view(base).double()
            if (pair := adapter.pairs.get((layer, target))) is not None:
                part = part + pair.b.double() @ pair.a.double()
            parts.append(part)
        sums.append(torch.cat(parts))
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_the_sum_in_fp32_rounded_once(dtype: torch.dtype) -> None:
    slab, adapters = new_slab(dtype), eight_adapters()
    switcher = Switcher(slab, adapters)
    for slot in range(len(adapters.all)):
        switcher.switch(slot)
        sums = merged_sums(slab, slab.base, adapters.all[slot])
        for view, expected in zip(switcher.active.views, sums, strict=True):
            if dtype == torch.bfloat16:
                steps = view.view(torch.int16).int() - expected.to(dtype).view(torch.int16).int()
                # Where the sum is nearly zero, fp32's own rounding is larger than a unit of it.
                assert bool(((steps.abs() <= 1) | (expected.abs() < 1e-4)).all())
            else:
                torch.testing.assert_close(view.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_layer_that_the_live_adapter_does_not_target_is_a_view_of_the_base() -> None:
    slab, adapters = new_slab(), eight_adapters()
    switcher = Switcher(slab, adapters)
    base = switcher.active.views
    for slot, targets in enumerate(TARGETED):
        switcher.switch(slot)
        for (_, group), view, own in zip(FUSED_GROUPS, switcher.active.views, base, strict=True):
            assert (view is own) == (not set(group) & set(targets))


def test_after_ten_thousand_switches_base_and_outputs_are_bit_identical() -> None:
    slab, adapters = new_slab(), eight_adapters()
    digest = slab.digest()
    switcher = Switcher(slab, adapters)
    rows = [torch.randn(3, view.shape[1]) for view in switcher.active.views]

    def outputs() -> list[torch.Tensor]:
        return [ops.linear(x, w) for x, w in zip(rows, switcher.active.views, strict=True)]

    slots = [BASE, *range(len(adapters.all))]
    first = {}
    for slot in slots:
        switcher.switch(slot)
        first[slot] = outputs()
    drawn = torch.randint(len(slots), (10_000,)).tolist()
    for index, number in enumerate(drawn):
        switcher.switch(slots[number])
        if index % 100 == 0 or index > 9_900:
            assert equal(outputs(), first[slots[number]]), index
    assert slab.digest() == digest


def test_switching_to_the_base_or_a_still_merged_adapter_computes_nothing() -> None:
    switcher = Switcher(new_slab(), eight_adapters())
    base = switcher.active
    switcher.switch(1)
    merged = switcher.active
    with patch.object(op, "merge", side_effect=AssertionError("arithmetic")):
        switcher.switch(BASE)
        assert switcher.active is base
        assert (switcher.live, switcher.merged) == (BASE, 1)
        switcher.switch(1)
        assert switcher.active is merged
        switcher.switch(1)
        with pytest.raises(AssertionError, match="arithmetic"):
            switcher.switch(2)


def test_a_merge_that_fails_half_way_leaves_the_base_active() -> None:
    slab, adapters = new_slab(), eight_adapters()
    switcher = Switcher(slab, adapters)
    switcher.switch(1)
    merged = state(switcher)

    def fail_half_way(out: torch.Tensor, base: torch.Tensor, merges: object) -> None:
        out[: len(out) // 2] = 7.0
        raise MemoryError

    with patch.object(op, "merge", fail_half_way), pytest.raises(MemoryError):
        switcher.switch(3)
    assert (switcher.live, switcher.merged) == (BASE, BASE)
    assert equal(switcher.active.views, [r.view(slab.base) for r in slab.regions])
    switcher.switch(1)
    assert equal(switcher.active.views, merged), "merged again"


def test_a_slot_with_another_adapter_is_merged_again_and_keeps_no_evicted_one_alive() -> None:
    slab, adapters = new_slab(), eight_adapters()
    switcher = Switcher(slab, adapters)
    switcher.switch(4)
    switcher.switch(BASE)
    evicted = weakref.ref(adapters.all[4].pairs[0, "o_proj"].a)
    adapters.all[4] = adapter(9, ("v_proj", "down_proj"))
    assert evicted() is None
    assert switcher.merged == BASE
    switcher.switch(4)
    other = Switcher(slab, adapters)
    other.switch(4)
    assert equal(switcher.active.views, other.active.views)


def test_merging_is_rejected_with_figures_if_it_does_not_fit() -> None:
    slab, adapters = new_slab(), eight_adapters()
    switcher = Switcher(slab, adapters, memory=1000)
    assert not switcher.can_merge(0)
    assert switcher.refusal(0) == (
        "merged weights need 0.1 MiB in addition to the base model's 0.1 MiB;"
        " 0.0 MiB are left for them"
    )
    with pytest.raises(ValueError, match=r"slot 0 cannot be merged: merged weights need 0\.1 MiB"):
        switcher.switch(0)
    assert switcher.can_merge(BASE)
    switcher.switch(BASE)
    off = Switcher(slab, adapters, "off")
    assert (off.refusal(3), off.merged_bytes) == ("merging is off", 0)
    assert Switcher(slab, adapters, memory=slab.base.nbytes).can_merge(0)


def test_the_merged_slab_takes_no_more_memory_than_merged_bytes() -> None:
    """Matrices that no adapter targets take address space only."""
    shapes = dict.fromkeys(TARGETS, (1024, 1024))
    slab = WeightSlab(4, shapes)
    pairs = {(2, "o_proj"): LoraPair(torch.randn(2, 1024), torch.randn(1024, 2))}
    adapters = AdapterList([replace(adapter(0, ()), pairs=pairs)])
    switcher = Switcher(slab, adapters)
    matrix = 4 << 20
    assert matrix <= switcher.merged_bytes <= 2 * matrix
    switcher.switch(0)
    assert switcher._merged is not None
    assert matrix <= resident(switcher._merged) <= switcher.merged_bytes


def resident(tensor: torch.Tensor) -> int:
    """Return the number of bytes in memory, as the kernel reports it."""
    page = mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (-(-tensor.nbytes // page)))()
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages)
    assert libc.mincore(*arguments) == 0, os.strerror(ctypes.get_errno())
    return sum(flags & 1 for flags in pages) * page


def test_a_write_to_the_base_weights_is_a_segmentation_fault() -> None:
    slab = new_slab()
    slab.base[5] = 1.0
    Switcher(slab, eight_adapters())
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        slab.base[5] = 2.0
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert slab.base[5] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_the_base_weights_are_restored_within_rounding(dtype: torch.dtype) -> None:
    slab, adapters = new_slab(dtype), eight_adapters()
    before = slab.base.clone()
    switcher = Switcher(slab, adapters, "in_place")
    assert switcher.merged_bytes == 0
    for slot in (0, 1, 1, 5, BASE, 7, 2):
        switcher.switch(slot)
        assert switcher.live == slot
        if slot != BASE:
            sums = merged_sums(slab, before, adapters.all[slot])
            for view, expected in zip(switcher.active.views, sums, strict=True):
                atol = 1e-5 if dtype == torch.float32 else 0.1
                torch.testing.assert_close(view.double(), expected, rtol=0.0, atol=atol)
    switcher.switch(BASE)
    drift = (slab.base.double() - before.double()).abs().max()
    assert 0 < drift < (1e-5 if dtype == torch.float32 else 0.1)


def test_in_place_a_merge_that_fails_leaves_no_weights_to_read() -> None:
    switcher = Switcher(new_slab(), eight_adapters(), "in_place")
    with patch.object(op, "merge", side_effect=MemoryError), pytest.raises(MemoryError):
        switcher.switch(1)
    assert switcher.active.views == ()
