"""Tests of the choice of ATMM's CUDA kernels: by a table, or by an estimate of their time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.atmm_problems import emulation
from vlora.atmm.cuda.choice import KernelChoice, Shape, Table, built_in, by_rows
from vlora.atmm.cuda.library import Library
from vlora.atmm.cuda.operator import table_path

SHAPES = [
    Shape("bf16", rows, 4096, 12288, 64, segments, 3)
    for rows in (1, 4, 16, 512, 4096)
    for segments in (1, 8, 64)
]


def test_a_choice_is_read_back_from_its_name() -> None:
    for choice in (
        KernelChoice(),
        KernelChoice(row_block=4, row_slices=16),
        KernelChoice("64x64x32_32x32x32_3", "128x64x32_64x32x32_2", 7, 4, 4, 2),
    ):
        assert KernelChoice.parse(choice.name) == (
            choice
            if choice.shrink
            else KernelChoice(None, None, 1, 8, choice.row_block, choice.row_slices)
        )
    for wrong in (
        *("", "rows", "rows b1", "tiles b1 s1", "columns b1 s1"),
        *("a b s1; up to rows b1 s1", "a b; up to 4 rows b1 s1"),
    ):
        with pytest.raises(ValueError, match="not a configuration"):
            KernelChoice.parse(wrong)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_without_a_table_the_estimate_chooses_tiles_of_the_library(shape: Shape) -> None:
    library = emulation()
    choice = built_in(shape, library, 132, tensor_cores=True)
    choice.on(library, shape.dtype)
    assert (choice.shrink is None) == (shape.rows <= 32)
    assert built_in(shape, library, 132, tensor_cores=False).shrink is None


def test_a_library_without_tiles_of_a_type_uses_row_kernels_for_it() -> None:
    """A build may have a part of the tiles: `make cuda CUDA="--limit 10"`."""
    library, shape = Library(emulation().path), SHAPES[-1]
    assert built_in(shape, library, 132, tensor_cores=True).shrink is not None
    for kinds in ((), ("shrink",), ("expand",)):
        library.tiles = tuple(tile for tile in emulation().tiles if tile.kind in kinds)
        assert built_in(shape, library, 132, tensor_cores=True) == by_rows(shape, 132)


def test_few_segments_of_one_row_are_sliced_in_depth_so_that_no_multiprocessor_idles() -> None:
    one = by_rows(Shape("bf16", 1, 4096, 4096, 64, 1), 132)
    many = by_rows(Shape("bf16", 1, 4096, 12288, 64, 64, 3), 132)
    assert one.row_slices == 8
    assert many.row_slices == 1


def test_a_table_serves_its_keys_and_skips_tiles_of_another_build(tmp_path: Path) -> None:
    library, path = emulation(), tmp_path / "table.json"
    known, gone = SHAPES[0], SHAPES[-1]
    rows = KernelChoice(row_slices=4)
    entries = {
        known.key: {"config": rows.name, "hot_us": 3.1, "cold_us": 7.0},
        gone.key: {"config": KernelChoice("1x1x1_1x1x1_9", "1x1x1_1x1x1_9").name},
    }
    path.write_text(json.dumps({"version": 2, "entries": entries}))
    table = Table.load(path, library)
    assert table.find(known) == rows
    assert table.find(gone) is None
    path.write_text(json.dumps({"version": 1, "entries": {}}))
    with pytest.raises(ValueError, match="version 1"):
        Table.load(path, library)


def test_a_table_is_named_after_its_device() -> None:
    assert table_path("NVIDIA A100-SXM4-80GB").name == "cuda-nvidia-a100-sxm4-80gb.json"
