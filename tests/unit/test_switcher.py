"""The active weights are the base's, bit for bit, or the base with one adapter in it."""

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

from vlora.atmm import op
from vlora.atmm.types import LoraPair
from vlora.ids import BASE, MatrixId
from vlora.kernels import ops
from vlora.lora.adapter import Adapter, AdapterInfo
from vlora.lora.slab import GROUPS, TARGETS, WeightSlab
from vlora.lora.switcher import Switcher

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
"""Of eight adapters."""


@pytest.fixture(autouse=True)
def one_thread(_threads_put_back: None) -> None:
    """These matrices are not worth a second one."""
    torch.set_num_threads(1)


@dataclass
class Known:
    """The adapters of a server, as far as a switcher asks."""

    adapters: list[Adapter]

    @property
    def matrices(self) -> Collection[MatrixId]:
        return {matrix for adapter in self.adapters for matrix in adapter.pairs}

    def adapter(self, slot: int) -> Adapter:
        return self.adapters[slot]


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


def eight() -> Known:
    torch.manual_seed(0)
    return Known([adapter(number, targets) for number, targets in enumerate(TARGETED)])


def new_slab(dtype: torch.dtype = torch.float32) -> WeightSlab:
    slab = WeightSlab(LAYERS, SHAPES, dtype)
    slab.base.copy_(torch.randn(slab.elements))
    return slab


def state(switcher: Switcher) -> list[torch.Tensor]:
    return [view.clone() for view in switcher.active.views]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def summed(slab: WeightSlab, of: Adapter, layer: int, group: tuple[str, ...]) -> torch.Tensor:
    """float64 base + B A of a fused group."""
    parts = []
    for target in group:
        part = slab.region(layer, target).view(slab.base).double()
        if (pair := of.pairs.get((layer, target))) is not None:
            part = part + pair.b.double() @ pair.a.double()
        parts.append(part)
    return torch.cat(parts)


