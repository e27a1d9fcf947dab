"""Tests of the choice of a shape's tile: pinned, from a table, or built in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.atmm_problems import (
    FORMS,
    Form,
    compiled,
    counters,
    each_form,
    group_of,
    pinned,
    reset_counters,
)
from vlora import native
from vlora.atmm import op, tiles
from vlora.atmm.cpu import Cpu
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segment

pytestmark = compiled


def check_rows_in_batches(group: LoraGroup, form: Form) -> None:
    """Check that the outputs of rows are the same alone and in a batch, bit by bit."""
    x, y = form.randn(90, 700), form.randn(90, 194)

    def run(segments: Sequence[Segment], rows: slice, threads: int) -> torch.Tensor:
        part = y[rows].clone()
        op.apply(part, x[rows], segments, group, backend="cpu", threads=threads)
        return part

    together = run([Segment(0, 40, 0), Segment(40, 20, 1), Segment(60, 30, 2)], slice(0, 90), 2)
    for row, slot in ((0, 0), (17, 0), (39, 0), (40, 1), (59, 1), (60, 2), (89, 2)):
        alone = run([Segment(0, 1, slot)], slice(row, row + 1), 1)
        assert torch.equal(alone[0], together[row]), row
    some = run([Segment(0, 13, 0)], slice(20, 33), 1)
    assert torch.equal(some, together[20:33])


@each_form
def test_with_pinned_tiles_a_rows_output_is_the_same_in_any_batch(form: Form) -> None:
    group = group_of(700, [130, 64], [8, 24, 64], form.dtype)
    for isa in tiles.isas():
        for tile in (None, tiles.configs("apply", "fp32")[0]["name"]):
            with tiles.isa(isa), pinned(tile):
                check_rows_in_batches(group, form)


@each_form
def test_in_a_group_of_fixed_order_a_rows_output_is_the_same_in_any_batch(form: Form) -> None:
    group = group_of(700, [130, 64], [8, 24, 64], form.dtype)
    group.fix_order()
    for isa in tiles.isas():
        with tiles.isa(isa):
            check_rows_in_batches(group, form)


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
        reset_counters()
        group = group_of(64, [32], [16, 200])
        for rows, slot in ((1, 0), (50, 0), (2, 0), (1, 1)):
            y = torch.zeros(rows, 32)
            op.apply(
                y, torch.randn(rows, 64), [Segment(0, rows, slot)], group, backend="cpu", threads=1
            )
        assert counters() == {"hits": 2, "misses": 2, "defaults": 0}
        with pytest.raises(ValueError, match="no configuration is named 'none such'"):
            tiles.use({1: "none such"})
    finally:
        tiles.use({})
    reset_counters()
    op.apply(y, torch.randn(1, 64), [Segment(0, 1, 0)], group, backend="cpu")
    assert counters() == {"hits": 0, "misses": 0, "defaults": 1}


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


def test_a_table_for_one_thread_serves_two_and_counts_misses() -> None:
    names = [config["name"] for config in tiles.configs("apply", "fp32")]
    shape = {"rows": 64, "d_in": 512, "d_out": 512, "rank": 64, "segments": 1}
    assert tiles.key("apply", "fp32", **shape) == tiles.key("apply", "fp32", **shape, threads=1)
    group, segments = group_of(512, [512], [64]), [Segment(0, 64, 0)]
    x, y = torch.randn(64, 512), torch.zeros(64, 512)
    try:
        for keys, counts in (((1,), (0, 1)), ((1, 2), (1, 0))):
            tiles.use({tiles.key("apply", "fp32", **shape, threads=n): names[-1] for n in keys})
            reset_counters()
            op.apply(y, x, segments, group, backend="cpu", threads=2)
            assert tuple(counters()[name] for name in ("hits", "misses")) == counts
    finally:
        tiles.use({})


@pytest.mark.parametrize(
    ("l1", "l2", "memory", "widening", "few", "many", "merge"),
    [
        (32, 512, 16e9, False, "p24", "r96-s64-e64-d512-p0", "c2048-p4"),  # Zen 3
        (32, 512, 16e9, True, "p24", "r192-s64-e64-d512-p0", "c2048-p4"),
        (48, 1024, 40e9, False, "p64", "r96-s64-e64-d1024-p0", "c4096-p4"),  # Zen 5
        (48, 2048, 13e9, False, "p24", "r96-s64-e64-d1024-p0", "c2048-p0"),  # Sapphire Rapids
    ],
)
def test_built_in_tiles_depend_on_cache_sizes_and_memory_bandwidth(
    l1: int, l2: int, memory: float, widening: bool, few: str, many: str, merge: str
) -> None:
    def choice(operation: tiles.Operation, rows: int) -> str:
        machine = l1 << 10, l2 << 10, memory, widening, tiled
        return str(native.kernels().atmm.built_in_on(operation, "bf16", rows, 64, *machine))

    tiled = False
    assert choice("apply", 4) == f"r8-s64-e64-d0-{few}"
    assert choice("apply", 64) == many
    assert choice("merge", 1024) == f"merge-n64-{merge}"
    names = {config["name"] for op in ("apply", "merge") for config in tiles.configs(op, "bf16")}
    assert {choice("apply", 4), choice("apply", 64), choice("merge", 1024)} <= names
    tiled = True
    assert choice("apply", 4) == f"r8-s64-e64-d0-{few}"
    assert choice("apply", l2 // 8 - 1) == many  # A row moves 4 KiB: less than half of L2.
    assert choice("apply", l2 // 8) == many.replace("r192", "r32").replace("r96", "r32")
    assert choice("apply", l2 // 8) in names


def test_a_device_is_near_with_the_same_vendor_family_and_l2() -> None:
    device = Cpu("AuthenticAMD", 25, 1, 32, 512, 32768)
    assert device.is_near("amd-f25-m97-32-512-480000")
    for other in ("amd-f26-m1-32-512-32768", "amd-f25-m1-32-1024-32768", "amd-f25"):
        assert not device.is_near(other)
    assert device.cold_bytes == 128 << 20
    assert dataclasses.replace(device, l3=480 << 10).cold_bytes == 256 << 20


@pytest.mark.parametrize("isas", ["auto", "scalar,twin"])
def test_tables_of_both_dtypes_are_loaded_together_and_wrong_ones_ignored(
    tmp_path: Path, isas: str
) -> None:
    """fp32 and bf16 may use different instruction sets."""
    with tiles.isa(isas):
        _check_tables_of_both_dtypes(tmp_path)


def _check_tables_of_both_dtypes(tmp_path: Path) -> None:
    name = tiles.configs("apply", "fp32")[0]["name"]
    shape = {"rows": 1, "d_in": 64, "d_out": 32, "rank": 16, "segments": 1}
    here, paths = Cpu.here(), {}
    for dtype in ("fp32", "bf16"):  # Each type may have an instruction set of its own.
        paths[dtype] = tiles.table_path(here, tiles.current_isa(dtype), dtype, tmp_path)
        entries = {f"{tiles.key('apply', dtype, **shape):032x}": name}
        paths[dtype].write_text(json.dumps({"version": tiles.VERSION, "entries": entries}))
    try:
        assert len(tiles.load_for_this_cpu(tmp_path)) == 2
        reset_counters()
        for form in FORMS[:2]:
            group = group_of(64, [32], [16], form.dtype)
            x, y = form.randn(1, 64), torch.zeros(1, 32, dtype=form.rows)
            op.apply(y, x, [Segment(0, 1, 0)], group, backend="cpu", threads=1)
        assert counters()["hits"] == 2
        virtual = dataclasses.replace(here, model=here.model + 1, l3=here.l3 + 1)
        isa = tiles.current_isa("bf16")
        paths["bf16"].rename(tiles.table_path(virtual, isa, "bf16", tmp_path))
        assert len(tiles.load_for_this_cpu(tmp_path)) == 2
        paths["fp32"].write_text(json.dumps({"version": 99, "entries": {}}))
        assert tiles.load_for_this_cpu(tmp_path) == []
        assert tiles.load_for_this_cpu(tmp_path / "none") == []
    finally:
        tiles.use({})
