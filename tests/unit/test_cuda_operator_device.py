"""Tests of the operator's code for a GPU, with stand-ins for the functions of `torch.cuda`.

The emulation takes the place of the compiled library, and host memory that of a GPU.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support.atmm_problems import emulation
from vlora.atmm import groups
from vlora.atmm.cuda import library as c
from vlora.atmm.cuda import operator as operators
from vlora.atmm.cuda.choice import KernelChoice, Table
from vlora.atmm.cuda.library import CudaError, Library
from vlora.atmm.cuda.operator import MergedParts, Operator
from vlora.atmm.cuda.tables import NO_ADAPTER, DeviceGroup
from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import HeadMatrix, LoraPair, Segment

NAME = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the functions of `torch.cuda` that an operator calls.

    Return whether the stream is `capturing`, which a test may change, and `synchronize`.
    """
    state = SimpleNamespace(capturing=False, synchronize=Mock())
    properties = SimpleNamespace(multi_processor_count=7, name=NAME)
    functions = {
        "get_device_properties": lambda device: properties,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: state.capturing,
        "synchronize": state.synchronize,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return state


@pytest.fixture
def operator(cuda: SimpleNamespace) -> Operator:
    library = Library(emulation().path)
    library.emulated = False
    return Operator(library, torch.device("cpu"))


def _apply(operator: Operator, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a call adds to `rows` rows of zeros, and the right result."""
    pair = LoraPair(torch.randn(8, 64), torch.randn(40, 8))
    group = DeviceGroup(64, [40], torch.float32, operator.device)
    group.append([pair])
    group.ready()
    y, x = torch.zeros(rows, 40), torch.randn(rows, 64)
    operator.apply(y, x, operator.segments([Segment(0, rows, 0)]), group)
    return y, x @ pair.a.T @ pair.b.T


def test_calls_run_on_the_device_and_its_current_stream(
    operator: Operator, cuda: SimpleNamespace
) -> None:
    assert (operator.name, operator.multiprocessors) == (NAME, 7)
    torch.testing.assert_close(*_apply(operator, 3), rtol=1e-4, atol=1e-4)
    operator.check()
    assert cuda.synchronize.call_count == 1
    base = torch.randn(10)
    MergedParts(operator, [])(out := base.clone(), base)
    assert torch.equal(out, base)
    with pytest.raises(ValueError, match="a tensor is on meta; the operator is on cpu"):
        operator._check_device(torch.empty(1, device="meta"))


def test_a_workspace_does_not_grow_in_a_capture(operator: Operator, cuda: SimpleNamespace) -> None:
    cuda.capturing = True
    with pytest.raises(CudaError, match="must have run once before"):
        _apply(operator, 200)
    cuda.capturing = False
    _apply(operator, 200)
    cuda.capturing = True
    torch.testing.assert_close(*_apply(operator, 200), rtol=1e-4, atol=1e-4)
    assert len(operator.workspaces) == 2


@pytest.mark.parametrize("group", [LoraGroup(8, [4]), HeadGroup(8)], ids=["LoRA", "head"])
def test_a_group_has_a_new_version_before_other_threads_see_that_there_is_one(
    monkeypatch: pytest.MonkeyPatch, group: LoraGroup | HeadGroup
) -> None:
    """Otherwise a step could compare its copy with the old version, and take it for the latest."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(groups, "_publish", lambda version: seen.append((group.version, version)))
    group.append([None] if isinstance(group, LoraGroup) else None)
    ((version, latest),) = seen
    assert version == latest


def test_all_changed_slots_are_copied_from_one_pinned_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[bool] = []
    tensor = torch.tensor

    def make(values: object, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return tensor(values, **options)

    monkeypatch.setattr(torch, "tensor", make)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *arguments, **options: tensor)
    group = DeviceGroup(64, [40, 24, 8], torch.float32, torch.device("cuda", 0))
    group.ready()
    tables = [table.data_ptr() for table in group.tables]
    pairs = [LoraPair(torch.zeros(8 * rank, 64), torch.zeros(40, 8 * rank)) for rank in (1, 2)]
    for slot in range(5):
        group.put(slot, [pairs[slot % 2], None, pairs[0]])
    pinned.clear()
    group.ready()
    assert pinned == [True]
    assert [table.data_ptr() for table in group.tables] == tables
    for table, rows in zip(group.tables, group._rows, strict=True):
        assert table[:5].tolist() == [list(row) for row in rows]
        assert table[5:].tolist() == [list(NO_ADAPTER)] * (len(table) - 5)
    assert group.tables[0][:5, 2].tolist() == [8, 16, 8, 16, 8]
    pinned.clear()
    group.ready()
    assert pinned == []


@pytest.mark.parametrize(
    ("dtype", "pair"),
    [
        (torch.float32, LoraPair(torch.zeros(9, 64), torch.zeros(40, 9))),
        (torch.bfloat16, LoraPair(torch.zeros(8, 64), torch.zeros(40, 8))),
        (torch.float32, LoraPair(torch.zeros(64, 8).T, torch.zeros(40, 8))),
    ],
    ids=["rank", "type", "strides"],
)
def test_matrices_that_are_still_being_copied_are_not_copied_again(
    dtype: torch.dtype, pair: LoraPair
) -> None:
    """The second copy would not wait for the first one. Complete matrices may be copied."""
    group = LoraGroup(64, [40], dtype, "cuda")
    with pytest.raises(ValueError, match=r"slot 0: a matrix \[.* is still being copied"):
        group.put(0, [pair], wait=lambda: None)
    assert len(group) == 0
    group.put(0, [pair])
    sound = LoraPair(torch.zeros(8, 64, dtype=dtype), torch.zeros(40, 8, dtype=dtype))
    group.put(1, [sound], wait=lambda: None)
    on_device = DeviceGroup(64, [40], dtype, torch.device("cpu"))
    for slot, waited in enumerate((pair, sound)):
        on_device.put(slot, [group.pairs[0][slot]])
        in_place = tuple(matrix.data_ptr() for matrix in waited)
        assert (on_device._rows[0][slot][:2] == in_place) == (waited is sound)


def test_a_head_that_is_still_being_copied_is_not_copied_again() -> None:
    group = HeadGroup(64, "cuda")
    with pytest.raises(ValueError, match=r"slot 0: a matrix \[3\] of torch.float16 is still being"):
        group.put(0, HeadMatrix(torch.zeros(3, 64), torch.zeros(3).half()), wait=lambda: None)
    group.put(0, HeadMatrix(torch.zeros(3, 64), torch.zeros(3)), wait=lambda: None)
    assert len(group) == 1


@pytest.fixture
def no_operators() -> Iterator[None]:
    operators._on_device.cache_clear()
    yield
    operators._on_device.cache_clear()


@pytest.mark.usefixtures("no_operators")
def test_a_device_has_one_operator_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[torch.device] = []

    def make(library: Library, device: torch.device) -> SimpleNamespace:
        made.append(device)
        return SimpleNamespace(name=NAME, library=library)

    path = tmp_path / "table.json"
    monkeypatch.setattr(operators, "Operator", make)
    monkeypatch.setattr(operators, "table_path", lambda name: path)
    monkeypatch.setattr(c, "find_library", lambda: emulation().path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match="needs a GPU that torch can use"):
        operators.current()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with caplog.at_level("INFO"):
        assert operators.current() is operators.current()
    assert made == [torch.device("cuda", 3)]
    assert "no tile table" in caplog.text
    path.write_text(json.dumps({"entries": []}))
    monkeypatch.setattr(operators.Table, "load", lambda path, library: {"a": 1})
    operators._on_device.cache_clear()
    with caplog.at_level("INFO"):
        assert operators.current().table == {"a": 1}
    assert "table.json (1)" in caplog.text


def test_the_library_is_found_in_the_variable_or_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lib.so"
    monkeypatch.setenv(c.VARIABLE, str(path))
    with pytest.raises(ImportError, match=f"not built .*: no {path}"):
        c.find_library()
    path.touch()
    assert c.find_library() == path
    monkeypatch.delenv(c.VARIABLE)
    monkeypatch.setattr(c, "NAME", "no_such_library.so")
    with pytest.raises(ImportError, match=r"no_such_library\.so, .*no_such_library\.so"):
        c.find_library()


def test_a_library_with_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = emulation().path
    with monkeypatch.context() as patched:
        patched.setattr(c, "STRUCTURES", (*c.STRUCTURES[:-1], c.SegmentStruct))
        with pytest.raises(CudaError, match="has structures of"):
            Library(path)
    monkeypatch.setattr(c, "VERSION", c.VERSION + 1)
    with pytest.raises(CudaError, match=f"has interface version {c.VERSION - 1}, not {c.VERSION}"):
        Library(path)


def test_wrong_tiles_and_segments_are_refused() -> None:
    library = emulation()
    with pytest.raises(ValueError, match="has no shrink tile 1x1 for bf16"):
        KernelChoice(shrink="1x1", expand="1x1").on(library, "bf16")
    assert len(Table({"a key": KernelChoice()})) == 1
    with pytest.raises(ValueError, match="segment"):
        library.arrange([(0, 1, 0, 5)])