def matrices() -> list[tuple[int, tuple[str, ...]]]:
    return [(layer, group) for layer in range(LAYERS) for group in GROUPS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_the_sum_in_fp32_rounded_once(dtype: torch.dtype) -> None:
    slab, known = new_slab(dtype), eight()
    switcher = Switcher(slab, known)
    for slot in range(len(known.adapters)):
        switcher.switch(slot)
        for view, (layer, group) in zip(switcher.active.views, matrices(), strict=True):
            want = summed(slab, known.adapters[slot], layer, group)
            if dtype == torch.bfloat16:
                steps = view.view(torch.int16).int() - want.to(dtype).view(torch.int16).int()
                # Where the sum is all but nothing, fp32's own rounding is larger than a unit of it.
                assert bool(((steps.abs() <= 1) | (want.abs() < 1e-4)).all())
            else:
                torch.testing.assert_close(view.double(), want, rtol=1e-6, atol=1e-6)


def test_a_layer_that_the_live_adapter_does_not_touch_is_the_bases_own_view() -> None:
    slab, known = new_slab(), eight()
    switcher = Switcher(slab, known)
    base = switcher.active.views
    for slot, targets in enumerate(TARGETED):
        switcher.switch(slot)
        for (_, group), view, own in zip(matrices(), switcher.active.views, base, strict=True):
            assert (view is own) == (not set(group) & set(targets))


def test_an_adapter_leaves_nothing_behind_for_the_next() -> None:
    """There are no stale views: whatever was merged before, the same weights are active."""
    slab, known = new_slab(), eight()
    fresh = []
    for slot in range(len(known.adapters)):
        switcher = Switcher(slab, known)
        switcher.switch(slot)
        fresh.append(state(switcher))
    switcher = Switcher(slab, known)
    for first in range(len(fresh)):
        for then in range(len(fresh)):
            switcher.switch(first)
            switcher.switch(then)
            assert switcher.live == then
            assert same(switcher.active.views, fresh[then]), (first, then)


def test_after_ten_thousand_switches_base_and_outputs_are_the_same_bit_for_bit() -> None:
    slab, known = new_slab(), eight()
    digest = slab.digest()
    switcher = Switcher(slab, known)
    rows = [torch.randn(3, view.shape[1]) for view in switcher.active.views]

    def outputs() -> list[torch.Tensor]:
        return [ops.linear(x, w) for x, w in zip(rows, switcher.active.views, strict=True)]

    slots = [BASE, *range(len(known.adapters))]
    first = {}
    for slot in slots:
        switcher.switch(slot)
        first[slot] = outputs()
    drawn = torch.randint(len(slots), (10_000,)).tolist()
    for index, number in enumerate(drawn):
        switcher.switch(slots[number])
        if index % 100 == 0 or index > 9_900:
            assert same(outputs(), first[slots[number]]), index
    assert slab.digest() == digest


def test_going_back_to_the_base_and_to_what_is_still_merged_is_an_assignment() -> None:
    switcher = Switcher(new_slab(), eight())
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
    slab, known = new_slab(), eight()
    switcher = Switcher(slab, known)
    switcher.switch(1)
    whole = state(switcher)

    def half(out: torch.Tensor, base: torch.Tensor, merges: object) -> None:
        out[: len(out) // 2] = 7.0
        raise MemoryError

    with patch.object(op, "merge", half), pytest.raises(MemoryError):
        switcher.switch(3)
    assert (switcher.live, switcher.merged) == (BASE, BASE)
    assert same(switcher.active.views, [r.view(slab.base) for r in slab.regions])
    switcher.switch(1)
    assert same(switcher.active.views, whole), "merged anew"


def test_a_slot_with_another_adapter_is_merged_anew() -> None:
    slab, known = new_slab(), eight()
    switcher = Switcher(slab, known)
    switcher.switch(4)
    switcher.switch(BASE)
    known.adapters[4] = adapter(9, ("v_proj", "down_proj"))
    switcher.switch(4)
    again = Switcher(slab, known)
    again.switch(4)
    assert same(switcher.active.views, again.active.views)


def test_an_adapter_that_is_evicted_is_not_kept_by_its_work_list() -> None:
    known = eight()
    switcher = Switcher(new_slab(), known)
    factor = weakref.ref(known.adapters[1].pairs[0, "q_proj"].a)
    switcher.switch(1)
    switcher.switch(BASE)
    known.adapters[1] = known.adapters[0]
    assert factor() is None
    assert switcher.merged == BASE


def test_merging_is_refused_with_figures_where_it_does_not_fit() -> None:
    slab, known = new_slab(), eight()
    switcher = Switcher(slab, known, memory=1000)
    assert not switcher.can_merge(0)
    assert switcher.refusal(0) == (
        "merged weights need 0.1 MiB in addition to the base model's 0.1; 0.0 MiB are left for them"
    )
    with pytest.raises(ValueError, match=r"slot 0 cannot be merged: merged weights need 0\.1 MiB"):
        switcher.switch(0)
    assert switcher.can_merge(BASE)
    switcher.switch(BASE)
    off = Switcher(slab, known, "off")
    assert (off.refusal(3), off.merged_bytes) == ("merging is off", 0)
    assert Switcher(slab, known, memory=slab.base.nbytes).can_merge(0)


def test_the_merged_slab_takes_no_more_memory_than_it_says() -> None:
    """Of matrices that nobody targets there is only the address."""
    wide = dict.fromkeys(TARGETS, (1024, 1024))
    slab = WeightSlab(4, wide)
    pairs = {(2, "o_proj"): LoraPair(torch.randn(2, 1024), torch.randn(1024, 2))}
    known = Known([replace(adapter(0, ()), pairs=pairs)])
    switcher = Switcher(slab, known)
    matrix = 4 << 20
    assert matrix <= switcher.merged_bytes <= 2 * matrix
    switcher.switch(0)
    assert switcher._merged is not None
    assert matrix <= resident(switcher._merged) <= switcher.merged_bytes


def resident(tensor: torch.Tensor) -> int:
    """Bytes in memory, as the kernel has it."""
    page = mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (-(-tensor.nbytes // page)))()
    libc = ctypes.CDLL(None, use_errno=True)
    asked = (ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages)
    assert libc.mincore(*asked) == 0, os.strerror(ctypes.get_errno())
    return sum(flags & 1 for flags in pages) * page


def test_a_write_to_the_base_weights_is_a_fault_of_memory() -> None:
    slab = new_slab()
    slab.base[5] = 1.0
    Switcher(slab, eight())
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
def test_in_place_the_base_weights_come_back_but_for_their_rounding(dtype: torch.dtype) -> None:
    slab, known = new_slab(dtype), eight()
    before = slab.base.clone()
    switcher = Switcher(slab, known, "in_place")
    assert switcher.merged_bytes == 0
    for slot in (0, 1, 1, 5, BASE, 7, 2):
        switcher.switch(slot)
        assert switcher.live == slot
        if slot != BASE:
            for view, (layer, group) in zip(switcher.active.views, matrices(), strict=True):
                parts = [slab.region(layer, target).view(before).double() for target in group]
                pairs = [known.adapters[slot].pairs.get((layer, target)) for target in group]
                want = torch.cat(
                    [
                        part if pair is None else part + pair.b.double() @ pair.a.double()
                        for part, pair in zip(parts, pairs, strict=True)
                    ]
                )
                atol = 1e-5 if dtype == torch.float32 else 0.1
                torch.testing.assert_close(view.double(), want, rtol=0.0, atol=atol)
    switcher.switch(BASE)
    drift = (slab.base.double() - before.double()).abs().max()
    assert 0 < drift < (1e-5 if dtype == torch.float32 else 0.1)


def test_in_place_a_merge_that_fails_leaves_no_weights_to_read() -> None:
    switcher = Switcher(new_slab(), eight(), "in_place")
    with patch.object(op, "merge", side_effect=MemoryError), pytest.raises(MemoryError):
        switcher.switch(1)
    assert switcher.active.views == ()
