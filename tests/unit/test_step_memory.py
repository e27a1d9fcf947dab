"""What a step keeps for the next: places for rows, angles of positions."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from vlora.kernels import ops
from vlora.model.decoder_config import DecoderConfig
from vlora.model.rotary import INITIAL_POSITIONS, Rotary, RotaryTable
from vlora.model.workspace import Workspace

WIDTHS = {
    "qkv": 16 + 2 * 8,
    "gate_up": 2 * 24,
    "normed": 20,
    "attended": 16,
    "gated": 24,
    "delta": 20,
}


@pytest.fixture
def workspace() -> Workspace:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden": 20, "intermediate": 24}
    return Workspace(Mock(DecoderConfig, **sizes))


def test_places_are_whole_rows_of_each_width(workspace: Workspace) -> None:
    rows = workspace.buffers(3)
    for name, width in WIDTHS.items():
        place = getattr(rows, name)
        assert place.shape == (3, width)
        assert place.is_contiguous()
        assert place.dtype == torch.float32


def test_what_is_read_never_lies_where_its_product_goes(workspace: Workspace) -> None:
    rows = workspace.buffers(5)

    def span(place: torch.Tensor) -> range:
        return range(place.data_ptr(), place.data_ptr() + place.numel() * 4)

    for source, to in (
        ("normed", "qkv"),
        ("qkv", "attended"),
        ("attended", "delta"),
        ("delta", "normed"),
        ("normed", "gate_up"),
        ("gate_up", "gated"),
        ("gated", "delta"),
    ):
        read, written = span(getattr(rows, source)), span(getattr(rows, to))
        assert read.stop <= written.start or written.stop <= read.start, (source, to)


def test_memory_grows_once_and_stays(workspace: Workspace) -> None:
    large = workspace.buffers(64).gate_up.data_ptr()
    assert workspace.buffers(2).gate_up.data_ptr() == large
    assert workspace.buffers(64).gate_up.data_ptr() == large
    assert workspace.buffers(65).gate_up.shape == (65, 48)
    assert workspace.buffers(0).delta.shape == (0, 20)


def test_no_rows_at_first(workspace: Workspace) -> None:
    assert workspace.buffers(0).qkv.shape == (0, 32)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_angles_are_those_of_each_position(scale: float) -> None:
    frequencies = 1.0 / 10_000 ** (torch.arange(8) / 8)
    table = RotaryTable(frequencies, scale)
    for positions in (
        [0],
        [5, 3, 3],
        [INITIAL_POSITIONS - 1],
        [INITIAL_POSITIONS],
        [7 * INITIAL_POSITIONS + 3, 2],
        [],
    ):
        at = torch.tensor(positions, dtype=torch.int64)
        found, wanted = table.lookup(at), Rotary.from_angles(at[:, None] * frequencies, scale)
        torch.testing.assert_close(found.cosines, wanted.cosines)
        torch.testing.assert_close(found.sines, wanted.sines)
        assert found.cosines.is_contiguous()
        assert found.sines.is_contiguous()


def test_a_place_that_does_not_fit_is_refused() -> None:
    matrix = ops.Matrix(torch.randn(6, 4))
    x = torch.randn(3, 4)
    wrong: list[Any] = [
        torch.empty(3, 5),
        torch.empty(2, 6),
        torch.empty(3, 6, dtype=torch.float64),
        torch.empty(6, 3).T,
    ]
    for out in wrong:
        with pytest.raises(ValueError, match=r"must be contiguous \[3, 6\]"):
            matrix(x, out=out)
    out = torch.empty(3, 6)
    assert matrix(x, out=out) is out
    torch.testing.assert_close(out, x @ matrix.weight.T)
    assert matrix(x, out=out, backend="reference") is out
