"""Tests of memory that steps reuse: the workspace's buffers and the table of rotary angles."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from vlora.kernels import ops
from vlora.model.decoder_config import DecoderConfig
from vlora.model.rotary import INITIAL_POSITIONS, Rotary, RotaryTable
from vlora.model.workspace import Workspace

WIDTHS = {"qkv": 32, "gate_up": 48, "normed": 20, "attended": 16, "gated": 24, "delta": 20}


@pytest.fixture
def workspace() -> Workspace:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden": 20, "intermediate": 24}
    return Workspace(Mock(DecoderConfig, **sizes))


def test_buffers_are_contiguous_rows_of_each_width(workspace: Workspace) -> None:
    buffers = workspace.buffers(3)
    for name, width in WIDTHS.items():
        buffer = getattr(buffers, name)
        assert buffer.shape == (3, width)
        assert buffer.is_contiguous()
        assert buffer.dtype == torch.float32


def test_no_operation_reads_and_writes_the_same_memory(workspace: Workspace) -> None:
    buffers = workspace.buffers(5)

    def addresses(buffer: torch.Tensor) -> range:
        return range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * 4)

    for source, target in (
        ("normed", "qkv"),
        ("qkv", "attended"),
        ("attended", "delta"),
        ("delta", "normed"),
        ("normed", "gate_up"),
        ("gate_up", "gated"),
        ("gated", "delta"),
    ):
        read, written = addresses(getattr(buffers, source)), addresses(getattr(buffers, target))
        assert read.stop <= written.start or written.stop <= read.start, (source, target)


def test_memory_grows_to_the_largest_step_and_is_reused(workspace: Workspace) -> None:
    assert workspace.buffers(0).qkv.shape == (0, 32)
    large = workspace.buffers(64).gate_up.data_ptr()
    assert workspace.buffers(2).gate_up.data_ptr() == large
    assert workspace.buffers(64).gate_up.data_ptr() == large
    assert workspace.buffers(65).gate_up.shape == (65, 48)
    assert workspace.buffers(0).delta.shape == (0, 20)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_the_table_holds_the_angles_of_each_position(scale: float) -> None:
    frequencies = 1.0 / 10_000 ** (torch.arange(8) / 8)
    table, end = RotaryTable(frequencies, scale), INITIAL_POSITIONS
    for positions in ([0], [5, 3, 3], [end - 1], [end], [7 * end + 3, 2], []):
        indices = torch.tensor(positions, dtype=torch.int64)
        table.extend(indices)
        rotary = table.lookup(indices)
        expected = Rotary.from_angles(indices[:, None] * frequencies, scale)
        torch.testing.assert_close(rotary.cosines, expected.cosines)
        torch.testing.assert_close(rotary.sines, expected.sines)
        assert rotary.cosines.is_contiguous()
        assert rotary.sines.is_contiguous()


def test_an_out_tensor_that_does_not_fit_is_refused() -> None:
    matrix, x, out = ops.Matrix(torch.randn(6, 4)), torch.randn(3, 4), torch.empty(3, 6)
    for wrong in (torch.empty(3, 5), torch.empty(2, 6), out.double(), torch.empty(6, 3).T):
        with pytest.raises(ValueError, match=r"must be contiguous \[3, 6\]"):
            matrix(x, out=wrong)
    assert matrix(x, out=out) is out
    torch.testing.assert_close(out, x @ matrix.weight.T)
    assert matrix(x, out=out, backend="reference") is out
